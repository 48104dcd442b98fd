"""A second way from the raw rows to every analysed number; nothing of shoal is imported here.

Written from the definitions, step by step and without any of the shortcuts of the analysis, so that an
error in either shows as a difference. Values that are not finite are stored as null and met by no goal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

Place = tuple[str, int, int]


@dataclass(kw_only=True)
class RawTrial:
    """One trial: its coordinates, parameters and points (step, metrics, bounds, diverged) by step."""

    unit: Sequence[float]
    parameters: Mapping[str, float]
    attempt: str
    age: tuple[int, float]
    points: dict[int, tuple[int, Mapping[str, float | None], Mapping[str, str], bool]] = field(
        default_factory=dict
    )

    def crossing(self, metric: str, goal: float, last: float) -> int | None:
        """First step strictly below the goal."""
        for step in sorted(self.points):
            _, metrics, bounds, _ = self.points[step]
            value = metrics.get(metric)
            if step <= last and value is not None and metric not in bounds and value < goal:
                return step
        return None

    def divergence(self, last: float) -> int | None:
        """First step that is marked as diverged."""
        return next((s for s in sorted(self.points) if s <= last and self.points[s][3]), None)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """S of one search for one goal.

    Args:
        steps: S, or None.
        previous: the grid point before it.
        winner: the trial's id.
        end: the search's last step that counts.
        is_short: too few feasible trials were found.
        best: the feasible trials that crossed by the end, first first: (crossing, id).
        drawn: (unit, had diverged by the end) of every trial on file.
    """

    steps: int | None
    previous: int | None
    winner: int | None
    end: int
    is_short: bool
    best: Sequence[tuple[int, int]]
    drawn: Sequence[tuple[Sequence[float], bool]]


def read_rows(directory: Path) -> dict[Place, dict[int, RawTrial]]:
    """Every search's trials, each with the attempt of its newest row."""
    rows: list[dict[str, Any]] = []
    for path in sorted((directory / "rows").glob("*.jsonl")):
        whole = path.read_bytes()
        for line in whole[: whole.rfind(b"\n") + 1].splitlines():
            rows.append(json.loads(line))
    places: dict[str, Place] = {}
    found: dict[Place, dict[int, RawTrial]] = {}
    for row in rows:
        if row["kind"] == "trial":
            place = (row["curve"], row["global_batch"], row["repeat"])
            places[row["search"]] = place
            trials = found.setdefault(place, {})
            age = (row["segment"], row["time"])
            if row["trial"] not in trials or trials[row["trial"]].age < age:
                trials[row["trial"]] = RawTrial(
                    unit=row["unit"],
                    parameters=row["parameters"],
                    attempt=row["attempt"],
                    age=age,
                )
    for row in rows:
        if row["kind"] == "eval":
            trial = found[places[row["search"]]][row["trial"]]
            old = trial.points.get(row["step"])
            if row["attempt"] == trial.attempt and (old is None or old[0] <= row["segment"]):
                trial.points[row["step"]] = (
                    row["segment"],
                    row["metrics"],
                    row.get("bounds", {}),
                    row["diverged"],
                )
    return found


def grid_of(spec: Mapping[str, Any]) -> list[int]:
    """The evaluation steps of a study up to its budget."""
    ratio, stride = Fraction(repr(spec["grid"]["ratio"])), spec["grid"]["stride"]
    points, point = [0], 0
    while True:
        for _ in range(stride):
            point = max(point + 1, math.floor(ratio * point))
        if point > spec["budget"]["max_steps"]:
            return points
        points.append(point)


def derive(
    trials: Mapping[int, RawTrial],
    spec: Mapping[str, Any],
    metric: str,
    goal: float,
    hardest: float,
) -> Derived:
    """S of one search by the words of its definition."""
    budget, grid = spec["budget"], grid_of(spec)
    needed = budget["trials"]
    steps, _, short = _first(_events(trials, metric, hardest, grid[-1]), needed)
    end = grid[-1]
    if steps is not None and not budget["full"]:
        end = max(point for point in grid if point <= max(steps, budget["kappa"] * steps))
    events = _events(trials, metric, goal, end)
    steps, winner, short = _first(events, needed)
    at = end if steps is None else steps
    members = _prefix(events, needed, at) or []
    crossed = [
        (crossing, i)
        for i in members
        for crossing, diverged in [events[i]]
        if crossing < diverged and crossing <= end and not _infeasible(events[i], at)
    ]
    earlier = [point for point in grid if steps is not None and point < steps]
    return Derived(
        steps=steps,
        previous=earlier[-1] if earlier else None,
        winner=winner,
        end=end,
        is_short=short,
        best=sorted((int(crossing), i) for crossing, i in crossed),
        drawn=[(t.unit, t.divergence(end) is not None) for _, t in sorted(trials.items())],
    )


Event = tuple[float, float]


def _events(
    trials: Mapping[int, RawTrial], metric: str, goal: float, last: float
) -> dict[int, Event]:
    """(crossing, divergence) of each trial up to a step, infinite where there is none."""
    found: dict[int, Event] = {}
    for i in sorted(trials):
        crossing, diverged = trials[i].crossing(metric, goal, last), trials[i].divergence(last)
        found[i] = (
            math.inf if crossing is None else crossing,
            math.inf if diverged is None else diverged,
        )
    return found


def _infeasible(event: Event, step: float) -> bool:
    crossing, diverged = event
    return diverged <= step and diverged <= crossing


def _prefix(events: Mapping[int, Event], needed: int, step: float) -> list[int] | None:
    held: list[int] = []
    count = 0
    for i, event in events.items():
        held.append(i)
        count += not _infeasible(event, step)
        if count == needed:
            return held
    return None


def _first(events: Mapping[int, Event], needed: int) -> tuple[int | None, int | None, bool]:
    """(S, winner, whether the draws ran out)."""
    # Nothing changes between steps at which some trial crosses or diverges.
    for step in sorted({0.0} | {x for event in events.values() for x in event if x < math.inf}):
        inside = _prefix(events, needed, step)
        if inside is None:
            return None, None, True
        for i in inside:
            crossing, diverged = events[i]
            if crossing <= step and crossing < diverged:
                return int(step), i, False
    return None, None, False


def effective(parameters: Mapping[str, float]) -> float:
    """lr / (1 - momentum)."""
    return parameters["lr"] / (1 - parameters.get("momentum", 0.0))


def best_rate(
    searches: Sequence[Derived], trials: Sequence[Mapping[int, RawTrial]], count: int = 5
) -> float | None:
    """Geometric mean of the effective learning rate over the first crossers of all repeats."""
    ranked = sorted(
        (crossing, repeat, i)
        for repeat, search in enumerate(searches)
        for crossing, i in search.best[:count]
    )[:count]
    if not ranked:
        return None
    logs = [math.log(effective(trials[repeat][i].parameters)) for _, repeat, i in ranked]
    return math.exp(sum(logs) / len(logs))


def best_error(
    trials: Mapping[int, RawTrial], metric: str, needed: int, most_steps: float
) -> float | None:
    """Least metric of the first ``needed`` trials that never diverged, from step 1 to ``most_steps``."""
    complete = [t for _, t in sorted(trials.items()) if t.divergence(math.inf) is None][:needed]
    values = [
        value
        for trial in complete
        for step, (_, metrics, bounds, _) in trial.points.items()
        if 0 < step <= most_steps
        and (value := metrics.get(metric)) is not None
        and metric not in bounds
    ]
    return min(values, default=None)


def log_likelihood(
    points: Iterable[tuple[int, float, float]],
    s_min: float,
    b_crit: float,
    sigma: float,
    train_samples: int | None,
) -> float:
    """Of searches (B, step before, S), with S infinite and the step before the end where censored."""
    inverse = 0.0 if train_samples is None else 1 / train_samples
    total = 0.0
    for batch, above, upto in points:
        mean = math.log(s_min) + math.log1p(b_crit * (1 / batch - inverse))
        high = math.inf if math.isinf(upto) else (math.log(upto) - mean) / sigma
        low = -math.inf if above <= 0 else (math.log(above) - mean) / sigma
        # In the tail where the difference keeps its digits.
        if low > 0:
            low, high = -high, -low
        total += math.log(max(_normal(high) - _normal(low), 1e-300))
    return total


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def climb(
    points: Sequence[tuple[int, float, float]],
    train_samples: int | None,
    least_sigma: float,
) -> tuple[float, float, float, float]:
    """(log-likelihood, S_min, B_crit, sigma) by pattern search from a grid of starts."""
    reached = [p for p in points if not math.isinf(p[2])]
    level = min(p[2] for p in reached)

    def value(at: Sequence[float]) -> float:
        sigma = max(math.exp(at[2]), least_sigma)
        return log_likelihood(points, math.exp(at[0]), math.exp(at[1]), sigma, train_samples)

    starts = [
        [math.log(level), math.log(batch), math.log(0.2)] for batch in {p[0] for p in reached}
    ]
    best = max(starts, key=value)
    height, stride = value(best), 0.5
    while stride > 1e-7:
        moved = False
        for axis in range(3):
            for sign in (1, -1):
                trial = [x + (sign * stride if i == axis else 0) for i, x in enumerate(best)]
                if value(trial) > height:
                    best, height, moved = trial, value(trial), True
        # Along the ridge on which S_min falls as B_crit rises.
        for sign in (1, -1):
            trial = [best[0] + sign * stride, best[1] - sign * stride, best[2]]
            if value(trial) > height:
                best, height, moved = trial, value(trial), True
        stride = stride if moved else stride / 2
    return height, math.exp(best[0]), math.exp(best[1]), max(math.exp(best[2]), least_sigma)
