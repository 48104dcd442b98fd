"""One search as a pure state machine: which trials must reach which step, and when it is over.

The search trains its trials in lock-step up to *rung ends* r_1 < r_2 < ... on the evaluation grid, each
at most ``kappa`` times the one before (but at least one grid step further). Diverged trials are replaced
by the next draws, which start at step 0 and catch up. As soon as S of the hardest goal is known, its
trials P(S) go on to the horizon h = min(T, kappa S) and the search ends; a goal nobody reaches takes
everything to the budget T; a search that runs out of draws is short.

Exact: P(h), and every crossing up to h, depend on curves up to h only. So S, winners and ties are a
function of the trials' curves alone, whatever order the evaluations arrive in, however they are cut into
calls, and however often the search is rebuilt from what it was told. P of an easier goal is contained in
P of the hardest, and an easier goal is reached no later, so one search covers all its goals.

Two caps save work without touching that: once some trial surely in P crossed at c, S <= c, so nothing
beyond c is needed to find S; and where so many draws diverged that P no longer exists from some step
on, nothing beyond that step is.

Source: section 9.1 of the project's notes on Shallue et al. 2019 (the search is ours; the paper trains
every trial to its budget, which is ``Budget.full``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shoal.errors import UsageError
from shoal.study.records import Budget, Curve, Evaluation, Goal, Outcome, hardest
from shoal.study.steps_to_result import (
    FEW_STEPS,
    NEVER,
    Marks,
    Prefix,
    Reach,
    StepsToResult,
    after,
    before,
    check_grid,
    marks,
    steps_to_result,
)


class State(StrEnum):
    """Where a search stands."""

    RUNNING = "running"
    """Some trial has further to go."""
    DONE = "done"
    """S is known for every goal and its trials are at the horizon, or the budget ended unreached."""
    SHORT = "short"
    """The draw limit was met before N feasible trials were found: no S, and no bound on it."""


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How one trial ended within its search.

    Args:
        outcome: reached, not reached or diverged, by the hardest goal.
        step: the crossing, the last counted step, or the step it diverged at.
    """

    outcome: Outcome
    step: int


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search says; a function of its trials' curves, whatever order they were trained in.

    Args:
        state: see :class:`State`.
        end: h, the last step that counts: every feasible member was trained to it; where short, the
            step at which the draws ran out. -1 before any.
        members: how many ids, from 0, belong to the search: P at S (at ``end`` where unreached or
            full, all draws where short). Later trials and steps beyond ``end`` do not count.
        goals: S for each goal, easiest first.
        outcomes: of each member by id, up to ``end``; empty while running.
        trial_steps: optimizer steps of all members up to ``end``.
    """

    state: State
    end: int
    members: int
    goals: tuple[StepsToResult, ...]
    outcomes: tuple[TrialOutcome, ...]
    trial_steps: int


class Search:
    """Says what to train next and takes in what was measured.

    Evaluations may come in any order among trials; those of one trial come in grid order without gaps.

    Args:
        goals: the goals, all of one metric; kept easiest first.
        budget: N feasible trials, draw limit, T, kappa, full.
        grid: evaluation steps from 0, rising; points beyond T are left out.
        curves: what is known already, by trial id, e.g. from the ledger; copied.

    Raises:
        UsageError: a grid that does not rise from 0, or no goal.
    """

    def __init__(
        self,
        goals: Sequence[Goal],
        budget: Budget,
        grid: Sequence[int],
        curves: Mapping[int, Curve] | None = None,
    ) -> None:
        check_grid(grid)
        self.goals = tuple(_easiest_first(goals))
        self.budget = budget
        self.grid: tuple[int, ...] = tuple(p for p in grid if p <= budget.steps)
        self._hardest = hardest(self.goals)
        self._rungs = rung_ends(self.grid, budget.kappa)
        self._curves: dict[int, Curve] = {}
        self._marks: list[Marks] = []
        self._plan: _Plan | None = None
        for trial in sorted(curves or {}):
            for evaluation in (curves or {})[trial].evaluations:
                self.add(trial, evaluation)

    @property
    def curves(self) -> Mapping[int, Curve]:
        """Everything it was told, by trial id; read only. ``Search(..., curves=this)`` is its copy."""
        return self._curves

    @property
    def trial_steps(self) -> int:
        """Optimizer steps of everything it was told, members or not: what it cost."""
        return sum(max(curve.step, 0) for curve in self._curves.values())

    @property
    def finished(self) -> bool:
        """Whether nothing more is wanted."""
        return not self._current().targets

    @property
    def draws_needed(self) -> int:
        """How many trials must exist by now; never more than the draw limit, never falling to less
        than what is wanted."""
        return max((*self._current().targets, *self._curves, self.budget.feasible - 1)) + 1

    def targets(self) -> dict[int, int]:
        """How far each trial that is not there yet must surely be trained; empty when finished.

        Targets fall when another trial's crossing shows that less is needed; what was trained beyond
        does no harm and counts for nothing.
        """
        return dict(self._current().targets)

    def wanted(self) -> dict[int, int]:
        """The next grid step of each trial that has further to go; empty when finished."""
        return {
            trial: int(after(self.grid, self._last(trial))) for trial in self._current().targets
        }

    def add(self, trial: int, evaluation: Evaluation) -> None:
        """Take in one evaluation.

        Args:
            trial: its trial's id, below the draw limit.
            evaluation: at the trial's next grid point. More than is wanted may be told.

        Raises:
            UsageError: not the next grid point of that trial, which has not diverged, or no such
                trial.
        """
        if not 0 <= trial < self.budget.draws:
            raise UsageError(
                f"trial = {trial}; this search draws at most {self.budget.draws} trials, from id 0; "
                "raise draw_limit, or give the search its own rows"
            )
        curve = self._curves.setdefault(trial, Curve())
        expected = after(self.grid, curve.step)
        if curve.evaluations and curve.evaluations[-1].diverged:
            raise UsageError(
                f"trial {trial}, step {evaluation.step}: it diverged at step {curve.step}; a trial "
                "ends there; do not train it further"
            )
        if evaluation.step != expected:
            raise UsageError(
                f"trial {trial}, step {evaluation.step}: its next grid point is {expected:g}; "
                "evaluations of a trial come one after the other; evaluate it there first"
            )
        curve.evaluations.append(evaluation)
        self._mark(trial, evaluation)
        self._plan = None

    def result(self) -> SearchResult:
        """What it says; provisional while running."""
        plan = self._current()
        curves = [self._curves.get(place, Curve()) for place in range(self._born())]
        if plan.state is State.RUNNING:
            return self._result_of(curves, plan)
        return self._result_of(curves[: plan.members], plan)

    def outcome(self, trial: int) -> Outcome:
        """How one trial stands by the hardest goal, up to the search's end."""
        curve = self._curves.get(trial, Curve())
        return self._outcome(curve, self._current().end).outcome

    def summary(self) -> dict[str, Any]:
        """The result as JSON values: the search's last row in the ledger."""
        result = self.result()
        return {
            "state": str(result.state),
            # While it runs h is not known, and what reads the row must not cut anything off.
            "end": None if result.state is State.RUNNING else result.end,
            "draws": result.members,
            "goals": [_row(goal) for goal in result.goals],
        }

    def _result_of(self, curves: Sequence[Curve], plan: _Plan) -> SearchResult:
        goals = tuple(self._goal(curves, goal, plan) for goal in self.goals)
        over = plan.state is not State.RUNNING
        return SearchResult(
            state=plan.state,
            end=plan.end,
            members=plan.members,
            goals=goals,
            outcomes=tuple(self._outcome(curve, plan.end) for curve in curves) if over else (),
            trial_steps=sum(max(min(c.step, plan.end), 0) for c in curves[: plan.members]),
        )

    def _goal(self, curves: Sequence[Curve], goal: Goal, plan: _Plan) -> StepsToResult:
        feasible, draws = self.budget.feasible, self.budget.draws
        if plan.state is State.RUNNING:
            return steps_to_result(curves, goal, feasible=feasible, grid=self.grid, draws=draws)
        grid = [point for point in self.grid if point <= plan.end]
        result = steps_to_result(curves, goal, feasible=feasible, grid=grid)
        if plan.state is State.SHORT and result.reach is not Reach.REACHED:
            # An easier goal's P may still exist, but nothing was trained on for it.
            return replace(result, reach=Reach.SHORT)
        return result

    def _outcome(self, curve: Curve, end: int) -> TrialOutcome:
        crossing, diverged, last = marks(curve, self._hardest, end)
        if crossing < diverged:
            return TrialOutcome(outcome=Outcome.REACHED, step=int(crossing))
        if diverged < NEVER:
            return TrialOutcome(outcome=Outcome.DIVERGED, step=int(diverged))
        return TrialOutcome(outcome=Outcome.NOT_REACHED, step=min(last, end))

    def _last(self, trial: int) -> int:
        return self._marks[trial].last if trial < len(self._marks) else -1

    def _born(self) -> int:
        return max(self._curves, default=-1) + 1

    def _mark(self, trial: int, evaluation: Evaluation) -> None:
        while len(self._marks) <= trial:
            self._marks.append(Marks(NEVER, NEVER, -1))
        old = self._marks[trial]
        measured = evaluation.metrics.get(self._hardest.metric)
        met = measured is not None and self._hardest.is_met_by(measured)
        self._marks[trial] = Marks(
            evaluation.step if met and old.crossing == NEVER else old.crossing,
            evaluation.step if evaluation.diverged else old.diverged,
            evaluation.step,
        )

    def _current(self) -> _Plan:
        if self._plan is None:
            prefix = Prefix.of(self._marks, self.budget.feasible, self.budget.draws)
            self._plan = _plan(prefix, self.budget, self.grid, self._rungs)
        return self._plan


def _easiest_first(goals: Sequence[Goal]) -> list[Goal]:
    down = any(goal.larger_is_better for goal in goals)
    return sorted(goals, key=lambda goal: goal.value if down else -goal.value)


def _row(result: StepsToResult) -> dict[str, Any]:
    test = result.test_metric
    return {
        "metric": result.goal.metric,
        "value": result.goal.value,
        "reach": str(result.reach),
        "steps": result.steps,
        "previous": result.previous,
        "winner": result.winner,
        "every_second": result.every_second,
        "confirmed_by_next": result.confirmed,
        "test": None if test is None or not math.isfinite(test.value) else test.value,
    }


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is still to do, as far as is known now."""

    state: State
    end: int
    members: int
    targets: Mapping[int, int]


def rung_ends(grid: Sequence[int], kappa: float) -> list[int]:
    """r_1 < r_2 < ...: the steps at which the trials of a search wait for each other.

    The first is at most ``max(20, kappa)`` steps: a search that ends below has nothing to save.

    Args:
        grid: evaluation steps up to the budget, rising from 0.
        kappa: largest ratio of neighbours, >= 1, where one grid step is not more.

    Returns:
        Grid points; the last is the grid's.
    """
    ends = [_at_most(grid, max(FEW_STEPS, kappa))]
    while ends[-1] < grid[-1]:
        ends.append(max(_at_most(grid, kappa * ends[-1]), int(after(grid, ends[-1]))))
    return ends


def _at_most(grid: Sequence[int], step: float) -> int:
    return grid[bisect_right(grid, step) - 1]


def _plan(prefix: Prefix, budget: Budget, grid: Sequence[int], rungs: Sequence[int]) -> _Plan:
    """The state machine's only rule, a function of what is known."""
    if budget.full:
        return _plan_full(prefix, grid, rungs)
    unknown = prefix.first_unknown(grid)
    cap = min(prefix.result, prefix.short_from, grid[-1])
    if unknown <= cap:
        rung = next(end for end in rungs if end >= unknown)
        goal = int(min(rung, cap))
        return _running(prefix, grid, goal, known=before(grid, unknown))
    if prefix.result < prefix.short_from:
        steps = int(prefix.result)
        end = max(steps, _at_most(grid, budget.kappa * steps))
        members = prefix.members(steps)
        targets = {
            trial: end
            for trial in range(members)
            if prefix.marks[trial].diverged == NEVER and prefix.marks[trial].last < end
        }
        state = State.RUNNING if targets else State.DONE
        return _Plan(state=state, end=end, members=members, targets=targets)
    if prefix.short_from < NEVER:
        end = int(prefix.short_from)
        return _Plan(state=State.SHORT, end=end, members=budget.draws, targets={})
    end = grid[-1]
    return _Plan(state=State.DONE, end=end, members=prefix.members(end), targets={})


def _running(prefix: Prefix, grid: Sequence[int], goal: int, known: int) -> _Plan:
    """Every open trial that is in P at ``goal`` goes there."""
    targets = {
        trial: goal
        for trial in range(prefix.members(goal))
        if prefix.marks[trial].is_open and prefix.marks[trial].last < goal
    }
    assert targets, (goal, known)
    return _Plan(
        state=State.RUNNING, end=known, members=prefix.members(max(known, 0)), targets=targets
    )


def _plan_full(prefix: Prefix, grid: Sequence[int], rungs: Sequence[int]) -> _Plan:
    """The audit: all of P at the budget's end, trained to it, by the same rungs."""
    behind = {
        trial: max(entry, after(grid, mark.last))
        for trial, (entry, mark) in enumerate(zip(prefix.entry, prefix.marks, strict=True))
        if entry < NEVER and mark.diverged == NEVER and mark.last < grid[-1]
    }
    if not behind:
        end, short = grid[-1], prefix.short_from <= prefix.result and prefix.short_from < NEVER
        state = State.SHORT if short else State.DONE
        return _Plan(state=state, end=end, members=prefix.members(end), targets={})
    unknown = min(behind.values())
    goal = next(end for end in rungs if end >= unknown)
    targets = {
        trial: goal
        for trial in behind
        if prefix.entry[trial] <= goal and prefix.marks[trial].last < goal
    }
    known = before(grid, unknown)
    return _Plan(
        state=State.RUNNING, end=known, members=prefix.members(max(known, 0)), targets=targets
    )
