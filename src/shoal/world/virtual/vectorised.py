"""Neighbouring rows trained by one tensor program, and what is left over row by row."""

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

LEAST_TOGETHER = 4
"""Steps for which it pays to take fewer rows than a full chunk together."""


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
        work: of the rows, in their order.
        done: steps of this call that were done before the plan's first.
    """

    def __init__(self, update: RowUpdate, chunk: _Chunk, work: Sequence[Work], done: int) -> None:
        self._update, self._chunk, self._done = update, chunk, done
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
        work.faults.spoil(views, work.first + self._done + step)


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
        self._chunks: dict[tuple[int, int], tuple[_Chunk, RowUpdate]] = {}
        self._kept: Tensor | None = None
        self._whole: RowUpdate | None = None

    @torch.no_grad()
    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """See :class:`Training`."""
        losses = {one.row: np.zeros(one.steps) for one in work}
        chunks: dict[int, dict[int, Work]] = {}
        for one in work:
            chunks.setdefault(one.row // self._together, {})[one.row] = one
        for number in sorted(chunks):
            self._run_chunk(number * self._together, chunks[number], losses)
        for one in work:
            self._stack.steps[one.row] += one.steps
        return losses

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

    def _run_chunk(self, first: int, work: Mapping[int, Work], losses: dict[int, Floats]) -> None:
        """Take all rows together as far as the one with fewest steps goes, then what is left."""
        done = dict.fromkeys(work, 0)
        rows = [row for row in range(first, first + self._together) if row in work]
        while rows and rows == list(range(first, first + len(rows))):
            steps = min(work[row].steps - done[row] for row in rows)
            if steps >= LEAST_TOGETHER or len(rows) == self._together:
                self._run(rows, work, done, steps, losses)
            rows = [row for row in rows if done[row] < work[row].steps]
            if steps < LEAST_TOGETHER:
                break
        for row in work:
            left = work[row].steps - done[row]
            if left:
                self._run([row], work, done, left, losses)

    def _run(
        self,
        rows: Sequence[int],
        work: Mapping[int, Work],
        done: dict[int, int],
        steps: int,
        losses: dict[int, Floats],
    ) -> None:
        """The next ``steps`` steps of neighbouring rows."""
        if not steps:
            return
        chunk, update = self._chunk(rows)
        parts = [work[row] for row in rows]
        spans = [slice(done[row], done[row] + steps) for row in rows]
        pairs = list(zip(parts, spans, strict=True))
        chosen = np.stack([w.samples[at] for w, at in pairs], axis=1)
        samples = torch.from_numpy(np.ascontiguousarray(chosen)).view(steps, -1)
        update.plan(
            [settings_of(self._optimizer, w.lr[at]) for w, at in pairs],
            [self._stack.steps[row] + done[row] for row in rows],
            steps,
        )
        applied = update
        if any(w.faults.touch_gradients for w in parts):
            applied = cast(RowUpdate, _SpoiledUpdate(update, chunk, parts, done[rows[0]]))
        found = torch.empty((steps, len(rows)), dtype=self._stack.layout.dtype)
        step, block = self._program.step, cast(Block, chunk)
        for number, (part, out) in enumerate(zip(samples.unbind(0), found.unbind(0), strict=True)):
            step(block, len(rows), part, out, applied, number)
        for row, column in zip(rows, found.double().numpy().T, strict=True):
            losses[row][done[row] : done[row] + steps] = column
            done[row] += steps

    def _chunk(self, rows: Sequence[int]) -> tuple[_Chunk, RowUpdate]:
        key = (rows[0], rows[-1] + 1)
        if key not in self._chunks:
            chunk = _Chunk(self._stack, *key, self._gradients)
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
