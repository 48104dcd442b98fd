"""Steps to a result, S: what a search says about a goal, from its trials' curves alone.

Trials i are numbered in the order of their draws; C_i(g) is the first grid step at which trial i is
strictly better than goal g, D_i the grid step at which it diverged (either may never come), N the
number of feasible trials a search must hold. With

    P_g(h) = the shortest prefix of ids holding N trials that have not (D_i <= h and D_i <= C_i(g))
    S_g    = min { h on the grid : some i in P_g(h) has C_i(g) <= h and C_i(g) < D_i }

S is the first crossing on the evaluation grid by one of N trials that are *feasible at S*: no
interpolation, no smoothing, no "must stay below"; the lowest id wins a tie. A trial that diverged at or
before its crossing is infeasible and cannot win. P depends on curves up to h only, so S can be known
before anything is trained further.

The same in closed form, which is what is computed here: trial i enters P at

    e_i = 0 for i < N, else the (i - N + 1)-th smallest D_j over infeasible j < i,

so S = min_i max(C_i, e_i). With ``draws`` trials at most, P no longer exists from the
(draws - N + 1)-th smallest D of an infeasible trial on: a search that comes there is short.

Source: Shallue et al. 2019, section 4.2 and the released loader (strict comparison, first crossing,
lowest id), as restated in the project's notes.
Deviates: the paper's feasible trials are those that never diverge within the whole budget; ours have
not diverged by S. That is what an early stop can know; ``full`` budgets show the difference.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.study.records import Curve, Goal, Measured

NEVER = math.inf
FEW_STEPS = 20
"""Below so many steps S is too coarse to compare: one step is more than 5 %."""


class Reach(StrEnum):
    """What a search says about one goal."""

    REACHED = "reached"
    """S is known and final."""
    NOT_REACHED = "not reached"
    """No feasible trial crossed up to the end; S is larger, how much is not known (censored)."""
    SHORT = "short"
    """Too many draws diverged: N feasible trials were never found, S says nothing and is no bound."""
    UNFINISHED = "unfinished"
    """The curves do not reach the end yet; S is larger than the last common step."""


class Marks(NamedTuple):
    """What steps to a result need of one trial's curve; ``NEVER`` where it did not happen."""

    crossing: float
    diverged: float
    last: int

    @property
    def is_winner(self) -> bool:
        """Whether it crossed before it diverged, if it did."""
        return self.crossing < self.diverged

    @property
    def is_open(self) -> bool:
        """Whether what comes after ``last`` can still change S."""
        return self.crossing == NEVER and self.diverged == NEVER

    @property
    def infeasible_from(self) -> float:
        """The step from which the trial does not count among the N."""
        return self.diverged if self.diverged <= self.crossing else NEVER


@dataclass(frozen=True, kw_only=True)
class StepsToResult:
    """What one search says about one goal.

    Args:
        goal: the goal.
        reach: whether it was reached; the other fields are read with this one.
        steps: S, or None unless reached.
        previous: the grid point before S: S is interval-censored in (previous, steps]. None unless
            reached, or where S is the grid's first point.
        winner: lowest id among the trials that had crossed by S in P(S), or None unless reached.
        crossing: the winner's own crossing; before ``steps`` where the winner is a late draw that
            entered P when another trial diverged.
        end: the grid's end; where short or unfinished, the last step every trial of P is known at (-1
            before any). An unreached goal is censored there.
        draws: trials in P at S, or at ``end`` where not reached.
        feasible: how many of them are feasible there; N unless short.
        every_second: S on every second grid point, by the trials of P(S); None where it lies beyond
            the curves.
        confirmed: first grid point at which a trial of P(S) is better and the next point agrees;
            None where that lies beyond the curves.
        at_crossing: the winner's metrics at its crossing; the test metric among them was not used.
    """

    goal: Goal
    reach: Reach
    steps: int | None = None
    previous: int | None = None
    winner: int | None = None
    crossing: int | None = None
    end: int
    draws: int
    feasible: int
    every_second: int | None = None
    confirmed: int | None = None
    at_crossing: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def is_too_coarse(self) -> bool:
        """Whether S is below 20 steps: too few to resolve, however fine the grid."""
        return self.steps is not None and self.steps < FEW_STEPS

    @property
    def test_metric(self) -> Measured | None:
        """The goal's metric on the test split at the winner's crossing, where it was measured."""
        return self.at_crossing.get("test/" + self.goal.metric.split("/", 1)[1])

    @property
    def words(self) -> str:
        """S, or why there is none, in a few words."""
        if self.reach is Reach.REACHED:
            return f"{self.steps} steps"
        if self.reach is Reach.NOT_REACHED:
            return f"not reached, censored at {self.end}"
        if self.reach is Reach.SHORT:
            return f"short: {self.feasible} feasible trials in {self.draws} draws"
        return f"unfinished, not reached by {self.end}"


def marks(curve: Curve, goal: Goal, end: float = NEVER) -> Marks:
    """C_i, D_i and the last evaluated step of one curve.

    Args:
        curve: the trial's evaluations.
        goal: which crossing.
        end: what happened after this step is left out.
    """
    crossing, diverged = curve.crossing(goal), curve.diverged_at
    return Marks(
        NEVER if crossing is None or crossing > end else crossing,
        NEVER if diverged is None or diverged > end else diverged,
        curve.step,
    )


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Who is in P, and when: the closed form of the module's head.

    Args:
        marks: one entry for each draw that may be made, in id order; ``Marks(NEVER, NEVER, -1)``
            for a trial that does not exist yet.
        feasible: N.
        entry: e_i for each of them.
        short_from: the step from which P does not exist.
        result: the smallest max(C_i, e_i) known.
    """

    marks: Sequence[Marks]
    feasible: int
    entry: Sequence[float]
    short_from: float
    result: float

    @classmethod
    def of(cls, known: Sequence[Marks], feasible: int, draws: int) -> Prefix:
        """P as far as ``known`` decides it; at most ``draws`` trials."""
        unborn = [Marks(NEVER, NEVER, -1)] * (draws - len(known))
        trials = [*known[:draws], *unborn]
        infeasible: list[float] = []
        entry: list[float] = []
        result = NEVER
        for place, trial in enumerate(trials):
            needed = place - feasible + 1
            if needed <= 0:
                entry.append(0)
            else:
                entry.append(infeasible[needed - 1] if needed <= len(infeasible) else NEVER)
            if trial.is_winner:
                result = min(result, max(trial.crossing, entry[-1]))
            if trial.infeasible_from < NEVER:
                insort(infeasible, trial.infeasible_from)
        spare = draws - feasible
        return cls(
            marks=trials,
            feasible=feasible,
            entry=entry,
            short_from=infeasible[spare] if spare < len(infeasible) else NEVER,
            result=result,
        )

    def first_unknown(self, grid: Sequence[int]) -> float:
        """The first grid step at which P, or a crossing in P, depends on what was not trained yet."""
        return min(
            (
                max(entry, after(grid, trial.last))
                for entry, trial in zip(self.entry, self.marks, strict=True)
                if entry < NEVER and trial.is_open
            ),
            default=NEVER,
        )

    def members(self, step: float) -> int:
        """How many ids, from 0, are in P at ``step``; ``draws`` where P does not exist."""
        # Entry steps never fall as ids rise: one more trial and one rank higher.
        return bisect_right(self.entry, step)

    def feasible_at(self, step: float) -> int:
        """How many members of P at ``step`` are feasible there."""
        inside = self.marks[: self.members(step)]
        return sum(trial.infeasible_from > step for trial in inside)

    def winner(self, step: float) -> int:
        """The lowest id of those that had crossed by ``step`` in P."""
        return next(
            place
            for place, (entry, trial) in enumerate(zip(self.entry, self.marks, strict=True))
            if entry <= step and trial.is_winner and trial.crossing <= step
        )


def after(grid: Sequence[int], step: int) -> float:
    """The first grid point after ``step``; ``NEVER`` at the grid's end."""
    place = bisect_right(grid, step)
    return grid[place] if place < len(grid) else NEVER


def before(grid: Sequence[int], step: float) -> int:
    """The last grid point before ``step``; -1 where there is none."""
    place = bisect_left(grid, step)
    return grid[place - 1] if place else -1


def check_grid(grid: Sequence[int]) -> None:
    """Refuse a grid that does not start at 0 or does not rise.

    Raises:
        UsageError: it does not.
    """
    rises = all(low < high for low, high in itertools.pairwise(grid))
    if not grid or grid[0] != 0 or not rises:
        raise UsageError(
            f"grid = {list(grid[:5])}...; an evaluation grid starts at step 0 and rises; "
            "give the points in order, 0 first"
        )


def steps_to_result(
    curves: Sequence[Curve],
    goal: Goal,
    *,
    feasible: int,
    grid: Sequence[int],
    draws: int | None = None,
) -> StepsToResult:
    """S of one search for one goal.

    Args:
        curves: by trial id from 0, in the order of the draws; an empty curve for a trial that was not
            started. A curve that ends before the grid does, neither diverged nor across the goal, makes
            the result unfinished from there on. What lies beyond the grid's end is left out.
        goal: the goal.
        feasible: N, trials that must not have diverged, >= 1.
        grid: evaluation steps up to the end h of the search, rising from 0.
        draws: most trials the search may draw; as many as there are curves by default.

    Returns:
        S with its winner, or a censored, short or unfinished result.

    Raises:
        UsageError: a grid that does not rise from 0, or numbers that contradict each other.
    """
    check_grid(grid)
    limit = len(curves) if draws is None else draws
    if feasible < 1 or limit < feasible or limit < len(curves):
        raise UsageError(
            f"feasible = {feasible}, draws = {limit}, curves = {len(curves)}; the draws hold at least "
            "the feasible trials (>= 1) and all curves; raise draws"
        )
    end = grid[-1]
    prefix = Prefix.of([marks(curve, goal, end) for curve in curves], feasible, limit)
    unknown = prefix.first_unknown(grid)
    if prefix.result < min(unknown, prefix.short_from):
        return _reached(curves, goal, prefix, grid)
    if prefix.short_from < unknown:
        reach, stop = Reach.SHORT, prefix.short_from
        known = before(grid, stop)
    elif unknown < NEVER:
        reach, known = Reach.UNFINISHED, before(grid, unknown)
        stop = known
    else:
        reach, known, stop = Reach.NOT_REACHED, end, end
    return StepsToResult(
        goal=goal,
        reach=reach,
        end=known,
        draws=prefix.members(stop),
        feasible=prefix.feasible_at(stop),
    )


def _reached(
    curves: Sequence[Curve], goal: Goal, prefix: Prefix, grid: Sequence[int]
) -> StepsToResult:
    steps = int(prefix.result)
    winner, count = prefix.winner(steps), prefix.members(steps)
    crossing = int(prefix.marks[winner].crossing)
    metrics = next(e.metrics for e in curves[winner].evaluations if e.step == crossing)
    place = bisect_left(grid, steps)
    entry = prefix.entry[:count]
    met = [_met(curve, goal) for curve in curves[:count]]
    return StepsToResult(
        goal=goal,
        reach=Reach.REACHED,
        steps=steps,
        previous=grid[place - 1] if place else None,
        winner=winner,
        crossing=crossing,
        end=grid[-1],
        draws=count,
        feasible=prefix.feasible_at(steps),
        every_second=_first(met, entry, grid[::2], consecutive=1),
        confirmed=_first(met, entry, grid, consecutive=2),
        at_crossing=metrics,
    )


def _met(curve: Curve, goal: Goal) -> dict[int, bool]:
    """Whether the goal was met, by evaluated step, before the divergence."""
    met: dict[int, bool] = {}
    for evaluation in curve.evaluations:
        if evaluation.diverged:
            break
        measured = evaluation.metrics.get(goal.metric)
        met[evaluation.step] = measured is not None and goal.is_met_by(measured)
    return met


def _first(
    met: Sequence[Mapping[int, bool]],
    entry: Sequence[float],
    grid: Sequence[int],
    *,
    consecutive: int,
) -> int | None:
    """The first grid point by which a trial in P met the goal at so many points in a row."""
    best = NEVER
    for place, step in enumerate(grid[: len(grid) - consecutive + 1]):
        if step >= best:
            break
        points = grid[place : place + consecutive]
        for values, start in zip(met, entry, strict=True):
            if all(values.get(point, False) for point in points):
                best = min(best, max(step, after(grid, math.ceil(start) - 1)))
    return None if best == NEVER else int(best)
