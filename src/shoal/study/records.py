"""The words of a study as values: goals, searches, trials, evaluations, outcomes.

A *study* holds one workload and one or several *curves* (one per optimizer); a *search* is the set of
trials of one curve at one global batch and one repeat; a *trial* is one training run. The paper calls
our search a "study" and our curve a "workload".

Source: Shallue et al. 2019, sections 4.1 and 4.2, as restated in the project's notes (steps to
result, feasible trials). The exact early stop and the attempt rule are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from shoal.errors import UsageError


class Outcome(StrEnum):
    """How a trial ended; a value, never an exception."""

    REACHED = "reached"
    """It was strictly better than the hardest goal at some evaluation."""
    NOT_REACHED = "not_reached"
    """It was trained to the end its search gave it and never was."""
    DIVERGED = "diverged"
    """Its loss became non-finite or more than ten times that of step 0; it is not feasible."""
    PREEMPTED = "preempted"
    """It was stopped in order before its end and can be continued."""
    CRASHED = "crashed"
    """An error ended it."""


Bound = Literal["=", ">="]

CONFIRM = -1
"""In place of a repeat: the winning setting run again with fresh seeds."""


class Measured(NamedTuple):
    """A metric's value; ``bound`` is ">=" where an evaluation ended early and the true value is no less."""

    value: float
    bound: Bound = "="


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Be strictly better than ``value`` in ``metric``. A tie does not count.

    Args:
        metric: ``split/name`` as in the ledger, e.g. ``"val/classification_error"``.
        value: the goal, finite.
        larger_is_better: whether better means above (average precision) instead of below.

    Raises:
        UsageError: ``value`` is not finite or ``metric`` has no split.
    """

    metric: str
    value: float
    larger_is_better: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise UsageError(f"goal = {self.value}; a goal is a finite number; give one")
        if self.metric.split("/")[0] not in ("train", "val", "test"):
            raise UsageError(
                f"goal.metric = {self.metric!r}; a metric is named split/name with split one of "
                "train, val, test; for example val/classification_error"
            )

    def is_met_by(self, measured: Measured) -> bool:
        """Whether ``measured`` is strictly better. A bound cannot meet a goal, nor can NaN."""
        if measured.bound != "=" or math.isnan(measured.value):
            return False
        if self.larger_is_better:
            return measured.value > self.value
        return measured.value < self.value

    def is_harder_than(self, other: Goal) -> bool:
        """Whether whoever meets this one meets ``other``, of the same metric."""
        if self.larger_is_better:
            return self.value > other.value
        return self.value < other.value


@dataclass(frozen=True, kw_only=True, order=True)
class SearchKey:
    """Names a search within its study.

    Args:
        curve: name of the optimizer's entry in the study's spec; letters, digits, ``_`` and ``-``.
        global_batch: samples per step, >= 1.
        repeat: number of the repeated search, >= 0; ``CONFIRM`` for the winner's fresh seeds.
    """

    curve: str
    global_batch: int
    repeat: int

    def __str__(self) -> str:
        end = "confirm" if self.repeat == CONFIRM else f"r{self.repeat}"
        return f"{self.curve}-b{self.global_batch}-{end}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run of a search.

    Args:
        search: the search it belongs to.
        id: its place in the search's draws, from 0. Ties in steps to result go to the lowest.
        unit: its point in the unit cube, one coordinate per parameter of the space, in its order.
        parameters: what the point means: ``lr``, ``momentum``, schedule parameters, ...
        seed: seeds initial weights and data order; 0 <= seed < 2**63.
        address: hash of everything that decides its curve, equal in every process and version.
    """

    search: SearchKey
    id: int
    unit: tuple[float, ...]
    parameters: Mapping[str, float]
    seed: int
    address: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured at one grid point of one trial.

    Args:
        step: optimizer steps done, on the study's grid.
        metrics: by ``split/name``.
        diverged: whether the divergence rule fired at this point.
    """

    step: int
    metrics: Mapping[str, Measured]
    diverged: bool = False


@dataclass(kw_only=True)
class Curve:
    """A trial's evaluations in rising step order, of one attempt."""

    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last evaluated step; -1 before the first."""
        return self.evaluations[-1].step if self.evaluations else -1

    @property
    def diverged_at(self) -> int | None:
        """D_i: the first grid step at which the divergence rule fired."""
        return next((e.step for e in self.evaluations if e.diverged), None)

    def crossing(self, goal: Goal) -> int | None:
        """C_i(g): the first evaluated step strictly better than ``goal``; step 0 included."""
        for evaluation in self.evaluations:
            measured = evaluation.metrics.get(goal.metric)
            if measured is not None and goal.is_met_by(measured):
                return evaluation.step
        return None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long and how widely every search of a study looks; equal for all, or they cannot be compared.

    Args:
        feasible: N, trials that must not have diverged, >= 1.
        draws: most trials drawn to find them, >= ``feasible``; a search that needs more is *short*.
        steps: T, most steps of a trial, on the grid or rounded down to it.
        kappa: trials are trained on to ``kappa`` times the steps to the hardest goal, >= 1. 1 is enough
            for the steps to result alone, 3 for the edge check and intervals.
        full: train every trial to ``steps``, whatever was reached.

    Raises:
        UsageError: a number outside its range.
    """

    feasible: int
    draws: int
    steps: int
    kappa: float = 3.0
    full: bool = False

    def __post_init__(self) -> None:
        if self.feasible < 1:
            raise UsageError(f"trials = {self.feasible}; a search needs at least 1 feasible trial")
        if self.draws < self.feasible:
            raise UsageError(
                f"draw_limit = {self.draws}; it must allow the {self.feasible} feasible trials; raise it"
            )
        if self.steps < 1:
            raise UsageError(f"max_steps = {self.steps}; a trial takes at least 1 step")
        if not (math.isfinite(self.kappa) and self.kappa >= 1):
            raise UsageError(
                f"kappa = {self.kappa}; it multiplies steps to the goal and is at least 1"
            )


def hardest(goals: Sequence[Goal]) -> Goal:
    """The goal whose reaching implies all others.

    Raises:
        UsageError: there is none, or they differ in metric or direction.
    """
    if not goals:
        raise UsageError("goals = none; a study needs at least one goal; give val/... and a value")
    if len({(g.metric, g.larger_is_better) for g in goals}) > 1:
        raise UsageError(
            "goals = of several metrics; one search stops at one metric; use one study per metric"
        )
    best = goals[0]
    for goal in goals[1:]:
        if goal.is_harder_than(best):
            best = goal
    return best
