"""Confirmations: fresh seeds of one setting, each until it has met the hardest goal."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.study.confirm import Confirmation, median_with_misses
from shoal.study.records import Evaluation, Goal, Measured, Outcome

ERROR = "val/classification_error"
EASY, HARD = Goal(metric=ERROR, value=0.3), Goal(metric=ERROR, value=0.1)


def evaluation(step: int, value: float, *, diverged: bool = False) -> Evaluation:
    return Evaluation(step=step, metrics={ERROR: Measured(value)}, diverged=diverged)


def test_each_seed_runs_until_it_meets_the_hardest_goal() -> None:
    confirmation = Confirmation(goals=[EASY, HARD], seeds=4, grid=[0, 1, 2, 4, 8])
    curves = [
        {0: 0.9, 1: 0.2, 2: 0.05},
        {0: 0.9, 1: 0.4, 2: 0.29, 4: 0.1, 8: 0.09},
        {0: 0.9, 1: 0.9},
        {0: 0.9, 1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5},
    ]
    asked: list[set[int]] = [set() for _ in curves]
    while not confirmation.finished:
        for trial, step in confirmation.wanted().items():
            asked[trial].add(step)
            diverged = trial == 2 and step == 1
            confirmation.add(trial, evaluation(step, curves[trial][step], diverged=diverged))
    assert asked == [set(curve) for curve in curves]
    assert [confirmation.outcome(i) for i in range(4)] == [
        Outcome.REACHED,
        Outcome.REACHED,
        Outcome.DIVERGED,
        Outcome.NOT_REACHED,
    ]
    easy, hard = confirmation.summary()["goals"]
    # A tie with the goal does not count: 0.1 at step 4 is not below 0.1.
    assert hard["steps_of_seeds"] == [2, 8, None, None] and hard["steps_confirmed"] is None
    assert easy["steps_of_seeds"] == [1, 2, None, None] and easy["steps_confirmed"] is None


@pytest.mark.parametrize(
    ("steps", "median"),
    [([5], 5.0), ([1, 9], 5.0), ([None], None), ([1, None], None), ([3, 1, 2], 2.0)],
)
def test_median_counts_misses_as_long(steps: list[int | None], median: float | None) -> None:
    assert median_with_misses(steps) == median


def test_refusals() -> None:
    with pytest.raises(UsageError, match="at least 1 seed"):
        Confirmation(goals=[EASY], seeds=0, grid=[0])
    with pytest.raises(UsageError, match="step 0"):
        Confirmation(goals=[EASY], seeds=1, grid=[])
