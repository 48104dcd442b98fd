"""Trials of made-up workloads, with planted truth, as the released measurements have them.

Per workload S(B) = S_min + E_min / B is planted; trial i with effective learning rate x (log) takes
T_i = S(B) (1 + ((x - x*(B)) / w)^2) steps to the goal, where x*(B) follows the linear rule up to a cap;
its error falls as e_inf + (e_0 - e_inf) 2^(-t/h) times log-normal noise. The curve is then bent so that the
first strict crossing lies exactly at the planned evaluation: before it no value is better than the goal,
and many equal it. So every answer is known without reading a file.

Source: section 4.5 of the notes on Shallue et al. 2019.
Deviates: which trials are INFEASIBLE is set by count, taking the highest learning rates. Some of them, and
some INCOMPLETE ones, cross earlier than every COMPLETE one, so that a reader who takes them is found out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

COMPLETE, INFEASIBLE, INCOMPLETE = "COMPLETE", "INFEASIBLE", "INCOMPLETE"

_SPLITS = ("train", "val", "test")
_WIDTH = 1.5  # w, in units of log effective learning rate
_NOISE = 0.02
_LEARNING_RATES = (1e-4, 10.0)
_MOMENTA = (0.9, 0.9999)
_SMOOTHINGS = (0.0, 0.01, 0.1)


@dataclass(frozen=True, kw_only=True)
class PlantedWorkload:
    """One workload (the paper's word) and what is planted in it.

    Args:
        path: ``[group/]dataset/model/optimizer``.
        counts: by batch size the numbers of complete, incomplete and infeasible trials.
        steps_min: S_min.
        samples_min: E_min; B_crit = E_min / S_min.
        metric: of the goal: ``classification_error``, ``cross_entropy_error`` or ``average_precision``.
        goal: to be strictly better than.
        samples: in the validation set; errors are multiples of its inverse.
        rows: evaluations of a complete trial.
        time_budget: whether ``train_steps`` is 0.
        never_reaches: a batch size whose trials all stay at the goal or above.
        at_edge: a batch size whose best learning rate is the largest of its range.
        tie: a batch size at which two trials reach the goal at the same, earliest step.
    """

    path: str
    counts: dict[int, tuple[int, int, int]]
    steps_min: float
    samples_min: float
    metric: str = "classification_error"
    goal: float = 0.1
    samples: int = 10_000
    rows: int = 60
    time_budget: bool = False
    never_reaches: int | None = None
    at_edge: int | None = None
    tie: int | None = None

    @property
    def optimizer(self) -> str:
        """``sgd``, ``momentum`` or ``nesterov_momentum``."""
        return self.path.rsplit("/", 1)[1]

    @property
    def larger_is_better(self) -> bool:
        """Whether better means above the goal."""
        return self.metric == "average_precision"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of its ``measurements.csv`` after ``step``."""
        kinds = ["cross_entropy_error"]
        if self.metric != "cross_entropy_error":
            kinds.append(self.metric)
        return tuple(f"{split}/{kind}" for kind in kinds for split in _SPLITS)

    def steps(self, global_batch: int) -> float:
        """S(B) as planted, before grid and luck."""
        return self.steps_min + self.samples_min / global_batch


@dataclass(frozen=True, kw_only=True)
class PlantedSearch:
    """All trials of one workload at one batch size.

    Args:
        workload: its workload.
        global_batch: samples per step.
        train_steps: as in ``study.json``.
        ids: of the trials, rising from 1.
        status: of the trials.
        parameters: of the trials, by released name.
        rows: evaluations of each trial.
        crossing: planted first step strictly better than the goal; -1: none.
        step: of all evaluations, trial after trial.
        values: of all evaluations, by column.
    """

    workload: PlantedWorkload
    global_batch: int
    train_steps: int
    ids: np.ndarray
    status: np.ndarray
    parameters: dict[str, np.ndarray]
    rows: np.ndarray
    crossing: np.ndarray
    step: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def path(self) -> str:
        """Its directory in the archive."""
        return f"{self.workload.path}/{self.global_batch}"

    def result(self, first_n_complete: int | None = None) -> tuple[int, int] | None:
        """(steps, trial) by the released rule, as planted; None where no trial reaches the goal."""
        complete = np.flatnonzero(self.status == COMPLETE)[:first_n_complete]
        crossed = [(int(self.crossing[i]), int(self.ids[i])) for i in complete]
        return min((pair for pair in crossed if pair[0] >= 0), default=None)


def planted(
    workload: PlantedWorkload,
    batch: int,
    status: np.ndarray,
    rows: np.ndarray,
    rng: np.random.Generator,
) -> PlantedSearch:
    """The trials of one workload at one batch size.

    Args:
        workload: the workload.
        batch: samples per step.
        status: of each trial.
        rows: evaluations of each trial.
        rng: of everything random.
    """
    count = status.size
    parameters = _parameters(workload, batch, status, rng)
    effective = np.log(parameters["learning_rate"] / (1 - parameters.get("momentum", 0.0)))
    critical = workload.samples_min / workload.steps_min
    # The linear rule up to a cap, as far as the search space goes.
    best = math.log(0.1 * min(batch, critical) / critical)
    best = max(best, float(np.quantile(effective[status == COMPLETE], 0.2)))
    if batch == workload.at_edge:
        best = float(effective[status == COMPLETE].max())
    steps_to = workload.steps(batch) * (1 + ((effective - best) / _WIDTH) ** 2)
    # Those that do not count are now and then the fastest of all.
    early = (status != COMPLETE) & (rng.random(count) < 0.2)
    steps_to[early] = workload.steps(batch) * rng.uniform(0.1, 0.4, early.sum())
    widest = int(rows.max())
    nominal = max(1.0, 3 * workload.steps(batch) / max(workload.rows, widest))
    gaps = np.maximum(1, (nominal * rng.uniform(1, 1.5, (count, widest))).astype(np.int64))
    grid = np.cumsum(gaps, axis=1) - gaps[:, :1]
    there = np.arange(widest) < rows[:, None]
    reached = (grid >= steps_to[:, None]) & there & (grid > 0)
    if batch == workload.never_reaches:
        reached[:] = False
    at = np.where(reached.any(axis=1), reached.argmax(axis=1), widest)
    if batch == workload.tie:
        _tie(status, grid, at, there)
    error = _curves(workload, grid, steps_to, at, rng)
    crossing = np.where(at < widest, grid[np.arange(count), np.minimum(at, widest - 1)], -1)
    complete = status == COMPLETE
    last = grid[np.arange(count), rows - 1]
    return PlantedSearch(
        workload=workload,
        global_batch=batch,
        train_steps=0 if workload.time_budget or not complete.any() else int(last[complete].min()),
        ids=np.arange(1, count + 1),
        status=status,
        parameters=parameters,
        rows=rows,
        crossing=crossing,
        step=grid[there],
        values=_columns(workload, error, status, rows, there, rng),
    )


def _parameters(
    workload: PlantedWorkload, batch: int, status: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    count = status.size
    low, high = _LEARNING_RATES
    rates = np.sort(low * (high / low) ** rng.random(count))
    # The highest learning rates are the infeasible ones.
    order = np.empty(count, dtype=int)
    bad = np.flatnonzero(status == INFEASIBLE)
    good = np.flatnonzero(status != INFEASIBLE)
    order[: good.size] = rng.permutation(good)
    order[good.size :] = rng.permutation(bad)
    learning_rate = np.empty(count)
    learning_rate[order] = rates
    parameters: dict[str, np.ndarray] = {"learning_rate": learning_rate}
    if workload.optimizer != "sgd":
        low, high = _MOMENTA
        parameters["momentum"] = 1 - (1 - low) * ((1 - high) / (1 - low)) ** rng.random(count)
    if "resnet" in workload.path or "vgg" in workload.path:
        steps = int(3 * workload.steps(batch))
        parameters["learning_rate_decay_steps"] = rng.integers(steps // 2, steps + 1, count)
        parameters["end_learning_rate_factor"] = 10 ** rng.uniform(-4, -1, count)
    if "imagenet/resnet_50" in workload.path:
        parameters["label_smoothing"] = rng.choice(_SMOOTHINGS, count)
    return parameters


def _tie(status: np.ndarray, grid: np.ndarray, at: np.ndarray, there: np.ndarray) -> None:
    """Let a later trial reach the goal at the very step at which the best one does."""
    complete = np.flatnonzero((status == COMPLETE) & (at < grid.shape[1]))
    first = complete[np.argmin(grid[complete, at[complete]])]
    candidates = np.flatnonzero(status == COMPLETE)
    later = int(candidates[-1]) if candidates[-1] != first else int(candidates[0])
    assert there[later, at[first]]
    grid[later] = grid[first]
    at[later] = at[first]


def _curves(
    workload: PlantedWorkload,
    grid: np.ndarray,
    steps_to: np.ndarray,
    at: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """The goal's metric on validation data, smaller is better, bent around the planned crossing."""
    goal = 1 - workload.goal if workload.larger_is_better else workload.goal
    start, end = _ends(workload, goal)
    half_life = steps_to / math.log2((start - end) / (goal - end))
    error = end + (start - end) * np.exp2(-grid / half_life[:, None])
    error *= np.exp(_NOISE * rng.standard_normal(grid.shape))
    quantum = 1 / workload.samples
    error = np.clip(np.round(error / quantum), 0, None) / workload.samples
    if workload.larger_is_better:
        error = np.minimum(error, 1.0)
        goal = round(1 - workload.goal, 10)
    place = np.arange(grid.shape[1])
    before, crossing = place < at[:, None], place == at[:, None]
    error = np.where(before, np.maximum(error, goal), error)
    beyond = (math.ceil(goal / quantum - 1e-9) - 1) / workload.samples
    return np.where(crossing, np.minimum(error, beyond), error)


def _ends(workload: PlantedWorkload, goal: float) -> tuple[float, float]:
    """The error before training and after infinitely long training."""
    if workload.metric == "cross_entropy_error":
        return 10.3, 0.9 * goal
    return (0.98 if workload.larger_is_better else 0.9), 0.6 * goal


def _columns(
    workload: PlantedWorkload,
    error: np.ndarray,
    status: np.ndarray,
    rows: np.ndarray,
    there: np.ndarray,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """All columns, without the places where a trial has no rows."""
    flat = error[there]
    ends = np.cumsum(rows) - 1
    blown = ends[status == INFEASIBLE]
    found: dict[str, np.ndarray] = {}
    for name in workload.columns:
        split, kind = name.split("/")
        factor = {"train": 0.9, "val": 1.0, "test": 1.02}[split]
        noise = 0.01 * rng.standard_normal(flat.size) if split != "val" else 0.0
        values = flat * (factor * (1 + noise))
        if kind == workload.metric:
            if split != "val":
                values = np.round(values, 5)
            if workload.larger_is_better:
                # As measured: multiples of the inverse of the set's size, and the goal itself.
                values = np.round(1 - values, 10)
        elif kind == "cross_entropy_error":
            values = np.round(-np.log1p(-np.clip(values, 0, 0.999)) * 1.5, 6)
        found[name] = values
    for column, value in zip(found.values(), (np.inf, np.nan) * 3, strict=False):
        column[blown] = value
    return found


def search_space(search: PlantedSearch) -> dict[str, object]:
    """The ``parameter_configs`` of a search."""
    double: dict[str, object] = {"type": "DOUBLE"}
    known: dict[str, dict[str, object]] = {
        "learning_rate": double
        | {"scale": "LOG_SCALE", "min_value": _LEARNING_RATES[0], "max_value": _LEARNING_RATES[1]},
        "momentum": double
        | {"scale": "REVERSE_LOG_SCALE", "min_value": _MOMENTA[0], "max_value": _MOMENTA[1]},
        "end_learning_rate_factor": double
        | {"scale": "LOG_SCALE", "min_value": 1e-4, "max_value": 0.1},
        "label_smoothing": {"type": "DISCRETE", "feasible_points": list(_SMOOTHINGS)},
    }
    steps = int(3 * search.workload.steps(search.global_batch))
    known["learning_rate_decay_steps"] = {
        "type": "INTEGER",
        "scale": "",
        "min_value": steps // 2,
        "max_value": steps,
    }
    return {name: known[name] for name in search.parameters}
