"""What the analysis takes from one search for one goal: its S, its trials, who was feasible.

Every analysed number starts here, and everything here is derived again from the stored evaluations by the
definition in :mod:`shoal.study.steps_to_result`, cut off at the search's end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.study.records import (
    CONFIRM,
    Budget,
    Curve,
    Goal,
    Outcome,
    SearchKey,
    Trial,
)
from shoal.study.steps_to_result import NEVER, Reach, StepsToResult, marks, steps_to_result
from shoal.study.tables import SearchData


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """What the analysis must know of a study's spec.

    Args:
        goals: one metric, in the order in which they are shown; the first is the one of the headline.
        budget: N, draw limit, T, kappa, full.
        grid: the evaluation steps, from 0; those beyond ``budget.steps`` are left out. None for imported
            measurements whose trials were each evaluated at steps of their own: then S is the first
            crossing of the first N complete trials by id, and the point before it is its own trial's.
        train_samples: n, where a step's samples are drawn without replacement; None with replacement.
    """

    goals: tuple[Goal, ...]
    budget: Budget
    grid: tuple[int, ...] | None
    train_samples: int | None = None

    def __post_init__(self) -> None:
        if not self.goals:
            raise UsageError("goals = none; the analysis asks about a goal; give at least one")
        if self.train_samples is not None and self.train_samples < 1:
            raise UsageError(
                f"train_samples = {self.train_samples}; it counts training samples; give 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial, cut off at the end of its search.

    Args:
        trial: its setting.
        crossing: C_i, the first step strictly better than the goal; None if not by the end.
        diverged: D_i; None if not by the end.
        last: the last step it was evaluated at, at most the end.
        is_feasible: it is one of the N that had not diverged by S (by the end, if S is not known).
    """

    trial: Trial
    crossing: int | None
    diverged: int | None
    last: int
    is_feasible: bool

    @property
    def has_crossed(self) -> bool:
        """Whether it crossed and had not diverged before."""
        return self.crossing is not None and (
            self.diverged is None or self.crossing < self.diverged
        )

    @property
    def outcome(self) -> Outcome:
        """How it stands at the end."""
        if self.has_crossed:
            return Outcome.REACHED
        return Outcome.NOT_REACHED if self.diverged is None else Outcome.DIVERGED


@dataclass(frozen=True, kw_only=True)
class SearchSummary:
    """One search and one goal.

    Args:
        key: the search.
        result: S, or why there is none.
        feasible: N, what the search was to find.
        end: h, the last step that counts.
        trials: the trials drawn, in id order, cut off at ``end``.
    """

    key: SearchKey
    result: StepsToResult
    feasible: int
    end: int
    trials: tuple[TrialSummary, ...]

    @property
    def goal(self) -> Goal:
        """The goal that ``result`` is about."""
        return self.result.goal

    @property
    def steps(self) -> int | None:
        """S, if it was reached."""
        return self.result.steps

    @property
    def previous(self) -> int:
        """The grid point before S; 0 where there is none."""
        return self.result.previous or 0

    @property
    def is_censored(self) -> bool:
        """Whether S is only known to lie beyond :attr:`censored_at`."""
        return self.result.reach in (Reach.NOT_REACHED, Reach.UNFINISHED) and self.result.end > 0

    @property
    def censored_at(self) -> int:
        """The last step to which all feasible trials are known without a crossing."""
        return self.result.end

    @property
    def is_short(self) -> bool:
        """Whether N feasible trials were never found: S says nothing and is no bound."""
        return self.result.reach is Reach.SHORT

    @property
    def winner(self) -> TrialSummary | None:
        """The trial that gave S."""
        if self.result.winner is None:
            return None
        return next(t for t in self.trials if t.trial.id == self.result.winner)

    def best(self, count: int) -> list[TrialSummary]:
        """The feasible trials that crossed first, ties by id; at most ``count``. None without S."""
        if self.steps is None:
            return []
        crossed = [t for t in self.trials if t.is_feasible and t.has_crossed]
        return sorted(crossed, key=lambda t: (t.crossing, t.trial.id))[:count]


def summarise(data: SearchData, goal: Goal, settings: AnalysisSettings) -> SearchSummary:
    """S of one search, and its trials cut off at its end.

    Args:
        data: the search.
        goal: any goal within what was trained: not harder than the study's hardest unless it was full.
        settings: of the study.

    Raises:
        UsageError: the search holds no trial, or is a confirmation.
    """
    if data.key.repeat == CONFIRM:
        raise UsageError(
            f"{data.key}: it re-runs one setting and is no search; give a search with a repeat >= 0"
        )
    if not data.trials:
        raise UsageError(f"{data.key}: it has no trials; leave it out until it has begun")
    if settings.grid is None:
        return _summarise_imported(data, goal, settings)
    return summary_of_curves(
        data.key,
        list(data.trials),
        list(data.curves),
        goal,
        settings,
        end=None if data.state == "short" else data.end,
    )


def summary_of_curves(
    key: SearchKey,
    trials: Sequence[Trial],
    curves: Sequence[Curve],
    goal: Goal,
    settings: AnalysisSettings,
    *,
    end: int | None,
    feasible: int | None = None,
) -> SearchSummary:
    """As :func:`summarise`, for N other than the study's, or an end other than the search's.

    Args:
        key: the search.
        trials: in id order.
        curves: of the same trials.
        goal: the goal.
        settings: of the study; ``settings.grid`` must be given.
        end: h; None while the search is not finished or where it ran short.
        feasible: N; the study's by default.
    """
    assert settings.grid is not None
    budget = settings.budget
    needed = budget.feasible if feasible is None else feasible
    last = budget.steps if end is None else min(end, budget.steps)
    grid = settings.grid[: bisect_right(settings.grid, last)]
    placed = [Curve() for _ in range(trials[-1].id + 1)]
    for trial, curve in zip(trials, curves, strict=True):
        placed[trial.id] = curve
    # A finished search holds all its P needs; in any other the draws not yet made may still matter.
    draws = budget.draws if end is None else max(len(placed), needed)
    result = steps_to_result(
        placed, goal, feasible=needed, grid=grid, draws=max(draws, len(placed))
    )
    # Unfinished curves are only comparable up to the last step they have in common.
    censored = result.reach in (Reach.NOT_REACHED, Reach.UNFINISHED)
    stop = max(result.end, 0) if censored else grid[-1]
    return SearchSummary(
        key=key,
        result=result,
        feasible=needed,
        end=stop,
        trials=_trials(trials, curves, goal, result, stop),
    )


def _trials(
    trials: Sequence[Trial],
    curves: Sequence[Curve],
    goal: Goal,
    result: StepsToResult,
    stop: int,
) -> tuple[TrialSummary, ...]:
    """The drawn trials, cut off; feasible are those of P that had not diverged by S."""
    at = result.steps if result.steps is not None else stop
    rows: list[TrialSummary] = []
    for trial, curve in zip(trials, curves, strict=True):
        mark = marks(curve, goal, stop)
        rows.append(
            TrialSummary(
                trial=trial,
                crossing=None if mark.crossing == NEVER else int(mark.crossing),
                diverged=None if mark.diverged == NEVER else int(mark.diverged),
                last=max(min(mark.last, stop), 0),
                is_feasible=trial.id < result.draws and mark.infeasible_from > at,
            )
        )
    return tuple(rows)


def _summarise_imported(data: SearchData, goal: Goal, settings: AnalysisSettings) -> SearchSummary:
    """First crossing of the first N complete trials by id, each on its own steps, as released.

    Source: Shallue et al. 2019, the released loader: strict comparison, no interpolation, ties in step
    to the lowest id; complete trials only.
    """
    feasible = settings.budget.feasible
    complete = {Outcome.REACHED, Outcome.NOT_REACHED}
    chosen: set[int] = set()
    for trial, outcome in zip(data.trials, data.outcomes, strict=True):
        if outcome in complete and len(chosen) < feasible:
            chosen.add(trial.id)
    rows = []
    best: tuple[float, int] = (math.inf, -1)
    before: dict[int, int | None] = {}
    for trial, curve in zip(data.trials, data.curves, strict=True):
        crossing = curve.crossing(goal)
        if trial.id in chosen and crossing is not None:
            best = min(best, (crossing, trial.id))
            steps = [e.step for e in curve.evaluations if e.step < crossing]
            before[trial.id] = steps[-1] if steps else None
        rows.append(
            TrialSummary(
                trial=trial,
                crossing=crossing,
                diverged=curve.diverged_at,
                last=max(curve.step, 0),
                is_feasible=trial.id in chosen,
            )
        )
    ends = [max(c.step, 0) for t, c in zip(data.trials, data.curves, strict=True) if t.id in chosen]
    end = min(ends, default=0)
    short = len(chosen) < feasible
    result = _imported_result(goal, best, before, end=end, chosen=chosen, short=short)
    return SearchSummary(
        key=data.key, result=result, feasible=feasible, end=end, trials=tuple(rows)
    )


def _imported_result(
    goal: Goal,
    best: tuple[float, int],
    before: dict[int, int | None],
    *,
    end: int,
    chosen: set[int],
    short: bool,
) -> StepsToResult:
    draws = max(chosen, default=-1) + 1
    if short:
        return StepsToResult(
            goal=goal, reach=Reach.SHORT, end=end, draws=draws, feasible=len(chosen)
        )
    if not math.isfinite(best[0]):
        return StepsToResult(
            goal=goal, reach=Reach.NOT_REACHED, end=end, draws=draws, feasible=len(chosen)
        )
    steps = int(best[0])
    return StepsToResult(
        goal=goal,
        reach=Reach.REACHED,
        steps=steps,
        previous=before[best[1]],
        winner=best[1],
        crossing=steps,
        end=max(end, steps),
        draws=draws,
        feasible=len(chosen),
    )


def cells(
    summaries: Iterable[SearchSummary],
) -> dict[tuple[str, int], list[SearchSummary]]:
    """Summaries by (curve, global batch), sorted, each list by repeat."""
    found: dict[tuple[str, int], list[SearchSummary]] = {}
    for summary in sorted(summaries, key=lambda s: s.key):
        found.setdefault((summary.key.curve, summary.key.global_batch), []).append(summary)
    return found
