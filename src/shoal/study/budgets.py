"""What a fixed budget buys: the best error after so many steps, or so many samples; and who reached the goal.

    step budget t      least metric over all trials and all evaluations with step <= t
    sample budget m    the same with B step <= m

Only searches whose trials were all trained to the budget can answer (``full``): where trials were
stopped at the goal, later and better errors were never measured.

Source: sections 2.1 and 2.2 of the project's notes on Shallue et al. 2019 (figures of best error under step
and epoch budgets, and scatter of learning rate and momentum); the released selector likewise takes the best
over trials and over time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.errors import UsageError
from shoal.study.optima import effective_lr, learning_rate, momentum_of
from shoal.study.records import Outcome, SearchKey
from shoal.study.search_summary import AnalysisSettings, SearchSummary
from shoal.study.table_arrays import MetricColumn
from shoal.study.tables import SearchData

Unit = Literal["steps", "samples"]


@dataclass(frozen=True, kw_only=True)
class BestError:
    """The best that one search had by a budget.

    Args:
        key: the search.
        metric: which error.
        unit: of the budget.
        budget: so many of it.
        value: the best of the metric; None where the budget ends before the first evaluation after step 0.
    """

    key: SearchKey
    metric: str
    unit: Unit
    budget: int
    value: float | None


def complete_trials(data: SearchData, settings: AnalysisSettings) -> list[int]:
    """Ids of the first N trials that never diverged, as the paper counts them.

    Raises:
        UsageError: there are fewer.
    """
    complete = [
        trial.id
        for trial, curve, outcome in zip(data.trials, data.curves, data.outcomes, strict=True)
        if curve.diverged_at is None and outcome not in (Outcome.DIVERGED, Outcome.CRASHED)
    ][: settings.budget.feasible]
    if len(complete) < settings.budget.feasible:
        raise UsageError(
            f"{data.key}: {len(complete)} trials that did not diverge; a budget compares the best of "
            f"{settings.budget.feasible}; finish the search or lower the number of trials"
        )
    return complete


def require_full(settings: AnalysisSettings) -> None:
    """Refuse budgets for studies that stop at the goal.

    Raises:
        UsageError: the study was not run with ``full``.
    """
    if settings.grid is not None and not settings.budget.full:
        raise UsageError(
            "full = false; trials were stopped soon after the goal, so their best error under a budget was "
            "never measured; run the study with --full"
        )


def best_errors(
    column: MetricColumn,
    key: SearchKey,
    metric: str,
    members: Iterable[int],
    budgets: Sequence[int],
    unit: Unit,
    *,
    larger_is_better: bool = False,
) -> list[BestError]:
    """The best error of one search under each budget.

    Args:
        column: the metric of this search.
        key: the search; its batch turns steps into samples.
        metric: the column's name.
        members: ids of the trials that count; see :func:`complete_trials`.
        budgets: in ``unit``.
        unit: "steps" or "samples".
        larger_is_better: the best is then the largest (average precision).
    """
    counted = np.isin(column.trial, np.fromiter(members, dtype=np.int64)) & column.exact
    counted &= np.isfinite(column.value) & (column.step > 0)
    spent = column.step[counted] * (key.global_batch if unit == "samples" else 1)
    values = column.value[counted]
    order = np.argsort(spent, kind="stable")
    accumulate = np.maximum.accumulate if larger_is_better else np.minimum.accumulate
    spent, best = spent[order], accumulate(values[order])
    found: list[BestError] = []
    for budget in budgets:
        place = int(np.searchsorted(spent, budget, side="right")) - 1
        found.append(
            BestError(
                key=key,
                metric=metric,
                unit=unit,
                budget=budget,
                value=float(best[place]) if place >= 0 else None,
            )
        )
    return found


def usual_budgets(summaries: Sequence[SearchSummary], count: int = 4) -> dict[Unit, list[int]]:
    """Budgets that tell batches apart: between the least cost of the goal and the largest measured.

    Args:
        summaries: of one goal; those that reached it set the range.
        count: how many of each unit, geometrically spaced.

    Returns:
        Rising lists; empty where no search reached the goal.
    """
    reached = [s for s in summaries if s.steps]
    if not reached:
        return {"steps": [], "samples": []}
    ends = {
        "steps": [(s.steps or 1, s.end) for s in reached],
        "samples": [
            ((s.steps or 1) * s.key.global_batch, s.end * s.key.global_batch) for s in reached
        ],
    }
    found: dict[Unit, list[int]] = {}
    for unit, pairs in ends.items():
        low = min(cost for cost, _ in pairs)
        # Beyond the smallest end some batch was not trained so far.
        high = max(min(end for _, end in pairs), low + 1)
        points = {round(value) for value in np.geomspace(low, high, count)}
        found["steps" if unit == "steps" else "samples"] = sorted(points)
    return found


@dataclass(frozen=True, kw_only=True)
class ScatterPoint:
    """One trial under one budget.

    Args:
        key: its search.
        trial: its id.
        lr: its learning rate.
        one_minus_momentum: 1 - its momentum.
        effective_lr: lr / (1 - momentum).
        outcome: reached, not reached or diverged by the budget.
        steps: C_i if reached.
        is_best: it gave the search's S.
    """

    key: SearchKey
    trial: int
    lr: float
    one_minus_momentum: float
    effective_lr: float
    outcome: Outcome
    steps: int | None
    is_best: bool


def scatter(
    search: SearchSummary, *, budget: int | None = None, unit: Unit = "steps"
) -> list[ScatterPoint]:
    """Every drawn trial of one search with its outcome under a budget.

    Args:
        search: what it has not trained it cannot tell: the budget is cut at the search's end.
        budget: in ``unit``; the search's end by default.
        unit: "steps" or "samples".
    """
    limit: float = search.end
    if budget is not None:
        limit = min(limit, budget / search.key.global_batch if unit == "samples" else budget)
    rows: list[ScatterPoint] = []
    for row in search.trials:
        reached = row.has_crossed and row.crossing is not None and row.crossing <= limit
        diverged = row.diverged is not None and row.diverged <= limit
        outcome = Outcome.DIVERGED if diverged else Outcome.NOT_REACHED
        parameters = row.trial.parameters
        rows.append(
            ScatterPoint(
                key=search.key,
                trial=row.trial.id,
                lr=learning_rate(parameters),
                one_minus_momentum=1 - momentum_of(parameters),
                effective_lr=effective_lr(parameters),
                outcome=Outcome.REACHED if reached else outcome,
                steps=row.crossing if reached else None,
                is_best=reached and row.trial.id == search.result.winner,
            )
        )
    return rows


def share_within(points: Sequence[ScatterPoint]) -> float:
    """The share of all drawn trials that reached the goal: how large the good region is."""
    if not points:
        return math.nan
    return sum(p.outcome is Outcome.REACHED for p in points) / len(points)
