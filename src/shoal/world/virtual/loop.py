"""The plain loop over workers: a module and a ``torch.optim`` optimizer each, one worker after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from shoal.study.engines.pool import torch_optimizer
from shoal.study.engines.update import Floats
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.stack import Optimizer, Stack
from shoal.world.virtual.training import Work, settings_of

_TORCH_SLOTS = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}


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
        self._settings = settings_of(optimizer, np.zeros(1))
        self._at: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}

    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """See :class:`Training`."""
        return {one.row: self._run(one) for one in work}

    def gradients(self, work: Sequence[Work]) -> tuple[Tensor, Mapping[int, Floats]]:
        """See :class:`Training`."""
        layout = self._stack.layout
        found = torch.zeros((len(work), layout.numbers), dtype=layout.dtype)
        losses: dict[int, Floats] = {}
        for one in work:
            model, optimizer = self._in_row(one.row)
            optimizer.zero_grad(set_to_none=True)
            losses[one.row] = np.array(
                [float(self._backward(model, torch.from_numpy(one.samples[0])))]
            )
            views = list(layout.views(found[one.row]).values())
            for view, parameter in zip(views, model.parameters(), strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
            one.faults.spoil(views, one.first)
        return found, losses

    def update(self, work: Sequence[Work], gradients: Tensor) -> None:
        """See :class:`Training`."""
        for one, row in zip(work, gradients, strict=True):
            model, optimizer = self._in_row(one.row)
            for group in optimizer.param_groups:
                group["lr"] = float(one.lr[0])
            views = self._stack.layout.views(row.contiguous())
            for name, parameter in model.named_parameters():
                parameter.grad = views[name]
            optimizer.step()
            self._stack.steps[one.row] += 1

    def _backward(self, model: nn.Module, rows: Tensor) -> Tensor:
        x, y = self._inputs.index_select(0, rows), self._targets.index_select(0, rows)
        loss = self._workload.loss(model(x), y).mean()
        loss.backward()
        return loss.detach()

    def _run(self, work: Work) -> Floats:
        model, optimizer = self._in_row(work.row)
        gradients = work.faults.touch_gradients
        losses: list[Tensor] = []
        samples = torch.from_numpy(work.samples)
        for step, (rows, rate) in enumerate(zip(samples.unbind(0), work.lr.tolist(), strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            losses.append(self._backward(model, rows))
            if gradients:
                found = [p.grad for p in model.parameters() if p.grad is not None]
                work.faults.spoil(found, work.first + step)
            optimizer.step()
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
