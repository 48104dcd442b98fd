"""Single layers of all trials, forward and backward, on the first rows of a block."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.study.engines.block import Block
from shoal.study.engines.chain import Convolution, Layer, Linear, MaxPool

_aten = torch.ops.aten


class Step(Protocol):
    """A layer of all trials: the first rows of one block."""

    def forward(self, x: Tensor) -> Tensor:
        """Its output, valid until the next call."""
        ...

    def backward(self, d: Tensor) -> Tensor:
        """The gradient at its input, garbage for the first layer; writes those of its parameters.

        Where trials take turns it only prepares the latter.
        """
        ...

    def write_row(self, row: int) -> None:
        """Where trials take turns: write the gradients of one trial's parameters."""
        ...


def step_of(
    layer: Layer, block: Block, rows: int, batch: int, *, is_first: bool, takes_turns: bool
) -> Step:
    """A layer of the first rows of a block.

    Args:
        layer: what it is.
        block: holds its parameters.
        rows: how many.
        batch: samples of each trial.
        is_first: whether nobody asks for the gradient at its input.
        takes_turns: whether the block has one row of gradients for all.
    """
    if isinstance(layer, Linear):
        step = _LinearStep(layer, block, rows, batch, is_first=is_first)
        return _TurnsLinearStep(step, layer, block) if takes_turns else step
    if isinstance(layer, Convolution):
        return _ConvolutionStep(layer, block, rows, is_first=is_first, takes_turns=takes_turns)
    return _PoolStep(layer) if isinstance(layer, MaxPool) else _FlattenStep(rows)


class _LinearStep:
    """(trials, inputs, samples) to (trials, outputs, samples)."""

    def __init__(
        self, layer: Linear, block: Block, rows: int, batch: int, *, is_first: bool
    ) -> None:
        self._weight = block.parameter_views[layer.weight][:rows]
        self._weight_t = self._weight.transpose(1, 2)
        self._weight_gradient = block.gradient_views[layer.weight][:rows]
        self._bias = self._bias_gradient = None
        if layer.bias is not None:
            self._bias = block.parameter_views[layer.bias][:rows, :, None]
            self._bias_gradient = block.gradient_views[layer.bias][:rows, :, None]
        self._relu = layer.relu
        self._output = self._weight.new_empty((rows, layer.outputs, batch))
        self._back = None if is_first else self._weight.new_empty((rows, layer.inputs, batch))
        self.x = self._output

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        if self._bias is None:
            torch.bmm(self._weight, x, out=self._output)
        else:
            torch.baddbmm(self._bias, self._weight, x, out=self._output)
        return self._output.relu_() if self._relu else self._output

    def backward(self, d: Tensor) -> Tensor:
        d = self.delta(d)
        torch.bmm(d, self.x.transpose(1, 2), out=self._weight_gradient)
        if self._bias_gradient is not None:
            torch.sum(d, 2, keepdim=True, out=self._bias_gradient)
        return self.below(d)

    def delta(self, d: Tensor) -> Tensor:
        """The gradient before the ReLU."""
        return _aten.threshold_backward(d, self._output, 0) if self._relu else d

    def below(self, d: Tensor) -> Tensor:
        """The gradient at the input."""
        return d if self._back is None else torch.bmm(self._weight_t, d, out=self._back)

    def write_row(self, row: int) -> None:
        raise AssertionError("trials do not take turns here")


class _TurnsLinearStep:
    """A linear layer whose parameters' gradients are written one trial at a time."""

    def __init__(self, step: _LinearStep, layer: Linear, block: Block) -> None:
        self._step = step
        self._weight_gradient = block.gradient_views[layer.weight][0]
        self._bias_gradient = None
        if layer.bias is not None:
            self._bias_gradient = block.gradient_views[layer.bias][0, :, None]
        self._deltas: tuple[Tensor, ...] = ()
        self._inputs: tuple[Tensor, ...] = ()
        self._sums: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self._step.forward(x)

    def backward(self, d: Tensor) -> Tensor:
        d = self._step.delta(d)
        self._deltas = d.unbind(0)
        self._inputs = self._step.x.transpose(1, 2).unbind(0)
        if self._bias_gradient is not None:
            self._sums = d.sum(2, keepdim=True).unbind(0)
        return self._step.below(d)

    def write_row(self, row: int) -> None:
        torch.mm(self._deltas[row], self._inputs[row], out=self._weight_gradient)
        if self._bias_gradient is not None:
            self._bias_gradient.copy_(self._sums[row])


class _ConvolutionStep:
    """(samples, trials * inputs, ...) to (samples, trials * outputs, ...), a group for each trial."""

    def __init__(
        self, layer: Convolution, block: Block, rows: int, *, is_first: bool, takes_turns: bool
    ) -> None:
        self._rows = rows
        self._takes_turns = takes_turns
        self._weight = block.parameter_views[layer.weight][:rows]
        self._weight_gradient = block.gradient_views[layer.weight][:rows]
        self._bias = self._bias_gradient = None
        if layer.bias is not None:
            self._bias = block.parameter_views[layer.bias][:rows]
            self._bias_gradient = block.gradient_views[layer.bias][:rows]
        self._sizes = [rows * layer.outputs]
        self._how = [layer.stride, layer.padding, layer.dilation, False, (0, 0), rows]
        self._wanted = [not is_first, True, layer.bias is not None]
        self._relu = layer.relu
        self._x = self._output = self._stacked = self._weight
        self._found: tuple[Tensor, Tensor | None] = (self._weight, None)

    def forward(self, x: Tensor) -> Tensor:
        self._x = x
        self._stacked = self._weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        bias = None if self._bias is None else self._bias.flatten()
        self._output = _aten.convolution(x, self._stacked, bias, *self._how)
        return self._output.relu_() if self._relu else self._output

    def backward(self, d: Tensor) -> Tensor:
        if self._relu:
            d = _aten.threshold_backward(d, self._output, 0)
        back, weight, bias = _aten.convolution_backward(
            d, self._x, self._stacked, self._sizes, *self._how, self._wanted
        )
        weight = weight.unflatten(0, (self._rows, -1))
        bias = None if bias is None else bias.view(self._rows, -1)
        if self._takes_turns:
            self._found = weight, bias
        else:
            self._weight_gradient.copy_(weight)
            if self._bias_gradient is not None and bias is not None:
                self._bias_gradient.copy_(bias)
        return d if back is None else back

    def write_row(self, row: int) -> None:
        weight, bias = self._found
        self._weight_gradient[0].copy_(weight[row])
        if self._bias_gradient is not None and bias is not None:
            self._bias_gradient[0].copy_(bias[row])


class _PoolStep:
    """Windows' maxima; ties go to the first, as in the plain loop."""

    def __init__(self, layer: MaxPool) -> None:
        self._how = [layer.kernel, layer.stride, layer.padding, layer.dilation, False]
        self._relu = layer.relu
        self._x = self._output = self._where = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self._x = x
        self._output, self._where = _aten.max_pool2d_with_indices(x, *self._how)
        return self._output.relu_() if self._relu else self._output

    def backward(self, d: Tensor) -> Tensor:
        if self._relu:
            d = _aten.threshold_backward(d, self._output, 0)
        return _aten.max_pool2d_with_indices_backward(d, self._x, *self._how, self._where)

    def write_row(self, row: int) -> None:
        pass


class _FlattenStep:
    """(samples, trials * channels, height, width) to (trials, channels * height * width, samples)."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._shape = torch.Size()

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (self._rows, -1))
        self._shape = parts.shape
        return parts.permute(1, 2, 3, 4, 0).flatten(1, 3)

    def backward(self, d: Tensor) -> Tensor:
        samples, rows, channels, height, width = self._shape
        parts = d.view(rows, channels, height, width, samples).permute(4, 2, 3, 0, 1)
        return parts.contiguous().flatten(3).permute(0, 3, 1, 2)

    def write_row(self, row: int) -> None:
        pass
