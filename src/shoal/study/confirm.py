"""The winning setting run again with fresh seeds, since the best of many trials was also lucky.

A search's steps to result are a minimum over trials, so its winner's luck is part of them (winner's
curse). Here its setting alone is trained with fresh seeds; the median of their steps to the goal, S_conf,
is what a later run may expect. It stands beside S everywhere, and every prediction of time uses it.

Source: section 9.6 of the project's notes on Shallue et al. 2019 (the repeated runs took 1.27 to 1.49
times S in the median); the paper itself keeps S.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import UsageError
from shoal.study.records import Curve, Evaluation, Goal, Outcome, hardest

FEWEST_SEEDS = 10
REACH = 10.0
"""A seed is given up at this multiple of S: far beyond what a confirmation is asked about."""


class Confirmation:
    """Trains one setting with several seeds, each until it has met the hardest goal.

    Args:
        goals: as in the study, those that the search reached.
        seeds: how many fresh seeds, >= 1; trials 0 to seeds - 1.
        grid: the evaluation steps in rising order, from 0 to the most a seed may take.

        setting: address of the trial whose setting it is; comes back in :meth:`summary`.

    Raises:
        UsageError: no seeds or no grid.
    """

    def __init__(
        self, *, goals: Sequence[Goal], seeds: int, grid: Sequence[int], setting: str = ""
    ) -> None:
        if seeds < 1:
            raise UsageError(f"confirm_seeds = {seeds}; a confirmation takes at least 1 seed")
        if not grid:
            raise UsageError("grid = empty; a confirmation evaluates at least at step 0")
        self._goals = list(goals)
        self._setting = setting
        self._hardest = hardest(goals)
        self._grid = list(grid)
        self._curves = [Curve() for _ in range(seeds)]

    @property
    def finished(self) -> bool:
        """Whether every seed has met the hardest goal, diverged, or come to the end."""
        return not self.wanted()

    def wanted(self) -> Mapping[int, int]:
        """The next grid point of every seed that is not through."""
        return {
            number: self._grid[bisect_right(self._grid, curve.step)]
            for number, curve in enumerate(self._curves)
            if self._is_open(curve)
        }

    def add(self, trial: int, evaluation: Evaluation) -> None:
        """Hear of one seed's next evaluation."""
        self._curves[trial].evaluations.append(evaluation)

    def outcome(self, trial: int) -> Outcome:
        """How a seed ended. One that met the goal did not diverge before."""
        curve = self._curves[trial]
        if curve.crossing(self._hardest) is not None:
            return Outcome.REACHED
        return Outcome.DIVERGED if curve.diverged_at is not None else Outcome.NOT_REACHED

    def summary(self) -> dict[str, Any]:
        """Per goal each seed's steps (null: not reached) and S_conf, their median (null: not that many)."""
        goals = []
        for goal in self._goals:
            steps = [curve.crossing(goal) for curve in self._curves]
            goals.append(
                {
                    "metric": goal.metric,
                    "value": goal.value,
                    "steps_of_seeds": steps,
                    "steps_confirmed": median_with_misses(steps),
                }
            )
        return {
            "state": "done",
            "seeds": len(self._curves),
            "setting": self._setting,
            "end": self._grid[-1],
            "goals": goals,
        }

    def _is_open(self, curve: Curve) -> bool:
        if not curve.evaluations:
            return True
        last = curve.evaluations[-1]
        through = last.diverged or last.step >= self._grid[-1]
        return not (through or self._meets(last))

    def _meets(self, evaluation: Evaluation) -> bool:
        measured = evaluation.metrics.get(self._hardest.metric)
        return measured is not None and self._hardest.is_met_by(measured)


def median_with_misses(steps: Sequence[int | None]) -> float | None:
    """The median steps where a miss counts as longer than everything; None if it is a miss itself.

    Args:
        steps: of each seed; None where the goal was not reached. At least one.

    Example:
        >>> median_with_misses([30, 10, None])
        30.0
        >>> median_with_misses([30, 10, None, None]) is None
        True
    """
    ordered = sorted(math.inf if step is None else float(step) for step in steps)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return median if math.isfinite(median) else None
