"""Models of plain layers, all trials' layers as one: no autograd, nothing allocated that need not be.

A model that is a chain of linear layers and ReLUs is trained by a dozen batched matrix products a step.
Activations are (trials, features, samples): with ``w @ x^T`` weights, their gradients and their updates are
all contiguous, which is worth a factor of two over ``x @ w^T``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from shoal.study.engines.block import Block, Layout, NotStackable
from shoal.study.engines.task import Task
from shoal.study.engines.update import LONG_ROW
from shoal.study.workload import cross_entropy

_RELU_CALLS: tuple[object, ...] = (torch.relu, nn.functional.relu, "relu", "relu_")
_FLATTEN_CALLS: tuple[object, ...] = (torch.flatten, "flatten")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer of the chain; ``relu`` if one follows. ``bias`` is None where it has none."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    relu: bool


def chain_of(model: nn.Module) -> list[Linear]:
    """The model's linear layers in order, each with the ReLU behind it.

    Found by tracing, so it may be a ``Sequential``, nested, or a module whose ``forward`` amounts to one.

    Args:
        model: to be read.

    Raises:
        NotStackable: it holds anything else, branches, shares weights, or cannot be traced.
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # a user's forward may fail in any way under a tracer
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotStackable(f"its forward cannot be traced: {reason[0]}") from error
    modules = dict(model.named_modules())
    nodes = list(graph.nodes)
    chain: list[Linear] = []
    previous = nodes[0]
    for node in nodes[1:]:
        if node.all_input_nodes != [previous] or len(previous.users) != 1:
            raise NotStackable(f"it is not a chain at {node.name}")
        previous = node
        if node.op == "output":
            break
        _take(chain, node, modules.get(str(node.target)) if node.op == "call_module" else None)
    if not chain:
        raise NotStackable("it has no linear layer")
    names = [layer.weight for layer in chain]
    if len(set(names)) != len(names):
        raise NotStackable("it uses a layer twice")
    return chain


def _take(chain: list[Linear], node: fx.Node, module: nn.Module | None) -> None:
    """Add what a node does to the chain."""
    if type(module) is nn.Linear:
        prefix = str(node.target)
        chain.append(
            Linear(
                weight=f"{prefix}.weight",
                bias=None if module.bias is None else f"{prefix}.bias",
                inputs=module.in_features,
                outputs=module.out_features,
                relu=False,
            )
        )
        return
    if type(module) is nn.Identity:
        return
    flattens = (type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)) or (
        node.target in _FLATTEN_CALLS and node.args[1:] == (1,) and not node.kwargs
    )
    if flattens:
        return  # before the first layer as behind it: the samples' numbers are one axis throughout
    is_relu = type(module) is nn.ReLU or (
        node.op in ("call_function", "call_method") and node.target in _RELU_CALLS
    )
    if is_relu and chain and not chain[-1].relu:
        last = chain.pop()
        chain.append(
            Linear(
                weight=last.weight,
                bias=last.bias,
                inputs=last.inputs,
                outputs=last.outputs,
                relu=True,
            )
        )
        return
    what = type(module).__name__ if module is not None else str(node.target)
    raise NotStackable(f"it has {what}, not only linear layers and ReLUs")


@dataclass(kw_only=True)
class _Bound:
    """A layer's tensors for the first rows of one block: views and the program's own memory."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    bias_gradient: Tensor | None
    output: Tensor
    relu: bool
    back: Tensor | None


@dataclass(kw_only=True)
class _Plan:
    """Everything one call needs for a block and a number of rows."""

    layers: list[_Bound]
    x: Tensor
    first: Tensor
    y: Tensor


class LayersProgram:
    """Gradients of stacked chains of linear layers, written out.

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
        self._chain = chain_of(task.initial(0))
        used = [name for layer in self._chain for name in (layer.weight, layer.bias) if name]
        if set(used) != set(layout.places) or layout.buffers or layout.frozen:
            raise NotStackable("it has parameters or buffers beside its linear layers'")
        if task.inputs.dtype != layout.dtype:
            raise NotStackable(f"its inputs are {task.inputs.dtype}, its weights {layout.dtype}")
        self._inputs = task.inputs.flatten(1)
        if self._inputs.shape[1] != self._chain[0].inputs:
            raise NotStackable("its first layer does not take all of a sample's numbers")
        batch = task.global_batch

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=layout.dtype, device=layout.device)

        self._x = new(rows * batch, self._chain[0].inputs)
        self._outputs = [new(rows, layer.outputs, batch) for layer in self._chain]
        self._backs = [new(rows, layer.inputs, batch) for layer in self._chain]
        self._y = torch.empty(
            (rows * batch, *task.targets.shape[1:]),
            dtype=task.targets.dtype,
            device=layout.device,
        )
        self._plans: dict[tuple[int, int], _Plan] = {}
        closed = task.workload.loss is cross_entropy and task.targets.dtype == torch.int64
        self._top: Callable[[_Plan, Tensor, Tensor], Tensor] = (
            self._cross_entropy if closed and task.targets.dim() == 1 else self._any_loss
        )

    def gradients(self, block: Block, rows: int, samples: Tensor, losses: Tensor) -> None:
        """One step's forward and backward pass; see ``Program``."""
        plan = self._plans.get((id(block), rows))
        if plan is None:
            plan = self._plans[id(block), rows] = self._bind(block, rows)
        torch.index_select(self._inputs, 0, samples, out=plan.x)
        torch.index_select(self._task.targets, 0, samples, out=plan.y)
        h = plan.first
        for layer in plan.layers:
            if layer.bias is None:
                torch.bmm(layer.weight, h, out=layer.output)
            else:
                torch.baddbmm(layer.bias, layer.weight, h, out=layer.output)
            h = layer.output.relu_() if layer.relu else layer.output
        d = self._top(plan, h, losses)
        for number in range(len(plan.layers) - 1, -1, -1):
            layer = plan.layers[number]
            if layer.relu:
                d = torch.ops.aten.threshold_backward(d, layer.output, 0)
            below = plan.layers[number - 1].output if number else plan.first
            torch.bmm(d, below.transpose(1, 2), out=layer.weight_gradient)
            if layer.bias_gradient is not None:
                torch.sum(d, 2, keepdim=True, out=layer.bias_gradient)
            if layer.back is not None:
                d = torch.bmm(layer.weight_t, d, out=layer.back)

    @torch.no_grad()
    def outputs(self, block: Block, rows: int, inputs: Tensor) -> Tensor | None:
        """Models with short rows side by side; see ``Program``."""
        if self._layout.numbers > LONG_ROW:
            return None
        h = inputs.flatten(1).t().expand(rows, -1, -1)
        for layer in self._chain:
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
        layers: list[_Bound] = []
        for number, layer in enumerate(self._chain):
            weight = block.parameter_views[layer.weight][:rows]
            bias = bias_gradient = None
            if layer.bias is not None:
                bias = block.parameter_views[layer.bias][:rows, :, None]
                bias_gradient = block.gradient_views[layer.bias][:rows, :, None]
            layers.append(
                _Bound(
                    weight=weight,
                    weight_t=weight.transpose(1, 2),
                    bias=bias,
                    weight_gradient=block.gradient_views[layer.weight][:rows],
                    bias_gradient=bias_gradient,
                    output=self._outputs[number][:rows],
                    relu=layer.relu,
                    back=self._backs[number][:rows] if number else None,
                )
            )
        first = x.view(rows, batch, -1).transpose(1, 2)
        return _Plan(layers=layers, x=x, first=first, y=self._y[: rows * batch])

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
