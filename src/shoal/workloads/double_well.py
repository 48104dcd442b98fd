"""A double well: where an average is stationary and no worker is at a minimum."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

FOLLOWER_BASIN = 0.25
"""Above this penalty weight the far well no longer holds a follower."""


@dataclass(frozen=True, kw_only=True)
class DoubleWell:
    """f(x) = (x^2 - 1)^2 / 4, summed over coordinates: minima at -1 and 1, a maximum between them at 0.

    Source: the exact check of theorem 1 in section 4 of the notes on Teng et al. 2019.

    Example:
        >>> import torch
        >>> DoubleWell().losses(torch.tensor([[0.0], [1.0]])).tolist()
        [0.25, 0.0]
    """

    def losses(self, points: Tensor) -> Tensor:
        """f at ``[..., d]`` points, of shape ``[...]``."""
        return ((points.square() - 1).square() / 4).sum(dim=-1)

    def gradients(self, points: Tensor) -> Tensor:
        """x^3 - x."""
        return points * (points.square() - 1)


def elastic_rest(penalty: float) -> float:
    """Where two workers of elastic averaging, one in each well, come to rest: +- sqrt(1 - rho), center at 0.

    There x^3 - x + rho x = 0. Neither they nor their center are stationary for f.

    Args:
        penalty: rho of the objective f + (rho / 2) |x - center|^2, in [0, 1].

    Example:
        >>> round(elastic_rest(0.2), 6)
        0.894427
    """
    return sqrt(1 - penalty)


def follower_rest(penalty: float) -> float:
    """Where a follower in the well at 1 comes to rest, its leader at the bottom of the other one, at -1.

    There x^3 - x + lambda (x + 1) = 0, that is x (x - 1) = -lambda. It is at no minimum of f, and the
    average of the two is on the barrier.

    Args:
        penalty: lambda of the objective f + (lambda / 2) |x - leader|^2, in [0, 0.25]; above, the well
            holds no follower.

    Raises:
        ValueError: ``penalty`` is outside its range.

    Example:
        >>> round(follower_rest(0.2), 6)
        0.723607
    """
    if not 0 <= penalty <= FOLLOWER_BASIN:
        raise ValueError(
            f"penalty = {penalty:g}; the far well holds a follower up to {FOLLOWER_BASIN:g} only; use a "
            "penalty in [0, 0.25]"
        )
    return (1 + sqrt(1 - 4 * penalty)) / 2
