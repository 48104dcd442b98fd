"""BatchNorm on a fleet: whose statistics normalise, and how running statistics stay equal.

Normalisation uses one micro-batch (``"worker"``), pieces of a stated size of it (``"ghost:32"``), or the
micro-batches that all workers process at the same moment (``"sync"``).

Running statistics are part of the fleet's state and equal on all workers: a step moves them once, by
the sample-weighted mean of what its micro-batches would have moved them,

    running' = running + sum_i n_i (running_i - running) / sum_i n_i,

with ``running_i`` the result of micro-batch i alone, started from ``running``. One worker with one
micro-batch keeps torch's result bit for bit.

Deviates: a plain loop that accumulates gradients moves the statistics once per micro-batch, so its
result depends on how a batch was cut; this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.errors import UsageError


class RunningStatistics:
    """The running means and variances of a model as one flat tensor with a commit point.

    InstanceNorm layers that keep running statistics are among them.

    Raises:
        UsageError: the layers keep them in different types of number.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            m
            for m in model.modules()
            if isinstance(m, _NormBase) and isinstance(m.running_mean, Tensor)
        ]
        buffers = [b for m in self.layers for b in (m.running_mean, m.running_var)]
        self.size = sum(b.numel() for b in buffers)  # type: ignore[union-attr]
        device = buffers[0].device if buffers else torch.device("cpu")  # type: ignore[union-attr]
        kinds = {b.dtype for b in buffers}  # type: ignore[union-attr]
        if len(kinds) > 1:
            raise UsageError(
                f"model = running statistics in {', '.join(sorted(map(str, kinds)))}; a fleet keeps them "
                "as one tensor; convert the normalisation layers to one dtype before shoal.init"
            )
        self.flat = torch.zeros(self.size, device=device, dtype=next(iter(kinds), torch.float32))
        self.tracked = torch.zeros(len(self.layers), dtype=torch.int64, device=device)
        start = 0
        for i, layer in enumerate(self.layers):
            for name in ("running_mean", "running_var"):
                buffer = layer._buffers[name]
                assert buffer is not None
                view = self.flat[start : start + buffer.numel()].view(buffer.shape)
                view.copy_(buffer)
                layer._buffers[name] = view
                start += buffer.numel()
            counter = layer._buffers.get("num_batches_tracked")
            if counter is not None:
                self.tracked[i] = counter
                layer._buffers["num_batches_tracked"] = self.tracked[i]
        self._base = self.flat.clone()
        self._tracked_base = self.tracked.clone()
        self._moved = torch.zeros_like(self.flat)
        self._touched = torch.zeros(len(self.layers), device=device)
        self._single: tuple[Tensor, Tensor] | None = None
        self._pieces = 0

    @property
    def slots(self) -> int:
        """Header slots used by a step: the movement and one mark per layer."""
        return self.size + len(self.layers)

    def mark(self) -> None:
        """Take the present values as the commit point (after a load)."""
        self._base.copy_(self.flat)
        self._tracked_base.copy_(self.tracked)

    def begin(self) -> None:
        """Start a step from the commit point."""
        if not self.size:
            return
        self._reset()
        self._moved.zero_()
        self._touched.zero_()
        self._single = None
        self._pieces = 0

    def after_piece(self, share: float) -> Tensor:
        """Collect what one micro-batch moved (``share`` = its samples / the step's) and go back.

        Returns: the share-weighted movement of this micro-batch alone, flat.
        """
        self._pieces += 1
        alone = self._pieces == 1
        self._single = (self.flat.clone(), self.tracked.clone()) if alone else None
        moved = (self.flat - self._base).mul_(share)
        self._moved += moved
        self._touched += (self.tracked != self._tracked_base).to(self._touched.dtype)
        self._reset()
        return moved

    def write(self, slots: Tensor) -> None:
        """Put this worker's part of the step into the header."""
        slots[: self.size].copy_(self._moved)
        slots[self.size :].copy_(self._touched)

    def commit(self, moved: Tensor, touched: Tensor, *, alone: bool) -> None:
        """Apply the fleet's movement. ``alone``: this worker's one piece was the whole step."""
        if alone and self._single is not None:
            self.flat.copy_(self._single[0])
            self.tracked.copy_(self._single[1])
        else:
            self.flat.copy_(self._base).add_(moved.to(self.flat.dtype))
            self.tracked.copy_(self._tracked_base).add_((touched > 0).to(torch.int64))
        self.mark()

    def abandon(self) -> None:
        """Forget the step."""
        if self.size:
            self._reset()

    def _reset(self) -> None:
        self.flat.copy_(self._base)
        self.tracked.copy_(self._tracked_base)


def install_norm(model: nn.Module, mode: str, sync: Any = None) -> None:
    """Prepare the BatchNorm layers of ``model`` for ``mode``.

    Args:
        mode: ``"worker"``, ``"ghost:N"`` (N samples, >= 2) or ``"sync"``.
        sync: with ``"sync"``, the object that sums statistics over the fleet.

    A channel with a single value (a share of one sample) is normalised with the running statistics and
    does not move them, where torch raises an error; with ``"sync"`` only if the whole fleet has one.

    Raises:
        UsageError: another mode, or a ghost size below 2.
    """
    name, _, number = mode.partition(":")
    ghost = 0
    if name == "ghost" and number.isdigit():
        ghost = int(number)
        if ghost < 2:
            raise UsageError(
                f"batch_norm = {mode!r}; a ghost batch has at least 2 samples; try ghost:32"
            )
    elif mode not in ("worker", "sync"):
        raise UsageError(
            f"batch_norm = {mode!r}; known are worker, sync and ghost:N (N samples, at least 2)"
        )
    index = 0
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.__class__ = _fleet_class(type(layer))
            layer.__dict__.update(
                shoal_ghost=ghost, shoal_sync=sync if mode == "sync" else None, shoal_index=index
            )
            index += 1


_classes: dict[type, type] = {}


def _fleet_class(original: type) -> type:
    """A subclass of a BatchNorm class with the fleet's forward; the module's state dict is unchanged."""
    if original in _classes.values():
        return original
    if original not in _classes:
        members = {"forward": _forward, "__reduce_ex__": _reduce}
        _classes[original] = type(original.__name__, (original,), members)
    return _classes[original]


def _reduce(self: Any, protocol: int) -> Any:
    """A copied or pickled layer is the plain one again, which needs no fleet."""
    state = {k: v for k, v in self.__dict__.items() if not k.startswith("shoal_")}
    return _rebuilt, (type(self).__mro__[1],), state


def _rebuilt(original: Any) -> Any:
    return original.__new__(original)


def _forward(self: Any, x: Tensor) -> Tensor:
    self._check_input_dim(x)
    if not self.training:
        return _normalise(self, x, self.running_mean, self.running_var, training=False)
    if self.shoal_sync is not None and self.shoal_sync.active:
        return self.shoal_sync.normalise(self, x)
    values = x.numel() // max(1, x.shape[1])
    if values <= 1 and self.running_mean is not None:
        return _normalise(self, x, self.running_mean, self.running_var, training=False)
    if self.shoal_ghost and x.shape[0] > self.shoal_ghost:
        return _ghost(self, x)
    if self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
    return _normalise(self, x, self.running_mean, self.running_var, training=True)


def momentum_of(layer: Any) -> float:
    """By how much a batch moves the running statistics of ``layer``."""
    if layer.momentum is not None:
        return layer.momentum
    return 1.0 / max(1.0, float(layer.num_batches_tracked))


def _normalise(layer: Any, x: Tensor, mean: Any, var: Any, *, training: bool) -> Tensor:
    return functional.batch_norm(
        x,
        mean,
        var,
        layer.weight,
        layer.bias,
        training or mean is None,
        momentum_of(layer),
        layer.eps,
    )


def _ghost(layer: Any, x: Tensor) -> Tensor:
    pieces = list(x.split(layer.shoal_ghost))
    if pieces[-1].numel() // x.shape[1] <= 1:
        pieces[-2:] = [torch.cat(pieces[-2:])]
    if layer.running_mean is None:
        return torch.cat([_normalise(layer, p, None, None, training=True) for p in pieces])
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    out, mean, var = [], torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)
    for piece in pieces:
        # Copies: autograd keeps what it is given, so the layer's own buffers stay untouched here.
        piece_mean, piece_var = layer.running_mean.clone(), layer.running_var.clone()
        out.append(_normalise(layer, piece, piece_mean, piece_var, training=True))
        mean += piece_mean * (len(piece) / len(x))
        var += piece_var * (len(piece) / len(x))
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    return torch.cat(out)
