"""Steps to a result by the words of the definition, step by step; shares no code with the package.

A curve is a list of (step, value, diverged); a trial that was not trained on has a shorter list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Points = Sequence[tuple[int, float, bool]]
Better = Callable[[float], bool]


def crossing(points: Points, better: Better) -> int | None:
    for step, value, _ in points:
        if better(value):
            return step
    return None


def divergence(points: Points) -> int | None:
    for step, _, diverged in points:
        if diverged:
            return step
    return None


def infeasible(points: Points, better: Better, h: int) -> bool:
    """D <= h and D <= C."""
    d, c = divergence(points), crossing(points, better)
    return d is not None and d <= h and (c is None or d <= c)


def prefix(curves: Sequence[Points], better: Better, n: int, h: int) -> list[int] | None:
    """The shortest prefix of ids holding n trials that are not infeasible at h."""
    held = 0
    for i, points in enumerate(curves):
        if not infeasible(points, better, h):
            held += 1
        if held == n:
            return list(range(i + 1))
    return None


def steps(
    curves: Sequence[Points], better: Better, n: int, grid: Sequence[int]
) -> tuple[str, int | None, int | None]:
    """("reached", S, winner), ("short", h, None) or ("not reached", last h, None)."""
    for h in grid:
        inside = prefix(curves, better, n, h)
        if inside is None:
            return "short", h, None
        for i in inside:
            c = crossing(curves[i], better)
            d = divergence(curves[i])
            if c is not None and c <= h and (d is None or c < d):
                return "reached", h, i
    return "not reached", grid[-1], None
