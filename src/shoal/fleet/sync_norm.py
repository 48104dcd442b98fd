"""Synchronised BatchNorm: one normalisation over the micro-batches that all workers process at once.

Forward sums (count, sum x, sum x^2) over the workers, backward sums (sum dy, sum dy * x_hat), in float64:
the variance is a small difference of large numbers. Every worker makes the same sequence of
reductions: one with fewer micro-batches than the others goes through *phantom* ones with zeros, in the
order in which its layers were last called (the model's own order before the first call).

A peer lost inside a forward pass must not end the user's loop: the layer then uses what this worker
has, and the step, which cannot be committed any more, is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ExchangeFailed, UsageError
from shoal.fleet.norm import momentum_of
from shoal.world.contract import World


class SyncStatistics:
    """Sums BatchNorm statistics over the fleet; one object for all layers of a model."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layers: list[Any] = []
        # (layer, whether a backward pass goes through it)
        self._order: list[tuple[int, bool]] = []
        self._called: list[tuple[int, bool]] = []
        self._returned = 0
        self._workers = 1
        self._passes = 0
        self._failed = False
        self._stepping = False
        self._device = torch.device("cpu")
        # Told when a wait for the others begins (True) and ends (False).
        self.on_wait: Callable[[bool], None] = lambda waiting: None

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model is nobody's replica: its layers normalise by themselves."""

    def know(self, layers: list[Any], device: torch.device) -> None:
        """The model's BatchNorm layers, in its own order, and where they are."""
        self._layers = layers
        self._order = [(layer.shoal_index, True) for layer in layers]
        self._device = device

    def begin(self, workers: int) -> None:
        """Start a step with ``workers`` members."""
        self._workers, self._passes, self._failed = workers, 0, False
        self._called, self._returned = [], 0
        self._stepping = True

    def end(self) -> None:
        """No worker is in a step any more: layers normalise by themselves."""
        self._stepping = False

    @property
    def active(self) -> bool:
        """Whether the peers are in the same step."""
        return self._stepping

    def piece_done(self) -> None:
        """One micro-batch has been through forward and backward."""
        if self._called:
            self._order = self._called
        self._called, self._returned = [], 0
        self._passes += 1

    def phantom(self, rounds: int) -> None:
        """Make the reductions that the others make in this step and this worker has not.

        A micro-batch that was broken off between its forward and its backward is brought to its end.
        """
        while self._passes < rounds:
            order = [*self._called, *self._order[len(self._called) :]]
            returning = [index for index, returns in reversed(order) if returns]
            for index, _ in order[len(self._called) :]:
                self._sum(self._zeros(index), index)
            for index in returning[self._returned :]:
                self._sum(self._zeros(index), index)
            self._called, self._returned = [], 0
            self._passes += 1

    def check(self) -> None:
        """Raise ExchangeFailed if a reduction of this step failed."""
        if self._failed:
            raise ExchangeFailed("a peer was lost while BatchNorm statistics were summed")

    def state(self) -> list[int]:
        """The order of the layers' calls, for joiners."""
        return [2 * index + returns for index, returns in self._order]

    def load_state(self, order: list[int]) -> None:
        """The inverse of :meth:`state`."""
        self._order = [(int(entry) // 2, bool(int(entry) % 2)) for entry in order]

    def normalise(self, layer: Any, x: Tensor) -> Tensor:
        """``layer`` applied to ``x`` with the statistics of all workers' micro-batches."""
        own = layer.weight is not None and layer.weight.requires_grad
        returns = torch.is_grad_enabled() and (own or x.requires_grad)
        self._called.append((layer.shoal_index, returns))
        y, mean, var, count = _SyncNorm.apply(x, layer.weight, layer.bias, layer.eps, self, layer)
        if layer.running_mean is not None and count > 1:
            layer.num_batches_tracked.add_(1)
            momentum = momentum_of(layer)
            unbiased = var * (count / (count - 1))
            layer.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            layer.running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
        return y

    def forward_sum(self, packed: Tensor, index: int) -> Tensor:
        """``packed`` of the layer ``index`` in a forward pass, summed over the workers."""
        return self._sum(packed, index)

    def backward_sum(self, packed: Tensor, index: int) -> Tensor:
        """``packed`` of the layer ``index`` in a backward pass, summed over the workers."""
        self._returned += 1
        return self._sum(packed, index)

    def _zeros(self, index: int) -> Tensor:
        layer = self._layers[index]
        return torch.zeros(2 * layer.num_features + 2, dtype=torch.float64, device=self._device)

    def _sum(self, packed: Tensor, index: int) -> Tensor:
        """``packed`` = [values..., count, layer] summed over the workers; the layer is a check."""
        packed[-1] = float(index)
        if self._failed:
            return packed
        own = packed.clone()
        self.on_wait(True)
        try:
            self._world.all_reduce(packed).wait()
        except ExchangeFailed:
            self._failed = True
            return own
        finally:
            self.on_wait(False)
        if round(float(packed[-1])) != index * self._workers:
            raise UsageError(
                f'batch_norm = "sync": layer {index} met another layer on a peer; the model must call its '
                'BatchNorm layers in the same order on all workers; use "worker" or "ghost:N"'
            )
        return packed


class _SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, sync: Any, layer: Any
    ) -> Any:
        dims = [0, *range(2, x.dim())]
        wide = x.float()
        features = x.shape[1]
        own = x.numel() // features
        shape = [1, features, *([1] * (x.dim() - 2))]
        centre = wide.mean(dims)
        spread = (wide - centre.view(shape)).square().sum(dims).double()
        centre = centre.double()
        packed = torch.cat(
            [
                centre * own,
                spread + own * centre.square(),
                torch.tensor([float(own), 0.0], dtype=torch.float64, device=x.device),
            ]
        )
        packed = sync.forward_sum(packed, layer.shoal_index)
        count = max(1.0, float(packed[-2]))
        wide_mean = packed[:features] / count
        var = (packed[features : 2 * features] / count - wide_mean.square()).clamp_(min=0).float()
        mean = wide_mean.float()
        inverse = torch.rsqrt(var + eps)
        hat = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(hat, weight, inverse)
        ctx.sync, ctx.layer, ctx.count, ctx.shape, ctx.dims = sync, layer, count, shape, dims
        y = hat
        if weight is not None:
            y = y * weight.view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        hat, weight, inverse = ctx.saved_tensors
        wide = grad.float()
        features = hat.shape[1]
        sum_dy, sum_dy_hat = wide.sum(ctx.dims), (wide * hat).sum(ctx.dims)
        packed = torch.cat([sum_dy, sum_dy_hat, torch.zeros(2, device=grad.device)]).double()
        # The loss of each worker is weighted by its share already, so sums over workers are what is
        # needed: the statistics couple the samples of all of them.
        packed = ctx.sync.backward_sum(packed, ctx.layer.shoal_index).float()
        mean_dy = (packed[:features] / ctx.count).view(ctx.shape)
        mean_dy_hat = (packed[features : 2 * features] / ctx.count).view(ctx.shape)
        scale = inverse.view(ctx.shape)
        if weight is not None:
            scale = scale * weight.view(ctx.shape)
        dx = (wide - mean_dy - hat * mean_dy_hat) * scale
        dweight = sum_dy_hat if weight is not None else None
        dbias = sum_dy if weight is not None else None
        return dx.to(grad.dtype), dweight, dbias, None, None, None
