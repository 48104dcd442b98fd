"""Strongly convex quadratics, on which the theorems about leaders can be checked without sampling."""

from __future__ import annotations

from dataclasses import dataclass
from math import log10, sqrt

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvexQuadratic:
    """f(x) = (x - x*)^T A (x - x*) / 2 with A = Q diag(curvatures) Q^T.

    Args:
        curvatures: ``[d]``, eigenvalues of A, each > 0; the smallest is m, the largest M.
        axes: Q, ``[d, d]``, orthonormal columns.
        minimum: x*, ``[d]``; f is 0 there.
        noise: sigma: the gradient's noise has expected squared norm sigma^2, equal in all directions.

    Source: the checks of theorems 2 to 5 in section 4 of the notes on Teng et al. 2019.
    """

    curvatures: Tensor
    axes: Tensor
    minimum: Tensor
    noise: float = 0.0

    @classmethod
    def random(
        cls, *, dimensions: int, condition: float, noise: float = 0.0, seed: int = 0
    ) -> ConvexQuadratic:
        """Curvatures from 1 to ``condition``, evenly in their logarithm, in a random basis.

        Args:
            dimensions: d, >= 2.
            condition: kappa = M / m, >= 1.
            noise: sigma.
            seed: of basis and minimum.
        """
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64)
        return cls(
            curvatures=torch.logspace(0, log10(condition), dimensions, dtype=torch.float64),
            axes=torch.linalg.qr(matrix).Q,
            minimum=torch.randn(dimensions, generator=generator, dtype=torch.float64),
            noise=noise,
        )

    @property
    def smallest(self) -> float:
        """m, the strong convexity."""
        return float(self.curvatures.min())

    @property
    def largest(self) -> float:
        """M, the smoothness."""
        return float(self.curvatures.max())

    @property
    def condition(self) -> float:
        """kappa = M / m."""
        return self.largest / self.smallest

    def losses(self, x: Tensor) -> Tensor:
        """f of ``[..., d]`` points, of shape ``[...]``."""
        return (((x - self.minimum) @ self.axes).square() * self.curvatures).sum(dim=-1) / 2

    def gradients(self, x: Tensor) -> Tensor:
        """A (x - x*), without noise."""
        return ((x - self.minimum) @ self.axes * self.curvatures) @ self.axes.mT

    def noisy_gradients(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The gradient plus normal noise of expected squared norm sigma^2."""
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return self.gradients(x) + noise * (self.noise / sqrt(x.shape[-1]))

    def newton(self, x: Tensor) -> Tensor:
        """The direction to the minimum, x* - x."""
        return self.minimum - x

    def points_below(self, level: float, count: int, generator: torch.Generator) -> Tensor:
        """Points uniform in the ellipsoid f <= level, ``[count, d]``."""
        dimensions = len(self.curvatures)
        direction = torch.randn(count, dimensions, generator=generator, dtype=torch.float64)
        direction = direction / torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        radius = torch.rand(count, 1, generator=generator, dtype=torch.float64) ** (1 / dimensions)
        ball = direction * radius
        return self.minimum + (ball * (2 * level / self.curvatures).sqrt()) @ self.axes.mT


def step_conditions_hold(task: ConvexQuadratic, lr: float, penalty: float) -> bool:
    """Whether theorem 2's conditions on the step hold: noise that does not grow with the gradient.

    lr <= 1 / (2 M),  lr lambda <= 1 / (2 kappa),  lr sqrt(lambda) <= 1 / (kappa sqrt(2 m)).

    Args:
        task: the quadratic.
        lr: eta.
        penalty: lambda.
    """
    return (
        lr <= 1 / (2 * task.largest)
        and lr * penalty <= 1 / (2 * task.condition)
        and lr * sqrt(penalty) <= 1 / (task.condition * sqrt(2 * task.smallest))
    )


def expected_after_step(
    task: ConvexQuadratic, x: Tensor, leader: Tensor, *, lr: float, penalty: float
) -> Tensor:
    """E f(x+) after x+ = x - lr (noisy gradient + penalty (x - leader)), exactly.

    The noise adds lr^2 tr(A) sigma^2 / (2 d) to the loss of the mean point.

    Args:
        task: the quadratic.
        x: ``[..., d]``.
        leader: ``[..., d]``.
        lr: eta.
        penalty: lambda.
    """
    mean = x - lr * (task.gradients(x) + penalty * (x - leader))
    dimensions = len(task.curvatures)
    spread = lr**2 * task.curvatures.sum() * task.noise**2 / (2 * dimensions)
    return task.losses(mean) + spread


def leader_bound(
    task: ConvexQuadratic, x: Tensor, leader: Tensor, *, lr: float, penalty: float
) -> Tensor:
    """Theorem 2's bound on E f(x+): the leader's extra decrease is its middle term.

    (1 - m lr) f(x) - lr lambda (f(x) - f(z)) + lr^2 M sigma^2 / 2

    Args: as :func:`expected_after_step`.
    """
    own, best = task.losses(x), task.losses(leader)
    return (
        (1 - task.smallest * lr) * own
        - lr * penalty * (own - best)
        + lr**2 * task.largest * task.noise**2 / 2
    )


def rest_at_frozen_leader(task: ConvexQuadratic, leader: Tensor, *, penalty: float) -> Tensor:
    """The minimiser of f + (penalty / 2) |x - leader|^2, ``[..., d]``: where a stale leader holds a worker."""
    along = (leader - task.minimum) @ task.axes
    return task.minimum + (along * penalty / (task.curvatures + penalty)) @ task.axes.mT


def frozen_leader_bound(task: ConvexQuadratic, leader: Tensor, *, penalty: float) -> Tensor:
    """Theorem 3's bound on f at that minimiser: lambda / (m + lambda) f(leader)."""
    return penalty / (task.smallest + penalty) * task.losses(leader)


def share_improved(
    task: ConvexQuadratic,
    x: Tensor,
    *,
    penalty: float,
    candidates: int,
    generator: torch.Generator,
) -> float:
    """Theorem 5: of points no worse than ``x``, the share that as leaders turn its step toward Newton's.

    The step -grad f + penalty (z - x) is compared with -grad f by the angle to the direction of the minimum.

    Args:
        task: the quadratic.
        x: ``[d]``.
        penalty: lambda.
        candidates: points z drawn uniformly from f(z) <= f(x).
        generator: of the draw.

    Returns:
        In [0, 1]; the theorem promises at least 0.5 for a small penalty.
    """
    leaders = task.points_below(float(task.losses(x)), candidates, generator)
    plain = -task.gradients(x)
    aim = task.newton(x)
    turned = plain + penalty * (leaders - x)
    better = torch.cosine_similarity(
        turned, aim.expand_as(turned), dim=1
    ) > torch.cosine_similarity(plain, aim, dim=0)
    return float(better.double().mean())
