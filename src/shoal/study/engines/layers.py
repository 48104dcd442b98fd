"""Models of plain layers, all trials' layers as one: no autograd, nothing allocated that need not be.

Behind the images, activations are (trials, features, samples): with ``w @ x^T`` the weights, their
gradients and their updates are all contiguous, worth a factor of two over ``x @ w^T``. Images are
(samples, trials * channels, height, width) with the channels last in memory: one grouped convolution for
all trials, in the layout in which processors do it two to three times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.study.engines.block import Block, Layout, NotStackable
from shoal.study.engines.chain import Convolution, Flatten, Linear, chain_of
from shoal.study.engines.layer_steps import Step, step_of
from shoal.study.engines.task import Task
from shoal.study.engines.update import RowUpdate, is_long
from shoal.study.workload import cross_entropy


class LayersProgram:
    """Gradients of stacked chains of layers, written out.

    Args:
        task: what is trained.
        layout: of a row.
        rows: of a block.

    Raises:
        NotStackable: the model is not such a chain, its layers do not fit the data, or a parameter is
            not trained.
    """

    def __init__(self, task: Task, layout: Layout, rows: int) -> None:
        self._task, self._layout = task, layout
        self.takes_turns = is_long(layout.numbers, layout.device)
        chain = chain_of(task.initial(0))
        if isinstance(chain[0], Flatten | Linear):
            chain = [layer for layer in chain if not isinstance(layer, Flatten)]
        self._chain = chain
        self._check()
        self._inputs = self._prepared(task.inputs)
        memory = torch.empty(rows * task.global_batch * self._inputs[0].numel(), dtype=layout.dtype)
        self._x = memory.to(layout.device).view(rows * task.global_batch, *self._inputs.shape[1:])
        self._y = torch.empty(
            (rows * task.global_batch, *task.targets.shape[1:]),
            dtype=task.targets.dtype,
            device=layout.device,
        )
        self._plans: dict[tuple[int, int], _Plan] = {}
        closed = task.workload.loss is cross_entropy and task.targets.dtype == torch.int64
        self._top: Callable[[_Plan, Tensor, Tensor], Tensor] = (
            self._cross_entropy if closed and task.targets.dim() == 1 else self._any_loss
        )

    def _check(self) -> None:
        layout, task, first = self._layout, self._task, self._chain[0]
        layers = [layer for layer in self._chain if isinstance(layer, Linear | Convolution)]
        used = {name for layer in layers for name in (layer.weight, layer.bias) if name}
        if used != set(layout.places) or layout.buffers or layout.frozen:
            raise NotStackable("it has parameters or buffers beside its layers'")
        if task.inputs.dtype != layout.dtype:
            raise NotStackable(f"its inputs are {task.inputs.dtype}, its weights {layout.dtype}")
        if isinstance(first, Linear) and task.inputs[0].numel() != first.inputs:
            raise NotStackable("its first layer does not take all of a sample's numbers")
        if not isinstance(first, Linear) and task.inputs.dim() != 4:
            raise NotStackable("its first layer takes images, which the data does not have")

    @property
    def _has_images(self) -> bool:
        return not isinstance(self._chain[0], Linear)

    def _prepared(self, inputs: Tensor) -> Tensor:
        return inputs if self._has_images else inputs.flatten(1)

    def step(
        self,
        block: Block,
        rows: int,
        samples: Tensor,
        losses: Tensor,
        update: RowUpdate,
        number: int,
    ) -> None:
        """One step: forward, backward, update; see ``Program``.

        Long rows' weight gradients are computed one trial at a time and used at once: what a matrix
        product has just written is then still in the cache when the update reads it.
        """
        plan = self._plans.get((id(block), rows))
        if plan is None:
            plan = self._plans[id(block), rows] = self._bind(block, rows)
        torch.index_select(self._inputs, 0, samples, out=plan.x)
        torch.index_select(self._task.targets, 0, samples, out=plan.y)
        h = plan.first
        if self._has_images:
            # (trials, samples, ...) to (samples, height, width, trials, channels) in memory.
            h = h.permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)
        for step in plan.steps:
            h = step.forward(h)
        d = self._top(plan, h, losses)
        for step in reversed(plan.steps):
            d = step.backward(d)
        if not self.takes_turns:
            update.apply(number, rows)
            return
        for row in range(rows):
            for step in plan.steps:
                step.write_row(row)
            update.apply_row(number, row)

    @torch.no_grad()
    def outputs(self, block: Block, rows: int, inputs: Tensor) -> Tensor | None:
        """Linear models with short rows side by side; see ``Program``."""
        if self.takes_turns or self._has_images:
            return None
        h = inputs.flatten(1).t().expand(rows, -1, -1)
        for layer in self._chain:
            assert isinstance(layer, Linear)
            weight = block.parameter_views[layer.weight][:rows]
            if layer.bias is None:
                h = torch.bmm(weight, h)
            else:
                h = torch.baddbmm(block.parameter_views[layer.bias][:rows, :, None], weight, h)
            if layer.relu:
                h.relu_()
        return h.transpose(1, 2)

    def _bind(self, block: Block, rows: int) -> _Plan:
        batch = self._task.global_batch
        x = self._x[: rows * batch]
        first = x.view(rows, batch, *x.shape[1:])
        if not self._has_images:
            first = first.transpose(1, 2)
        steps = [
            step_of(layer, block, rows, batch, is_first=number == 0, takes_turns=self.takes_turns)
            for number, layer in enumerate(self._chain)
        ]
        return _Plan(steps=steps, x=x, first=first, y=self._y[: rows * batch])

    def _cross_entropy(self, plan: _Plan, logits: Tensor, losses: Tensor) -> Tensor:
        """softmax - one-hot, over the batch: the gradient of the mean cross entropy."""
        rows, _, batch = logits.shape
        wanted = plan.y.view(rows, 1, batch)
        log = torch.log_softmax(logits, 1)
        picked = log.gather(1, wanted)
        torch.mean(picked, (1, 2), out=losses).neg_()
        d = log.exp_()
        d.scatter_(1, wanted, d.gather(1, wanted).sub_(1))
        return d.div_(batch)

    def _any_loss(self, plan: _Plan, outputs: Tensor, losses: Tensor) -> Tensor:
        """The workload's own loss, whose gradient autograd finds at the outputs alone."""
        rows, features, batch = outputs.shape
        with torch.enable_grad():
            leaf = outputs.transpose(1, 2).reshape(rows * batch, features).requires_grad_()
            each = self._task.workload.loss(leaf, plan.y)
            (d,) = torch.autograd.grad(each.sum() / batch, leaf)
        torch.mean(each.detach().view(rows, batch), 1, out=losses)
        return d.view(rows, batch, features).transpose(1, 2).contiguous()


@dataclass(kw_only=True)
class _Plan:
    """Everything one call needs for a block and a number of rows."""

    steps: list[Step]
    x: Tensor
    first: Tensor
    y: Tensor
