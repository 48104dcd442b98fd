"""S_conf: how long the winning setting takes with fresh seeds, beside the S it won with.

A search's S is the luckiest of many trials. The setting run again with fresh seeds took 1.3 to 1.5 times
as long in the median, so every prediction of time uses S_conf, and the paper's curve keeps S.

Source: section 9.6 of the project's notes on Shallue et al. 2019. The interval of the median is the usual
one from order statistics, free of any distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.study.confirm import FEWEST_SEEDS, median_with_misses
from shoal.study.intervals import Interval
from shoal.study.records import CONFIRM, Goal
from shoal.study.search_summary import SearchSummary
from shoal.study.tables import SearchData

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """One setting with fresh seeds.

    Args:
        curve: whose.
        global_batch: at which batch.
        steps_of_seeds: first crossing of each seed; None where it never was better than the goal.
        steps: S_conf, their median where a miss is longer than everything; None if it is a miss.
        interval: of the median, covering at least 95 %; None with fewer than 6 seeds.
        search_steps: S of the search whose winner it is; None if that is not among the summaries.
    """

    curve: str
    global_batch: int
    steps_of_seeds: tuple[int | None, ...]
    steps: float | None
    interval: Interval | None
    search_steps: int | None

    @property
    def ratio(self) -> float | None:
        """S_conf over S: what the winner's luck was worth."""
        if self.steps is None or not self.search_steps:
            return None
        return self.steps / self.search_steps

    @property
    def has_enough_seeds(self) -> bool:
        """Whether there were at least ten."""
        return len(self.steps_of_seeds) >= FEWEST_SEEDS


def confirmed(
    confirmations: Iterable[SearchData], goal: Goal, summaries: Iterable[SearchSummary]
) -> list[Confirmed]:
    """S_conf of every confirmed curve and batch.

    Args:
        confirmations: searches with ``CONFIRM`` in place of a repeat; others are passed over. A seed that
            diverged counts as a miss; one under way is left out.
        goal: the goal.
        summaries: of the searches, to find the S that the setting won with: the search with the least S
            whose winner has the confirmed parameters.
    """
    rows = list(summaries)
    found: list[Confirmed] = []
    for data in sorted(confirmations, key=lambda d: d.key):
        if data.key.repeat != CONFIRM or not data.trials:
            continue
        steps = tuple(
            _steps(data, place, goal)
            for place in range(len(data.trials))
            if data.outcomes[place] is not None or data.curves[place].crossing(goal) is not None
        )
        if not steps:
            continue
        parameters = dict(data.trials[0].parameters)
        won = [
            s.steps
            for s in rows
            if (s.key.curve, s.key.global_batch) == (data.key.curve, data.key.global_batch)
            and s.winner is not None
            and s.steps is not None
            and dict(s.winner.trial.parameters) == parameters
        ]
        found.append(
            Confirmed(
                curve=data.key.curve,
                global_batch=data.key.global_batch,
                steps_of_seeds=steps,
                steps=median_with_misses(steps),
                interval=median_interval(steps),
                search_steps=min(won, default=None),
            )
        )
    return found


def _steps(data: SearchData, place: int, goal: Goal) -> int | None:
    crossing, diverged = data.curves[place].crossing(goal), data.curves[place].diverged_at
    if crossing is None or (diverged is not None and diverged <= crossing):
        return None
    return crossing


def median_interval(steps: Sequence[int | None], level: float = LEVEL) -> Interval | None:
    """The narrowest symmetric pair of order statistics that covers the median.

    Args:
        steps: of each seed; None counts as infinite.
        level: least coverage, by the binomial distribution.

    Returns:
        None where even the extremes cover less: below 6 values for 95 %.
    """
    ordered = sorted(math.inf if s is None else float(s) for s in steps)
    count = len(ordered)
    best = None
    for rank in range(1, count // 2 + 1):
        tail = sum(math.comb(count, k) for k in range(rank)) / 2**count
        if 1 - 2 * tail >= level:
            best = rank
    if best is None:
        return None
    return Interval(ordered[best - 1], ordered[count - best])
