"""Batch normalisation over groups of a fixed size, so that the objective does not follow the batch size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UsageError


class GhostBatchNorm(nn.Module):
    """Batch normalisation in groups of ``ghost_batch`` samples, whatever the batch.

    With the samples of a batch cut in order into groups, each group g is normalised by its own mean
    m_g and biased variance v_g; the running statistics move once per batch, by the mean over groups,

        running_mean <- (1 - momentum) running_mean + momentum mean_g(m_g)

    and alike with the unbiased variances. In evaluation the running statistics normalise. With a batch
    of one group this is ``nn.BatchNorm``.

    Args:
        channels: size of axis 1.
        ghost_batch: samples in a group, >= 2; it must divide every batch that is trained on.
        eps: added to the variance.
        momentum: share of the new statistics, in (0, 1].
        affine: whether each channel has a learnt factor and shift.

    Raises:
        UsageError: ``ghost_batch`` below 2.

    Source: Hoffer, Hubara, Soudry 2017, "Train longer, generalize better", algorithm 1.
    Deviates: there the running statistics are updated group after group; here once, by the mean.
    """

    def __init__(
        self,
        channels: int,
        *,
        ghost_batch: int = 32,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if ghost_batch < 2:
            raise UsageError(
                f"ghost_batch = {ghost_batch}; statistics need at least 2 samples; try 32"
            )
        self.ghost_batch, self.eps, self.momentum = ghost_batch, eps, momentum
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    running_mean: Tensor
    running_var: Tensor

    def extra_repr(self) -> str:
        """The settings, as in torch's own layers."""
        return (
            f"{len(self.running_mean)}, ghost_batch={self.ghost_batch}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={self.weight is not None}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (samples, channels, ...).

        Raises:
            ValueError: in training, a number of samples that ``ghost_batch`` does not divide.
        """
        shape = [1, -1] + [1] * (x.dim() - 2)
        if self.training:
            y = self._by_groups(x)
        else:
            scale = (self.running_var + self.eps).rsqrt()
            y = (x - self.running_mean.view(shape)) * scale.view(shape)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y

    def _by_groups(self, x: Tensor) -> Tensor:
        if x.shape[0] % self.ghost_batch:
            raise ValueError(
                f"batch = {x.shape[0]} samples; ghost_batch = {self.ghost_batch} must divide it"
            )
        groups = x.reshape(-1, self.ghost_batch, *x.shape[1:])
        axes = [1, *range(3, groups.dim())]
        variance, mean = torch.var_mean(groups, axes, correction=0, keepdim=True)
        count = groups[0].numel() // x.shape[1]
        with torch.no_grad():
            unbiased = variance.mean(0).flatten() * (count / (count - 1))
            self.running_mean.mul_(1 - self.momentum).add_(
                mean.mean(0).flatten(), alpha=self.momentum
            )
            self.running_var.mul_(1 - self.momentum).add_(unbiased, alpha=self.momentum)
        return ((groups - mean) * (variance + self.eps).rsqrt()).reshape(x.shape)


def ghost_batch_norm(model: nn.Module, *, ghost_batch: int = 32) -> nn.Module:
    """Replace every BatchNorm layer of ``model`` by a :class:`GhostBatchNorm` with its weights.

    Args:
        model: changed in place, unless it is a BatchNorm layer itself.
        ghost_batch: samples in a group, >= 2.

    Returns:
        The model.

    Raises:
        UsageError: ``ghost_batch`` below 2; a layer without running statistics or whose size is not
            known yet; a cumulative average (``momentum=None``), which has no counterpart.
    """
    if isinstance(model, _BatchNorm):
        return _replacement(model, ghost_batch)
    for name, child in model.named_children():
        setattr(model, name, ghost_batch_norm(child, ghost_batch=ghost_batch))
    return model


def _replacement(layer: _BatchNorm, ghost_batch: int) -> GhostBatchNorm:
    if layer.running_mean is None or layer.running_var is None or layer.momentum is None:
        raise UsageError(
            f"model = {layer}; ghost normalisation keeps running statistics by a fixed momentum; build the "
            "layer with track_running_stats=True and a momentum"
        )
    if layer.num_features == 0:
        raise UsageError(f"model = {layer}; its size is not known yet; run one batch first")
    ghost = GhostBatchNorm(
        layer.num_features,
        ghost_batch=ghost_batch,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=layer.affine,
    )
    ghost.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if k != "num_batches_tracked"}
    )
    return ghost.train(layer.training)
