"""At which steps trials are evaluated: one integer geometric grid, the same for every batch size.

The grid is part of what steps to result mean (a crossing between two points is seen at the second), so
there is one rule and no choice per batch size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The points t_0 = 0, t_{k+1} = max(t_k + 1, floor(ratio t_k)), or every ``stride``-th of them.

    Every step at first, then points no more than ``ratio`` apart: with 1.05 every step to 40, 111 points
    to 1,000 and 159 to 10,000. Points are infinite in number and never depend on where a run ends.

    Args:
        ratio: of neighbouring points, in (1, 2]; taken as the decimal number that is printed for it, so
            that the grid is the same on every machine.
        stride: 1 for all points, 2 for every second one from 0.

    Raises:
        UsageError: a ratio or stride outside its range.
    """

    ratio: float = 1.05
    stride: int = 1
    _points: tuple[int, ...] = field(default=(0,), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and 1 < self.ratio <= 2):
            raise UsageError(
                f"grid.ratio = {self.ratio}; neighbouring points lie a factor in (1, 2] apart; 1.05 "
                "keeps the grid's error at 5 %"
            )
        if self.stride < 1:
            raise UsageError(f"grid.stride = {self.stride}; it counts points, at least 1")

    def points(self, limit: int) -> tuple[int, ...]:
        """All points up to and including ``limit`` >= 0, rising from 0."""
        points = self._grown_beyond(limit)
        return points[: bisect_right(points, limit)]

    def floor(self, step: int) -> int:
        """The largest point <= ``step``, which is >= 0."""
        points = self._grown_beyond(step)
        return points[bisect_right(points, step) - 1]

    def next(self, step: int) -> int:
        """The smallest point > ``step``; 0 for a negative one."""
        points = self._grown_beyond(step)
        return points[bisect_right(points, step)]

    def previous(self, step: int) -> int:
        """The largest point < ``step``.

        Raises:
            ValueError: there is none before step 0.
        """
        if step <= 0:
            raise ValueError(f"step = {step}; the grid begins at 0, before which there is nothing")
        points = self._grown_beyond(step)
        return points[bisect_left(points, step) - 1]

    def __contains__(self, step: int) -> bool:
        return step >= 0 and self.floor(step) == step

    def every_second(self) -> Grid:
        """The coarser grid of every second point, to see what the grid does to a result."""
        return Grid(ratio=self.ratio, stride=2 * self.stride)

    def _grown_beyond(self, step: int) -> tuple[int, ...]:
        """The points, at least one of them beyond ``step``."""
        if self._points[-1] > step:
            return self._points
        ratio = Fraction(Decimal(repr(float(self.ratio))))
        up, down = ratio.numerator, ratio.denominator
        points = list(self._points)
        while points[-1] <= 2 * step:
            point = points[-1]
            for _ in range(self.stride):
                point = max(point + 1, point * up // down)
            points.append(point)
        # Kept for the next call; replaced whole, so that threads may ask at once.
        object.__setattr__(self, "_points", tuple(points))
        return self._points
