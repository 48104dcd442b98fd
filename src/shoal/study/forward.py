"""A workload's model with weights from elsewhere, in evaluation mode and without gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from shoal.study.workload import Workload

_PROBE_SAMPLES = 64
_TOLERANCE = 1e-5


class Forward:
    """Evaluates models that are given as named tensors.

    The tensors themselves stand in for the module's own. Only what the forward pass could write (buffers,
    if it does) and the weights of convolutions are copied: those run channels last, which on a CPU takes
    less than half the time, if their outputs then agree with the usual layout's.

    Args:
        workload: whose model and data it is.
        device: that evaluates; the processor when None.
    """

    def __init__(self, workload: Workload, *, device: torch.device | None = None) -> None:
        self._workload = workload
        self._device = device or torch.device("cpu")
        self._model = workload.build(0).to(self._device).eval().requires_grad_(False)
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        self._buffers = {name for name, _ in self._model.named_buffers()}
        self._places: list[tuple[dict[str, Tensor | None], str, str]] = []
        for module in self._model.modules():
            for kind in cast(
                "list[dict[str, Tensor | None]]", [module._parameters, module._buffers]
            ):
                for key, tensor in kind.items():
                    if tensor is not None:
                        self._places.append((kind, key, names[id(tensor)]))
        self._writes_buffers = self._probe_buffers()
        self._is_channels_last = self._probe_layout()

    def prepared(self, split: str, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a split, or of some ``rows`` of it, on the device."""
        x, y = self._workload.split(split)
        if rows is not None:
            x, y = x[rows], y[rows]
        return x.to(self._device), y.to(self._device)

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Evaluate these weights from now on. They are read, never written."""
        for kind, key, name in self._places:
            tensor = weights[name]
            if self._writes_buffers and name in self._buffers:
                tensor = tensor.clone()
            elif self._is_channels_last and tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            kind[key] = tensor

    @torch.inference_mode()
    def __call__(self, data: tuple[Tensor, Tensor], rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of some samples of ``prepared`` data."""
        x, y = data
        if isinstance(rows, Tensor):
            rows = rows.to(self._device)
            return self._model(x.index_select(0, rows)), y.index_select(0, rows)
        return self._model(x[rows]), y[rows]

    def _weights(self) -> dict[str, Tensor]:
        return dict((*self._model.named_parameters(), *self._model.named_buffers()))

    def _probe_buffers(self) -> bool:
        """Whether the forward pass writes buffers even in evaluation mode."""
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        if not before:
            return False
        data = self.prepared("val", torch.arange(min(2, self._workload.samples("val"))))
        self(data, slice(None))
        return any(not torch.equal(b, before[n]) for n, b in self._model.named_buffers())

    def _probe_layout(self) -> bool:
        """Whether convolutions may run channels last."""
        self._is_channels_last = False
        has_convolution = any(isinstance(m, torch.nn.Conv2d) for m in self._model.modules())
        if not has_convolution or self._device.type != "cpu":
            return False
        weights = self._weights()
        data = self.prepared(
            "val", torch.arange(min(_PROBE_SAMPLES, self._workload.samples("val")))
        )
        usual, _ = self(data, slice(None))
        self._is_channels_last = True
        self.bind(weights)
        other, _ = self(data, slice(None))
        difference = float((other.double() - usual.double()).norm())
        return difference <= _TOLERANCE * float(usual.double().norm())
