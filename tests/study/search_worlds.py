"""Made-up searches: what every trial would measure if it were trained to the budget, as plain lists."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from shoal.study.records import Budget, Evaluation, Goal, Measured
from shoal.study.search import Search

Points = list[tuple[int, float, bool]]


@dataclass(frozen=True, kw_only=True)
class World:
    """All trials that could be drawn, each to the budget's end or its divergence.

    Args:
        grid: evaluation steps.
        values: per trial (step, metric, diverged).
        bounded: (trial, step) where the evaluation ended early: only a bound is known.
        budget: of the search.
        goals: easiest first.
    """

    grid: tuple[int, ...]
    values: list[Points]
    bounded: frozenset[tuple[int, int]]
    budget: Budget
    goals: tuple[Goal, ...]

    def evaluation(self, trial: int, step: int) -> Evaluation:
        at = next(point for point in self.values[trial] if point[0] == step)
        bound = ">=" if (trial, step) in self.bounded else "="
        return Evaluation(step=step, metrics={"val/error": Measured(at[1], bound)}, diverged=at[2])

    def search(self, budget: Budget | None = None, **more: object) -> Search:
        return Search(self.goals, budget or self.budget, self.grid, **more)  # type: ignore[arg-type]

    def plain(self) -> list[Points]:
        """For the brute force: a bound meets no goal."""
        return [
            [(s, math.inf if (t, s) in self.bounded else v, d) for s, v, d in points]
            for t, points in enumerate(self.values)
        ]


def carry_out(
    world: World, search: Search, choose: Callable[[dict[int, int]], Sequence[int]]
) -> int:
    """Tell the search all it wants; ``choose`` picks which of the wanted trials move next.

    Returns:
        Optimizer steps that were trained.
    """
    spent, rounds = 0, 0
    while not search.finished:
        wanted = search.wanted()
        assert wanted and set(wanted) == set(search.targets())
        for trial in choose(wanted):
            done = max((e.step for e in _known(search, trial)), default=0)
            spent += wanted[trial] - done
            search.add(trial, world.evaluation(trial, wanted[trial]))
        rounds += 1
        assert rounds < 100_000
    return spent


def _known(search: Search, trial: int) -> list[Evaluation]:
    curve = search.curves.get(trial)
    return curve.evaluations if curve else []


def everybody(wanted: dict[int, int]) -> list[int]:
    return list(wanted)


def at_random(rng: random.Random) -> Callable[[dict[int, int]], Sequence[int]]:
    """Some of the wanted trials, in any order."""

    def choose(wanted: dict[int, int]) -> Sequence[int]:
        trials = list(wanted)
        rng.shuffle(trials)
        return trials[: rng.randint(1, len(trials))]

    return choose


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Noisy curves on few levels, so that ties, exact goals and re-crossings are common."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    ratio = draw(st.sampled_from([1.2, 1.5, 2.0]))
    steps = draw(st.sampled_from([12, 60, 300]))
    grid = [0]
    while grid[-1] < steps:
        grid.append(max(grid[-1] + 1, int(grid[-1] * ratio)))
    feasible = draw(st.integers(1, 5))
    draws = feasible + draw(st.integers(0, 6))
    diverging = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    hopeless = draw(st.sampled_from([0.0, 0.5, 1.0]))
    values, bounded = [], set()
    for trial in range(draws):
        floor = 6 if rng.random() < hopeless else 0
        pace = rng.choice([1, 4, 16, 64])
        end = rng.choice(grid) if rng.random() < diverging else None
        points: Points = []
        for step in grid:
            level = max(floor, 10 - int(10 * step / (step + pace)) + rng.randint(-2, 2))
            value = math.nan if rng.random() < 0.05 else level / 10
            if rng.random() < 0.1 and level > 4:
                bounded.add((trial, step))
            points.append((step, value, step == end))
            if step == end:
                break
        values.append(points)
    wanted = draw(st.sets(st.sampled_from([0.6, 0.4, 0.2, 0.1]), min_size=1, max_size=3))
    return World(
        grid=tuple(grid),
        values=values,
        bounded=frozenset(bounded),
        budget=Budget(
            feasible=feasible,
            draws=draws,
            steps=draw(st.sampled_from([steps, steps // 2 + 1])),
            kappa=draw(st.sampled_from([1.0, 1.7, 3.0])),
        ),
        goals=tuple(Goal(metric="val/error", value=v) for v in sorted(wanted, reverse=True)),
    )
