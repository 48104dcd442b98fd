"""What scaling rules that follow gradient noise are told about a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.fleet.header import PIECES, SAMPLES, SQUARES
from shoal.fleet.reducer import Reducer
from shoal.scaling.contract import GradientNoise


class NoiseMeter:
    """Measures the gradient of each micro-batch by the difference it makes to the sum."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._before: Tensor | None = None

    def before(self) -> None:
        """Called before a micro-batch's backward."""
        self._before = self._gradients()

    def weighted_square(self, *, samples: int, weight: float, total: int) -> float:
        """n |g|^2 of the micro-batch whose backward has just ended.

        Args:
            samples: n, its samples.
            weight: units its loss is a mean over; it entered the sum as weight / total * g.
            total: samples of the step.
        """
        assert self._before is not None
        entered = float(torch.linalg.vector_norm(self._gradients() - self._before))
        self._before = None
        return samples * (entered * total / weight) ** 2 if weight else 0.0

    def _gradients(self) -> Tensor:
        return torch.cat([b.flat[: b.size].float() for b in self._reducer.buckets])


def measured(summed: Sequence[float], *, mean_square: float) -> GradientNoise:
    """What the whole fleet measured in a step.

    Args:
        summed: the exchange's header.
        mean_square: the squared norm of the step's gradient.
    """
    return GradientNoise(
        weighted_squares=summed[SQUARES],
        pieces=round(summed[PIECES]),
        samples=round(summed[SAMPLES]),
        mean_square=mean_square,
    )
