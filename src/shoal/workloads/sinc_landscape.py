"""A landscape of rings: f(x, y) = sin(pi r) / (pi r), with one global ring and endless local ones.

The minima are rings around the origin, less deep the farther out. Workers far out are caught by shallow rings
unless something carries them over the crests between.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

GLOBAL_RADIUS, GLOBAL_VALUE = 1.430296653124203, -0.21723362821122166
"""The deepest ring: tan(pi r) = pi r, first positive solution."""

STARTS: tuple[tuple[float, float], ...] = ((-6.0, -4.0), (-15.0, -18.0), (20.0, 11.0), (17.0, 8.0))
"""Where the four workers of the paper's figure begin."""


@dataclass(frozen=True, kw_only=True)
class SincLandscape:
    """f(x, y) = sin(pi r) / (pi r), r the distance from the origin; 1 at the origin, its maximum.

    Source: Teng et al. 2019, the poster's figures 1 and 2, as reconstructed in section 3.4 of the notes.

    Example:
        >>> task = SincLandscape()
        >>> f"{task.losses(torch.tensor([[GLOBAL_RADIUS, 0.0]], dtype=torch.float64)).item():.5f}"
        '-0.21723'
    """

    def losses(self, points: Tensor) -> Tensor:
        """f at ``[..., 2]`` points, of shape ``[...]``."""
        # torch's sinc(r) is sin(pi r) / (pi r), and 1 at 0.
        return torch.sinc(torch.linalg.vector_norm(points, dim=-1))

    def gradients(self, points: Tensor) -> Tensor:
        """The gradient at ``[..., 2]`` points; 0 at the origin.

        df/dr = (cos(pi r) - f) / r, along the point's direction.
        """
        radius = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        slope = torch.cos(pi * radius) - torch.sinc(radius)
        safe = torch.where(radius > 0, radius, 1.0)
        return torch.where(radius > 0, slope / safe**2, 0.0) * points

    def starts(self) -> Tensor:
        """The figure's four starting points, ``[4, 2]``."""
        return torch.tensor(STARTS, dtype=torch.float64)

    def random_starts(self, *, trials: int, workers: int, seed: int = 0) -> Tensor:
        """Starting points uniform in [-20, 20]^2.

        Args:
            trials: how many independent runs.
            workers: p, points per run.
            seed: of the draw.

        Returns:
            ``[trials, workers, 2]``.
        """
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(trials, workers, 2, generator=generator, dtype=torch.float64) * 40 - 20


def descend_alone(points: Tensor, *, lr: float = 0.1, steps: int = 300) -> Tensor:
    """Gradient descent of every worker by itself.

    Args:
        points: ``[trials, workers, 2]``, where they start.
        lr: learning rate.
        steps: how many.

    Returns:
        ``[trials, workers, 2]``, where they end.
    """
    task = SincLandscape()
    for _ in range(steps):
        points = points - task.gradients(points) * lr
    return points


def descend_to_leader(
    points: Tensor,
    *,
    lr: float = 0.1,
    pull: float = 0.1,
    steps: int = 300,
    coupled: bool = False,
) -> Tensor:
    """Many runs of leader gradient descent at once, communicating in every step.

    Each run is what :class:`shoal.sync.Leader` does with ``sync_every=1`` and the loss of the weights after
    the step as score; this is its arithmetic with one dimension more, since thousands of runs would take the
    rule minutes.

    Args:
        points: ``[trials, workers, 2]``, where they start.
        lr: learning rate.
        pull: fraction of the way to the leader.
        steps: how many.
        coupled: choose and pull by the points before the step, x - lr g(x) - pull (x - z), as the paper's
            figure does, instead of after it, as its algorithm does.

    Returns:
        ``[trials, workers, 2]``, where they end.
    """
    task = SincLandscape()
    runs = torch.arange(len(points))
    for _ in range(steps):
        stepped = points - task.gradients(points) * lr
        seen = points if coupled else stepped
        leader = seen[runs, task.losses(seen).argmin(dim=1)].unsqueeze(1)
        points = stepped + (leader - seen) * pull
    return points


def descend_elastically(
    points: Tensor, *, lr: float = 0.1, beta: float = 0.43, steps: int = 300
) -> tuple[Tensor, Tensor]:
    """Many runs of synchronous elastic averaging at once, communicating in every step.

    Each run is what :class:`shoal.sync.EASGD` does with ``sync_every=1`` and ``synchronous=True``.

    Args:
        points: ``[trials, workers, 2]``, where they start.
        lr: learning rate.
        beta: how far the center moves; a worker moves by beta / workers.
        steps: how many.

    Returns:
        (``[trials, workers, 2]`` workers, ``[trials, 1, 2]`` centers), where they end.
    """
    task = SincLandscape()
    center = points.mean(dim=1, keepdim=True)
    alpha = beta / points.shape[1]
    for _ in range(steps):
        mean = points.mean(dim=1, keepdim=True)
        points = points - task.gradients(points) * lr - (points - center) * alpha
        center = center + (mean - center) * beta
    return points, center


def reached(points: Tensor, *, within: float = 0.005) -> Tensor:
    """Whether the best worker of each run has reached the deepest ring.

    Where elastic averaging ends depends on it: it holds workers on the ring's slopes. With 16 workers and beta
    0.43 some worker is anywhere in the deepest valley (``within=0.1``) in 63 % of runs, and at its bottom in
    12 %. The leader rule and independent workers end at the bottom of a ring or not there at all.

    Args:
        points: ``[trials, workers, 2]``.
        within: of the deepest value, > 0.

    Returns:
        ``[trials]`` bool.
    """
    return SincLandscape().losses(points).amin(dim=1) < GLOBAL_VALUE + within
