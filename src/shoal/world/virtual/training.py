"""Local steps of virtual workers: the plain loop, which is the reference, and all of them as one program.

Between two rounds workers do not touch each other, so their steps may be computed in any order. The plain
loop takes one worker after another, with a module and a ``torch.optim`` optimizer of its own. The other
takes neighbouring rows through a step together (:mod:`shoal.study.engines`), and what is left over, where one
worker has more steps to do than its neighbours, row by row. Both work on the same rows; they agree to
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.order import Indices
from shoal.study.engines.block import Block, NotStackable
from shoal.study.engines.layers import LayersProgram
from shoal.study.engines.pool import torch_optimizer
from shoal.study.engines.stack import Program
from shoal.study.engines.task import Task
from shoal.study.engines.update import LONG_ROW, Floats, RowUpdate, Settings
from shoal.study.engines.vmap import VmapProgram
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.faults import Faults
from shoal.world.virtual.stack import Optimizer, Stack

_TORCH_SLOTS = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}

LEAST_TOGETHER = 4
"""Steps for which it pays to take fewer rows than a full chunk together."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Steps of one worker.

    Args:
        row: its row.
        samples: of each step, shape (steps, local_batch).
        lr: of each step, shape (steps,).
        first: the worker's own number of the first of them; where its faults begin counts by it.
        faults: of the worker.
    """

    row: int
    samples: Indices
    lr: Floats
    first: int = 0
    faults: Faults = field(default_factory=lambda: Faults(worker=0))

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.samples)


class Training(Protocol):
    """Advances rows of a stack."""

    @property
    def name(self) -> str:
        """``loop``, ``layers`` or ``vmap``."""
        ...

    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """Do steps of several workers, at most one entry per row.

        Returns:
            By row, the loss of each step's batch before its update.
        """
        ...


class LoopTraining:
    """The plain loop over workers.

    Args:
        stack: whose rows are trained; modules and optimizers use its memory.
        workload: model, loss and training data.
        optimizer: of all workers.
    """

    name = "loop"

    def __init__(self, stack: Stack, workload: Workload, optimizer: Optimizer) -> None:
        self._stack, self._workload, self._optimizer = stack, workload, optimizer
        self._inputs, self._targets = workload.split("train")
        self._settings = _settings(optimizer, np.zeros(1))
        self._at: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}

    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """See :class:`Training`."""
        return {one.row: self._run(one) for one in work}

    def _run(self, work: Work) -> Floats:
        model, optimizer = self._in_row(work.row)
        gradients = work.faults.touch_gradients
        losses: list[Tensor] = []
        samples = torch.from_numpy(work.samples)
        for step, (rows, rate) in enumerate(zip(samples.unbind(0), work.lr.tolist(), strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            x, y = self._inputs.index_select(0, rows), self._targets.index_select(0, rows)
            loss = self._workload.loss(model(x), y).mean()
            loss.backward()
            if gradients:
                found = [p.grad for p in model.parameters() if p.grad is not None]
                work.faults.spoil(found, work.first + step)
            optimizer.step()
            losses.append(loss.detach())
        self._stack.steps[work.row] += work.steps
        return torch.stack(losses).double().numpy() if losses else np.zeros(0)

    def _in_row(self, row: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The row's module and optimizer; their tensors are the row itself."""
        if row not in self._at:
            self._at[row] = self._made(row)
        model, optimizer = self._at[row]
        if self._optimizer.kind == "adamw":
            for parameter in model.parameters():
                optimizer.state[parameter]["step"].fill_(float(self._stack.steps[row]))
        return model, optimizer

    def _made(self, row: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        stack = self._stack
        model = self._workload.build(0).train()
        views = stack.layout.views(stack.parameters[row])
        for name, parameter in model.named_parameters():
            parameter.data = views[name]
        for name, rows in stack.buffers.items():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = rows[row]
        optimizer = torch_optimizer(self._optimizer.kind, self._settings, model)
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for slot, rows in stack.slots.items():
                state[_TORCH_SLOTS[slot]] = stack.layout.views(rows[row])[name]
            if self._optimizer.kind == "adamw":
                state["step"] = torch.zeros(())
        return model, optimizer


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
            [_settings(self._optimizer, w.lr[at]) for w, at in pairs],
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


def _settings(optimizer: Optimizer, lr: Floats) -> Settings:
    return Settings(
        lr=lambda start, steps: lr,
        momentum=0.0 if optimizer.kind in ("sgd", "adamw") else optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        eps=optimizer.eps,
    )


def rows_together(numbers: int) -> int:
    """Rows that are best trained together: as many as stay in a processor's second-level cache."""
    return 8 if numbers >= LONG_ROW else 16
