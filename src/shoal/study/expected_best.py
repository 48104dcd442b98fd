"""What fewer trials would have given: the expected best of n, and S from the first trials alone.

The expected log of the best of n draws from the N feasible trials of a search is the U-statistic
sum_i ln c_(i) C(N - i, n - 1) / C(N, n) over the sorted crossings c_(1) <= c_(2) <= ..., for n <= N/2; its
error comes from deleting whole searches.

Source: sections 6.1 (item 8) and 9.7 of the project's notes on Shallue et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UsageError
from shoal.study.records import Goal
from shoal.study.search_summary import (
    AnalysisSettings,
    SearchSummary,
    cells,
    summary_of_curves,
)
from shoal.study.tables import SearchData

TRIALS = (10, 20, 50, 100)
STILL_FALLING = 1.10


@dataclass(frozen=True, kw_only=True)
class ExpectedBest:
    """The expected S of a search with fewer trials.

    Args:
        curve: whose.
        global_batch: at which batch.
        trials: n.
        steps: the geometric mean over draws of n and over searches.
        error: standard error of its natural log, by deleting whole searches; None for one search.
        is_bound: trials that had not crossed by the end had weight in it, so it is a lower bound.
    """

    curve: str
    global_batch: int
    trials: int
    steps: float
    error: float | None
    is_bound: bool


def best_of_n(crossings: Sequence[float], count: int) -> float:
    """The mean of the smallest of ``count`` values drawn from ``crossings`` without replacement.

    Args:
        crossings: any numbers, e.g. logs of steps; N of them.
        count: n, from 1 to N/2, where the statistic is still that of several draws and not of the minimum.

    Raises:
        UsageError: n outside its range.

    Example:
        >>> best_of_n([1.0, 2.0, 3.0, 4.0], 1)
        2.5
        >>> round(best_of_n([1.0, 2.0, 3.0, 4.0], 2), 9)
        1.666666667
    """
    total = len(crossings)
    if not 1 <= count <= total / 2:
        raise UsageError(
            f"n = {count}; the expected best of n is estimated from N = {total} trials for n from 1 to "
            f"N/2 = {total // 2}; choose one of these"
        )
    weights = best_weights(total, count)
    return float(np.dot(np.sort(np.asarray(crossings, dtype=np.float64)), weights))


def best_weights(total: int, count: int) -> np.ndarray:
    """The chance that the i-th smallest of ``total`` is the smallest of ``count`` drawn ones."""
    whole = math.comb(total, count)
    return np.array([math.comb(total - i, count - 1) / whole for i in range(1, total + 1)])


def expected_best(
    summaries: Iterable[SearchSummary], trials: Sequence[int] = TRIALS
) -> list[ExpectedBest]:
    """The expected best of n at every curve and batch, for each n that half its trials allow.

    Args:
        summaries: of one goal; short searches are left out.
        trials: values of n.
    """
    found: list[ExpectedBest] = []
    for (curve, batch), searches in cells(summaries).items():
        usable = [s for s in searches if not s.is_short]
        for count in trials:
            each = [_one(search, count) for search in usable]
            known = [value for value in each if value is not None]
            if not known:
                continue
            logs = [value for value, _ in known]
            error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else None
            found.append(
                ExpectedBest(
                    curve=curve,
                    global_batch=batch,
                    trials=count,
                    steps=math.exp(float(np.mean(logs))),
                    error=error,
                    is_bound=any(is_bound for _, is_bound in known),
                )
            )
    return found


def _one(search: SearchSummary, count: int) -> tuple[float, bool] | None:
    """The statistic of one search, and whether trials that never crossed had weight in it."""
    feasible = [t for t in search.trials if t.is_feasible]
    if len(feasible) < 2 * count:
        return None
    crossed = sorted(t.crossing for t in feasible if t.has_crossed and t.crossing is not None)
    missed = len(feasible) - len(crossed)
    # A trial that had not crossed by the end takes at least one step more.
    logs = [math.log(max(c, 1)) for c in crossed] + [math.log(search.end + 1)] * missed
    has_weight = best_weights(len(logs), count)[len(crossed) :].sum() > 0
    return best_of_n(logs, count), bool(has_weight)


@dataclass(frozen=True, kw_only=True)
class BudgetStep:
    """S from the first n feasible trials of a search.

    Args:
        key: text of the search's key.
        trials: n.
        steps: S with N = n; None where the goal was not reached within the search's end.
    """

    key: str
    trials: int
    steps: int | None


def budget_sensitivity(
    data: SearchData,
    goal: Goal,
    settings: AnalysisSettings,
    trials: Sequence[int] = TRIALS,
) -> list[BudgetStep]:
    """S of one search had it had fewer feasible trials: exact, by the same definition.

    Args:
        data: the search.
        goal: the goal.
        settings: of the study.
        trials: values of n; those above N are left out, N/2 and N are always in.
    """
    most = settings.budget.feasible
    counts = sorted({n for n in trials if n < most} | {max(most // 2, 1), most})
    rows: list[BudgetStep] = []
    for count in counts:
        if settings.grid is None:
            complete = [
                t
                for t, o in zip(data.trials, data.outcomes, strict=True)
                if o in ("reached", "not_reached")
            ][:count]
            ids = {t.id for t in complete}
            crossed = [
                c
                for t, c in zip(data.trials, data.crossings(goal), strict=True)
                if t.id in ids and c is not None
            ]
            steps = min(crossed, default=None)
        else:
            steps = summary_of_curves(
                data.key,
                list(data.trials),
                list(data.curves),
                goal,
                settings,
                end=None if data.state == "short" else data.end,
                feasible=count,
            ).steps
        rows.append(BudgetStep(key=str(data.key), trials=count, steps=steps))
    return rows


def still_falls(rows: Iterable[BudgetStep]) -> bool:
    """Whether S fell by more than 10 % (in the geometric mean) from half the trials to all of them.

    Args:
        rows: of :func:`budget_sensitivity` over the repeats of one cell, for N/2 and N among others.
    """
    by_search: dict[str, dict[int, int | None]] = {}
    for row in rows:
        by_search.setdefault(row.key, {})[row.trials] = row.steps
    falls: list[float] = []
    for steps in by_search.values():
        most = max(steps)
        half = max((n for n in steps if n <= most / 2), default=most)
        before, after = steps[half], steps[most]
        if before and after:
            falls.append(math.log(before / after))
        elif after:
            return True
    return bool(falls) and float(np.mean(falls)) > math.log(STILL_FALLING)
