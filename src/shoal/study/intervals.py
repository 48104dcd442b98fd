"""Intervals of S over repeated searches: a t-interval on log S, and the smallest and largest.

A bootstrap over the trials of one search is wrong for a minimum (it never falls below S), so the only
honest source of an interval is R independently scrambled searches.

Source: section 9.7 of the project's notes on Shallue et al. 2019; Choi et al. 2019 repeat each search five
times and show the smallest and largest. The paper has no intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.errors import UsageError
from shoal.study.search_summary import SearchSummary, cells


class Interval(NamedTuple):
    """From ``low`` to ``high``, either of which may be infinite."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        return self.low <= value <= self.high


class PooledSpread(NamedTuple):
    """The sd of log S of one search, pooled over cells, with its degrees of freedom."""

    sd: float
    freedom: int


@dataclass(frozen=True, kw_only=True)
class RepeatedSteps:
    """What the repeats at one batch say together.

    Args:
        curve: whose.
        global_batch: at which batch.
        steps: S of every search that reached the goal, by repeat.
        censored_at: where each search that did not was given up.
        left_out: searches that say nothing (short, or void), by name.
        centre: geometric mean of ``steps``; where some searches were censored the median instead, which
            is None unless most reached the goal.
        interval: of the mean on the log scale; None where it cannot be had.
        lowest: smallest S; None without any.
        highest: largest S; infinite where a search was censored, None without any search.
        why_not: why there is no interval; empty where there is one.
        is_pooled: the interval's sd is that over all batches.
    """

    curve: str
    global_batch: int
    steps: tuple[int, ...]
    censored_at: tuple[int, ...]
    left_out: tuple[str, ...]
    centre: float | None
    interval: Interval | None
    lowest: float | None
    highest: float | None
    why_not: str
    is_pooled: bool


def mean_interval(
    logs: Sequence[float],
    *,
    level: float = 0.95,
    pooled: PooledSpread | None = None,
    least_sd: float = 0.0,
) -> Interval | None:
    """The t-interval of a mean of logs, on the scale of the values themselves.

    Args:
        logs: natural logs, one per repeat.
        level: nominal coverage.
        pooled: used in place of the logs' own sd; required for fewer than 3.
        least_sd: the sd is taken to be no less: repeats that fall on one grid point are not equal.

    Returns:
        exp(mean -/+ t sd / sqrt(R)), or None for a single value, or two without ``pooled``.
    """
    from scipy.stats import t as student

    count = len(logs)
    if count < 2 or (count == 2 and pooled is None):
        return None
    sd, freedom = (float(np.std(logs, ddof=1)), count - 1) if pooled is None else pooled
    if freedom < 1:
        return None
    half = float(student.ppf(0.5 + level / 2, freedom)) * max(sd, least_sd) / math.sqrt(count)
    mean = float(np.mean(logs))
    return Interval(math.exp(mean - half), math.exp(mean + half))


def pooled_spread(groups: Iterable[Sequence[float]]) -> PooledSpread | None:
    """The sd within groups of logs: square root of summed squares over summed (R - 1).

    Args:
        groups: logs of one batch each; those with fewer than two count for nothing.

    Returns:
        None without a group of two.
    """
    squares, freedom = 0.0, 0
    for logs in groups:
        if len(logs) >= 2:
            squares += float(np.var(logs)) * len(logs)
            freedom += len(logs) - 1
    return PooledSpread(math.sqrt(squares / freedom), freedom) if freedom else None


def rounding_sd(summaries: Iterable[SearchSummary]) -> float:
    """The sd that the evaluation grid alone gives log S: a step's width over the square root of 12.

    Returns:
        For the mean width of the searches that reached the goal; 0 without any.
    """
    widths = [math.log(s.steps / max(s.previous, s.steps / 2)) for s in summaries if s.steps]
    return sum(widths) / len(widths) / math.sqrt(12) if widths else 0.0


def repeated_steps(
    summaries: Iterable[SearchSummary],
    *,
    level: float = 0.95,
    void: Iterable[object] = (),
) -> list[RepeatedSteps]:
    """Centre and interval of S for every curve and batch.

    Args:
        summaries: of one goal.
        level: nominal coverage.
        void: keys of searches whose S does not count (a decay at the lower edge of its range).

    Returns:
        One entry per curve and batch, sorted. R >= 3: own sd; R = 2: the sd pooled over that curve's
        batches, no interval if it has one degree of freedom; R = 1: none.

    Raises:
        UsageError: summaries of several goals.
    """
    grouped = cells(summaries)
    if len({s.goal for rows in grouped.values() for s in rows}) > 1:
        raise UsageError("summaries = of several goals; intervals are of one; give one goal's")
    left = set(void)
    logs = {
        place: [
            math.log(max(s.steps, 1)) for s in rows if s.steps is not None and s.key not in left
        ]
        for place, rows in grouped.items()
    }
    spreads = {
        curve: pooled_spread(values for (c, _), values in logs.items() if c == curve)
        for curve in {place[0] for place in grouped}
    }
    return [_cell(place, rows, spreads[place[0]], level, left) for place, rows in grouped.items()]


def _cell(
    place: tuple[str, int],
    rows: Sequence[SearchSummary],
    spread: PooledSpread | None,
    level: float,
    left: set[object],
) -> RepeatedSteps:
    counted = [s for s in rows if not s.is_short and s.key not in left]
    steps = tuple(s.steps for s in counted if s.steps is not None)
    censored = tuple(s.censored_at for s in counted if s.is_censored)
    logs = [math.log(max(s, 1)) for s in steps]
    interval, why_not, is_pooled = None, "", False
    if censored:
        why_not = f"{len(censored)} of {len(censored) + len(steps)} searches did not reach the goal"
    elif len(steps) < 2:
        why_not = "one search alone has no interval" if steps else "no search reached the goal"
    elif len(steps) == 2 and (spread is None or spread.freedom < 2):
        why_not = "two searches, and no other batch to pool the spread with"
    else:
        is_pooled = len(steps) == 2
        interval = mean_interval(
            logs,
            level=level,
            pooled=spread if is_pooled else None,
            least_sd=rounding_sd(counted),
        )
    clean = bool(steps) and not censored
    return RepeatedSteps(
        curve=place[0],
        global_batch=place[1],
        steps=steps,
        censored_at=censored,
        left_out=tuple(str(s.key) for s in rows if s not in counted),
        centre=math.exp(float(np.mean(logs))) if clean else _median(steps, censored),
        interval=interval,
        lowest=float(min(steps)) if steps else None,
        highest=math.inf if censored else (float(max(steps)) if steps else None),
        why_not=why_not,
        is_pooled=is_pooled,
    )


def _median(steps: Sequence[int], censored: Sequence[int]) -> float | None:
    """The median where a censored search counts as longer than everything."""
    ordered = sorted([*map(float, steps), *(math.inf for _ in censored)])
    if not ordered:
        return None
    half = len(ordered) // 2
    middle = ordered[half] if len(ordered) % 2 else math.sqrt(ordered[half - 1] * ordered[half])
    return middle if math.isfinite(middle) else None
