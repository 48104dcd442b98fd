"""Many trials trained by one tensor program: which trial is in which row, and for how many steps.

Rows come in blocks, and one call of the program takes the first rows of one block through a step. A
trial keeps its row from call to call; rows are exchanged only to bring those that have steps to do
together: where some have ended, where a caller advances a part, or where one that reaches its target makes
room for one that waits. How many rows a call takes is one of a few allowed sizes, those for which the
program was seen to give each row the same bits; between the trials' number and the next size, rows of
zeros are trained along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.study.engines.block import Block, Layout
from shoal.study.engines.contract import SavedTrial
from shoal.study.engines.held import HeldTrials
from shoal.study.engines.task import Task
from shoal.study.engines.update import SLOTS, Floats, RowUpdate, Settings
from shoal.study.records import Trial

_PLANNED_INDICES = 2**17
"""Sample indices held for one plan: 1 MiB."""
_PLANNED_STEPS = 512


class Program(Protocol):
    """Trains the first rows of a block."""

    @property
    def takes_turns(self) -> bool:
        """Whether gradients are computed and used row by row, so that a block needs one row of them."""
        ...

    def step(
        self,
        block: Block,
        rows: int,
        samples: Tensor,
        losses: Tensor,
        update: RowUpdate,
        number: int,
    ) -> None:
        """One step: forward, backward, update.

        Args:
            block: whose parameters and buffers are moved on.
            rows: how many of its rows take part.
            samples: indices into the training set, (rows * global_batch,), row after row.
            losses: written: each row's mean loss, (rows,).
            update: of this block.
            number: of the step in the update's plan.
        """
        ...

    def outputs(self, block: Block, rows: int, inputs: Tensor) -> Tensor | None:
        """What the first rows' models give for the same inputs, (rows, samples, ...), or None."""
        ...


class _At(NamedTuple):
    block: int
    row: int


class StackEngine(HeldTrials):
    """Trains trials side by side.

    Args:
        name: of the engine.
        task: what to train.
        layout: of a row.
        program: computes gradients.
        slots: rows of a block, >= 1.
        sizes: allowed numbers of rows in a call, rising; the last is ``slots``. Only ``slots`` when None.

    Raises:
        UsageError: ``slots`` below 1, or ``sizes`` not as above.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        layout: Layout,
        program: Program,
        *,
        slots: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        sizes = tuple(sizes or (slots,))
        if slots < 1 or sizes[-1] != slots or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise UsageError(
                f"slots = {slots}, sizes = {sizes}; sizes rise and end with slots, which is at least 1"
            )
        self.name = name
        self.slots, self.sizes = slots, sizes
        self._task, self._layout, self._program = task, layout, program
        self._blocks: list[Block] = []
        self._updates: list[RowUpdate] = []
        self._rows: list[list[int | None]] = []
        self._at: dict[int, _At] = {}
        self._idle = Settings(lr=_no_rates)

    # -- coming and going ---------------------------------------------------------------------------

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        """Take a trial in; see the contract."""
        self._hold(trial, saved, self._task)
        at = self._free_row()
        self._blocks[at.block].load(at.row, self._task.initial(trial.seed), saved)
        self._rows[at.block][at.row] = trial.id
        self._at[trial.id] = at

    def release(self, trial: int) -> None:
        """Forget a trial."""
        del self._held[trial]
        at = self._at.pop(trial)
        self._rows[at.block][at.row] = None
        self._blocks[at.block].clear(at.row)

    def _free_row(self, *, beyond: int = 0, block: int | None = None) -> _At:
        """A row that no trial has, in a new block if need be; in ``block`` only from row ``beyond`` on."""
        for number, rows in enumerate(self._rows):
            first = beyond if number == block else 0
            for row in range(first, self.slots):
                if rows[row] is None:
                    return _At(number, row)
        made = Block(
            self._layout,
            self.slots,
            SLOTS[self._task.kind],
            gradient_rows=1 if self._program.takes_turns else self.slots,
        )
        self._blocks.append(made)
        self._rows.append([None] * self.slots)
        self._updates.append(
            RowUpdate(
                self._task.kind,
                decays=self._task.decays,
                parameters=made.parameters,
                gradients=made.gradients,
                slots=list(made.slots.values()),
            )
        )
        return _At(len(self._blocks) - 1, 0)

    def weights(self, trial: int) -> Mapping[str, Tensor]:
        """Parameters and buffers by name; see the contract."""
        at = self._at[trial]
        return self._blocks[at.block].weights(at.row)

    def outputs(self, trials: Sequence[int], inputs: Tensor) -> Tensor | None:
        """What the models give for the same inputs; see the contract."""
        blocks = {self._at[number].block for number in trials}
        if len(blocks) != 1:
            return None
        block, rows = blocks.pop(), [self._at[number].row for number in trials]
        size = next(size for size in self.sizes if size > max(rows))
        found = self._program.outputs(self._blocks[block], size, inputs)
        if found is None:
            return None
        return found[: len(rows)] if rows == list(range(len(rows))) else found[rows]

    def save(self, trial: int) -> SavedTrial:
        """A copy of everything; see the contract."""
        at = self._at[trial]
        return self._held[trial].saved(self._blocks[at.block].tensors(at.row))

    def portions(self, trials: Sequence[int]) -> Sequence[Sequence[int]]:
        """Stacks: trials that share a block come together, and no more of them than rows."""
        together = sorted(trials, key=lambda number: self._at[number])
        return [together[i : i + self.slots] for i in range(0, len(together), self.slots)]

    # -- training -----------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self, targets: Mapping[int, int]) -> None:
        """Train trials to the given steps; see the contract."""
        left = {n: t - self._held[n].step for n, t in targets.items() if self._held[n].step < t}
        for number in left:
            self._held[number].begin()
        block = None
        while left:
            if block is None or not self._in_block(block, left):
                block = max(range(len(self._blocks)), key=lambda b: len(self._in_block(b, left)))
            steps = self._run(block, self._gather(block, left), left)
            assert steps > 0
            left = {n: t - self._held[n].step for n, t in targets.items() if self._held[n].step < t}

    def _in_block(self, block: int, left: Mapping[int, int]) -> list[int]:
        return [n for n in self._rows[block] if n is not None and n in left]

    def _gather(self, block: int, left: Mapping[int, int]) -> list[int | None]:
        """Bring as many of ``left`` as fit to the first rows of a block; who is in these rows."""
        chosen = self._in_block(block, left)
        waiting = sorted((n for n in left if n not in chosen), key=lambda n: (-left[n], n))
        chosen += waiting[: self.slots - len(chosen)]
        size = next(size for size in self.sizes if size >= len(chosen))
        wanted = set(chosen)
        rows = self._rows[block]
        # Others leave the first rows, into the holes that the chosen leave or anywhere else.
        outside = [n for n in chosen if not (self._at[n].block == block and self._at[n].row < size)]
        for row in range(size):
            occupant = rows[row]
            if occupant is not None and occupant in wanted:
                continue
            if outside:
                self._exchange(_At(block, row), self._at[outside.pop()])
            elif occupant is not None:
                self._exchange(_At(block, row), self._free_row(beyond=size, block=block))
        assert not outside
        return rows[:size]

    def _exchange(self, one: _At, other: _At) -> None:
        self._blocks[one.block].swap(one.row, self._blocks[other.block], other.row)
        rows, others = self._rows[one.block], self._rows[other.block]
        rows[one.row], others[other.row] = others[other.row], rows[one.row]
        for at in (one, other):
            occupant = self._rows[at.block][at.row]
            if occupant is not None:
                self._at[occupant] = at

    def _run(self, block: int, rows: Sequence[int | None], left: Mapping[int, int]) -> int:
        """Train the first rows of a block until the first of them is where it is to be."""
        task, batch, size = self._task, self._task.global_batch, len(rows)
        held = {row: self._held[n] for row, n in enumerate(rows) if n is not None}
        steps = min(left[entry.trial.id] for entry in held.values())
        steps = max(1, min(steps, _PLANNED_STEPS, _PLANNED_INDICES // (size * batch)))
        indices = np.zeros((steps, size, batch), dtype=np.int64)
        for row, entry in held.items():
            indices[:, row] = entry.order.take(entry.step, steps)
        samples = torch.from_numpy(indices).view(steps, size * batch).to(task.device)
        losses = torch.empty((steps, size), dtype=self._layout.dtype, device=task.device)
        update = self._updates[block]
        update.plan(
            [held[r].settings if r in held else self._idle for r in range(size)],
            [held[r].step if r in held else 0 for r in range(size)],
            steps,
        )
        train, memory = self._program.step, self._blocks[block]
        for number, (part, out) in enumerate(zip(samples.unbind(0), losses.unbind(0), strict=True)):
            train(memory, size, part, out, update, number)
        for row, column in enumerate(losses.T.tolist()):
            if row in held:
                held[row].record(column)
        return steps


def _no_rates(start: int, steps: int) -> Floats:
    """Rows of zeros stay rows of zeros."""
    return np.zeros(steps)
