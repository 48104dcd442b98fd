"""Rows trained side by side by one tensor program.

Neighbours are taken where they lie. Where they have unequal numbers of steps to do, those that have more
are copied together and taken further, as long as it pays; what is left goes row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from shoal.study.engines.block import Block, NotStackable
from shoal.study.engines.layers import LayersProgram
from shoal.study.engines.stack import Program
from shoal.study.engines.task import Task
from shoal.study.engines.update import LONG_ROW, Floats, RowUpdate
from shoal.study.engines.vmap import VmapProgram
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.stack import Optimizer, Stack
from shoal.world.virtual.training import Work, settings_of

_COSTLY_ROW = 65536
"""Numbers from which copying a row there and back costs more than a step side by side saves."""
_LEAST_STEPS = 4
"""Steps for which such rows are copied together all the same."""


@dataclass(frozen=True, kw_only=True)
class _StackTask:
    """What the engines' programs ask of a study's task."""

    workload: Workload
    global_batch: int
    inputs: Tensor
    targets: Tensor
    device: torch.device

    def initial(self, seed: int) -> nn.Module:
        return self.workload.build(seed).train()

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.workload.loss(outputs, targets).mean()


class _Chunk:
    """Neighbouring rows of a stack, as the engines' programs see a block of them."""

    def __init__(self, stack: Stack, first: int, last: int, gradients: Tensor) -> None:
        layout = stack.layout
        self.layout, self.rows, self.first = layout, last - first, first
        self.parameters = stack.parameters[first:last]
        self.gradients = gradients if len(gradients) == 1 else gradients[: last - first]
        self.slots = {name: rows[first:last] for name, rows in stack.slots.items()}
        self.extra = {name: rows[first:last] for name, rows in stack.buffers.items()}
        self.parameter_views = layout.views(self.parameters)
        self.gradient_views = layout.views(self.gradients)


class _SpoiledUpdate:
    """An update before which faults change the gradients of their workers' rows.

    Args:
        update: what is then done.
        chunk: the rows.
        work: of the rows, in their order; its first step is the plan's.
    """

    def __init__(self, update: RowUpdate, chunk: _Chunk, work: Sequence[Work]) -> None:
        self._update, self._chunk = update, chunk
        self._bad = {row: w for row, w in enumerate(work) if w.faults.touch_gradients}

    def apply(self, step: int, rows: int) -> None:
        """As ``RowUpdate.apply``."""
        for row in self._bad:
            if row < rows:
                self._spoil(step, row, row)
        self._update.apply(step, rows)

    def apply_row(self, step: int, row: int) -> None:
        """As ``RowUpdate.apply_row``."""
        if row in self._bad:
            self._spoil(step, row, 0 if len(self._chunk.gradients) == 1 else row)
        self._update.apply_row(step, row)

    def _spoil(self, step: int, row: int, at: int) -> None:
        work = self._bad[row]
        views = [view[at] for view in self._chunk.gradient_views.values()]
        work.faults.spoil(views, work.first + step)


class _KeptGradients:
    """In place of an update: gradients are kept, after faults have changed them.

    Args:
        chunk: the rows.
        work: one step of each.
        kept: ``[rows, numbers]`` of the chunk's rows, written.
    """

    def __init__(self, chunk: _Chunk, work: Sequence[Work], kept: Tensor) -> None:
        self._chunk, self._work, self._kept = chunk, work, kept

    def apply(self, step: int, rows: int) -> None:
        """As ``RowUpdate.apply``."""
        for row in range(rows):
            self.apply_row(step, row)

    def apply_row(self, step: int, row: int) -> None:
        """As ``RowUpdate.apply_row``."""
        at = 0 if len(self._chunk.gradients) == 1 else row
        self._kept[row].copy_(self._chunk.gradients[at])
        work = self._work[row]
        if work.faults.touch_gradients:
            views = list(self._chunk.layout.views(self._kept[row]).values())
            work.faults.spoil(views, work.first)


class VectorisedTraining:
    """Neighbouring rows trained by one tensor program.

    Args:
        stack: whose rows are trained.
        workload: model, loss and training data.
        optimizer: of all workers.
        local_batch: samples of every step.
        together: rows of a full chunk, >= 1.

    Raises:
        NotStackable: neither the written-out layers nor ``torch.func`` can train this model.
    """

    def __init__(
        self,
        stack: Stack,
        workload: Workload,
        optimizer: Optimizer,
        *,
        local_batch: int,
        together: int = 8,
    ) -> None:
        self._stack, self._optimizer = stack, optimizer
        self._together = min(together, stack.capacity)
        inputs, targets = workload.split("train")
        task = cast(
            Task,
            _StackTask(
                workload=workload,
                global_batch=local_batch,
                inputs=inputs.contiguous(),
                targets=targets.contiguous(),
                device=stack.layout.device,
            ),
        )
        self._program, self.name = _program(task, stack, self._together)
        turns = 1 if self._program.takes_turns else self._together
        self._gradients = torch.zeros((turns, stack.layout.numbers), dtype=stack.layout.dtype)
        self._chunks: dict[tuple[bool, int, int], tuple[_Chunk, RowUpdate]] = {}
        self._spare: Stack | None = None
        self._kept: Tensor | None = None
        self._whole: RowUpdate | None = None

    @torch.no_grad()
    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """See :class:`Training`."""
        losses = {one.row: np.zeros(one.steps) for one in work}
        left = {one.row: one for one in work if one.steps}
        for first in range(0, self._stack.capacity, self._together):
            rows = [row for row in range(first, first + self._together) if row in left]
            if len(rows) > 1 and rows == list(range(rows[0], rows[-1] + 1)):
                self._run(rows, left, losses, self._chunk(rows))
        while (rows := self._worth_copying(left)) and len(rows) > 1:
            self._run_copied(rows, left, losses)
        for row in sorted(left):
            self._run([row], left, losses, self._chunk([row]))
        return losses

    def _worth_copying(self, left: Mapping[int, Work]) -> list[int]:
        """Rows with most steps to do, none with fewer than half as many as the first."""
        least = _LEAST_STEPS if self._stack.layout.numbers >= _COSTLY_ROW else 1
        rows = sorted((r for r in left if left[r].steps >= least), key=lambda r: -left[r].steps)
        half = left[rows[0]].steps / 2 if rows else 0
        return [row for row in rows[: self._together] if left[row].steps >= half]

    def _run_copied(
        self, rows: Sequence[int], left: dict[int, Work], losses: Mapping[int, Floats]
    ) -> None:
        if self._spare is None:
            self._spare = self._stack.spare(self._together)
        self._spare.gather(self._stack, rows)
        self._run(rows, left, losses, self._chunk(range(len(rows)), self._spare))
        self._spare.scatter(self._stack, rows)

    def _run(
        self,
        rows: Sequence[int],
        left: dict[int, Work],
        losses: Mapping[int, Floats],
        chunk: tuple[_Chunk, RowUpdate],
    ) -> None:
        """Rows side by side, as far as the one with fewest steps goes; ``left`` keeps the rest."""
        parts, (memory, update) = [left[row] for row in rows], chunk
        steps = min(one.steps for one in parts)
        chosen = np.stack([one.samples[:steps] for one in parts], axis=1)
        samples = torch.from_numpy(np.ascontiguousarray(chosen)).view(steps, -1)
        update.plan(
            [settings_of(self._optimizer, one.lr[:steps]) for one in parts],
            [self._stack.steps[row] for row in rows],
            steps,
        )
        applied = update
        if any(one.faults.touch_gradients for one in parts):
            applied = cast(RowUpdate, _SpoiledUpdate(update, memory, parts))
        found = torch.empty((steps, len(rows)), dtype=self._stack.layout.dtype)
        step, block = self._program.step, cast(Block, memory)
        for number, (part, out) in enumerate(zip(samples.unbind(0), found.unbind(0), strict=True)):
            step(block, len(rows), part, out, applied, number)
        for one, column in zip(parts, found.double().numpy().T, strict=True):
            kept = losses[one.row]
            at = len(kept) - one.steps
            kept[at : at + steps] = column
            self._stack.steps[one.row] += steps
            del left[one.row]
            if one.steps > steps:
                left[one.row] = one.part(steps, one.steps)

    @torch.no_grad()
    def gradients(self, work: Sequence[Work]) -> tuple[Tensor, Mapping[int, Floats]]:
        """See :class:`Training`."""
        kept = self._all_gradients()[: len(work)]
        losses: dict[int, Floats] = {}
        for first in range(0, len(work), self._together):
            rows = range(first, min(first + self._together, len(work)))
            parts = [work[row] for row in rows]
            chunk, _ = self._chunk(rows)
            samples = torch.from_numpy(np.concatenate([one.samples[0] for one in parts]))
            out = torch.empty(len(rows), dtype=self._stack.layout.dtype)
            keep = cast(RowUpdate, _KeptGradients(chunk, parts, kept[first:]))
            self._program.step(cast(Block, chunk), len(rows), samples, out, keep, 0)
            losses |= {row: out[row - first : row - first + 1].double().numpy() for row in rows}
        return kept, losses

    @torch.no_grad()
    def update(self, work: Sequence[Work], gradients: Tensor) -> None:
        """See :class:`Training`."""
        mine = self._all_gradients()
        if gradients.data_ptr() != mine.data_ptr() or not gradients.is_contiguous():
            mine[: len(work)].copy_(gradients)
        assert self._whole is not None
        self._whole.plan(
            [settings_of(self._optimizer, one.lr) for one in work],
            [self._stack.steps[one.row] for one in work],
            1,
        )
        self._whole.apply(0, len(work))
        for one in work:
            self._stack.steps[one.row] += 1

    def _all_gradients(self) -> Tensor:
        """Memory for the gradients of all rows, made on first use."""
        if self._kept is None:
            stack = self._stack
            self._kept = torch.zeros_like(stack.parameters)
            self._whole = RowUpdate(
                self._optimizer.kind,
                decays=self._optimizer.weight_decay > 0,
                parameters=stack.parameters,
                gradients=self._kept,
                slots=list(stack.slots.values()),
            )
        return self._kept

    def _chunk(self, rows: Sequence[int], stack: Stack | None = None) -> tuple[_Chunk, RowUpdate]:
        """Neighbouring rows and their update, made on first use."""
        stack = stack or self._stack
        key = (stack is self._stack, rows[0], rows[-1] + 1)
        if key not in self._chunks:
            chunk = _Chunk(stack, rows[0], rows[-1] + 1, self._gradients)
            self._chunks[key] = (
                chunk,
                RowUpdate(
                    self._optimizer.kind,
                    decays=self._optimizer.weight_decay > 0,
                    parameters=chunk.parameters,
                    gradients=chunk.gradients,
                    slots=list(chunk.slots.values()),
                ),
            )
        return self._chunks[key]


def _program(task: Task, stack: Stack, rows: int) -> tuple[Program, str]:
    """Written-out layers where the model is a chain of them, else ``torch.func``."""
    try:
        return LayersProgram(task, stack.layout, rows), "layers"
    except NotStackable:
        return VmapProgram(task, stack.layout), "vmap"


def rows_together(numbers: int) -> int:
    """Rows that are best trained together: as many as stay in a processor's second-level cache."""
    return 8 if numbers >= LONG_ROW else 16
