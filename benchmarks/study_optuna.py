"""A search by shoal against the same search by a competent Optuna script, end to end.

`digits_bB`        the engine users get: from nothing to S, claims, journals and the contest included.
`digits_bB_pool`   the same with the plain loop, whose S must be the peer's to the last step; what is left of
                 the ratio is the stop and the evaluation, the rest is the engine.
`digits_b8_kappa3` trained on to 3 S, as the edge check and intervals want it, against the same peer.
`digits_b8_usual`  against Optuna as most people write it: TPE, median pruner, an evaluation per epoch.
`fashion_cnn_bB`   a small convolutional network; an easy goal and few trials, so that it ends.

The peer draws the same points and seeds, trains with the same plain steps, evaluates on the same grid, stops
a trial at the goal and cuts every other at the best S so far. One process, one thread and the processor's
seconds on both sides; trials are kept in memory on its side, its cheapest storage. Its S is taken from its
own records by the definition.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from benchmarks.pairing import Row, paired
from shoal.study import Budget, CurveSpec, Goal, Log, ReverseLog, Space, StudySpec, load_workload
from shoal.study.design import draws
from shoal.study.directory import StudyDirectory
from shoal.study.engines.build import Candidate
from shoal.study.engines.contest import Choice
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.records import SearchKey
from shoal.study.run import begin
from shoal.study.runner import Runner

BLOCK = 256
DIVERGED = 10.0


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One search that both sides carry out.

    Args:
        name: of its row.
        workload: registered name.
        metric: of the goal.
        goal: its value.
        batch: samples per step.
        trials: feasible ones.
        steps: budget of a trial.
        lr: range.
        pairs: repeats.
    """

    name: str
    workload: str
    metric: str
    goal: float
    batch: int
    trials: int
    steps: int
    lr: tuple[float, float]
    pairs: int

    def spec(self, seed: int, *, kappa: float = 1.0) -> StudySpec:
        """The study of one search."""
        low, high = self.lr
        space = Space({"lr": Log(min=low, max=high), "momentum": ReverseLog(min=0.0, max=0.99)})
        return StudySpec(
            name="bench",
            workload=load_workload(self.workload),
            curves={"nesterov": CurveSpec(optimizer="nesterov", space=space)},
            global_batches=(self.batch,),
            goals=(Goal(metric=self.metric, value=self.goal),),
            budget=Budget(
                feasible=self.trials, draws=4 * self.trials, steps=self.steps, kappa=kappa
            ),
            repeats=1,
            seed=seed,
        )


def contests(quick: bool) -> list[Contest]:
    """What is compared."""
    loss, error = "val/cross_entropy_error", "val/classification_error"
    trials = 20 if quick else 40
    digits = [
        Contest(
            name=f"digits_b{batch}", workload="digits_mlp", metric=loss, goal=0.13, batch=batch,
            trials=trials, steps=steps, lr=(3e-3, 8.0), pairs=pairs,
        )
        for batch, steps, pairs in ((1, 12_000, 3), (8, 4000, 5), (64, 1500, 7))
    ]  # fmt: skip
    cnn = [
        Contest(
            name=f"fashion_cnn_b{batch}", workload="fashion_cnn", metric=error, goal=0.35, batch=batch,
            trials=8, steps=400, lr=(1e-3, 1.0), pairs=2,
        )
        for batch in (8, 64)
    ]  # fmt: skip
    return [*digits, *cnn]


def rows(quick: bool) -> list[Row]:
    """All rows; the process runs one thread."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for contest in contests(quick):
        found += _rows(contest)
    return found


def _rows(contest: Contest) -> list[Row]:
    measured: dict[str, list[tuple[float, int | None]]] = {}
    extra = contest.name == "digits_b8"
    for pair in range(contest.pairs):
        sides = ["ours", "pool", "theirs", *(["kappa3", "usual"] if extra else [])]
        for side in sides if pair % 2 else reversed(sides):
            measured.setdefault(side, []).append(_carry_out(contest, side, seed=pair))
    seconds = {side: [s for s, _ in values] for side, values in measured.items()}
    steps = {side: [s for _, s in values] for side, values in measured.items()}
    if steps["pool"] != steps["theirs"]:
        raise RuntimeError(
            f"{contest.name}: S {steps['pool']} by shoal, {steps['theirs']} by the peer"
        )
    peer = "Optuna 5, stop at the goal, cut at the best S"
    found = [
        paired(
            contest.name, "CPU seconds a search", seconds["ours"], seconds["theirs"], peer=peer,
            note=f"S {steps['ours']} against {steps['theirs']}",
        ),
        paired(
            f"{contest.name}_pool", "CPU seconds a search", seconds["pool"], seconds["theirs"],
            peer=peer, note="the plain loop on both sides: S equal; the rest is the engine",
        ),
    ]  # fmt: skip
    if extra:
        found.append(
            paired(
                f"{contest.name}_kappa3", "CPU seconds a search", seconds["kappa3"],
                seconds["theirs"], peer=peer, note="trained on to 3 S",
            )
        )  # fmt: skip
        usual = paired(
            f"{contest.name}_usual", "CPU seconds a search", seconds["ours"], seconds["usual"],
            peer="Optuna 5, TPE, median pruner, an evaluation per epoch",
            note=f"not the same work; S {steps['ours']} against {steps['usual']}",
        )  # fmt: skip
        found.append(Row(**{**usual.as_dict(), "same_work": False}))
    return found


def _carry_out(contest: Contest, side: str, *, seed: int) -> tuple[float, int | None]:
    """CPU seconds, and S."""
    spec = contest.spec(seed, kappa=3.0 if side == "kappa3" else 1.0)
    _ = spec.resolved, spec.fingerprint
    with tempfile.TemporaryDirectory() as name:
        began = time.process_time()
        if side == "theirs":
            steps = competent(spec, Path(name))
        elif side == "usual":
            steps = usual(spec)
        else:
            steps = ours(spec, Path(name), plain=side == "pool")
        return time.process_time() - began, steps


def ours(spec: StudySpec, place: Path, *, plain: bool) -> int | None:
    """The search as ``shoal study run`` carries it out, in this process."""
    directory = StudyDirectory(place)
    begin(directory, spec, confirm_seeds=0)
    key = spec.searches()[0]
    if plain:
        pool = Choice(candidate=Candidate(engine="pool"), speedup=1.0, step_seconds={}, seconds=0.0)
        directory.write_engine(key.curve, key.global_batch, {"engine": "pool", **pool.as_json()})
    assert Runner(directory, spec, name="bench").work()
    end: Any = directory.end_of(key)
    return end["goals"][-1]["steps"]


# -- the peer ---------------------------------------------------------------------------------------------


class Trained:
    """One trial of the peer: the plain loop, and a whole validation pass at every evaluation."""

    def __init__(self, spec: StudySpec, key: SearchKey, number: int) -> None:
        workload = spec.resolved
        curve = spec.curves[key.curve]
        task = Task(workload=workload, curve=curve, global_batch=key.global_batch)
        self._trial = draws(spec, key, number, number + 1)[0]
        self._engine = PoolEngine(task)
        self._engine.admit(self._trial)
        self._model = workload.build(0).eval()
        self._workload = workload
        self._metric = workload.metrics[spec.goals[0].metric.partition("/")[2]]
        self._block = float("nan")

    def advance(self, step: int) -> None:
        """Train to a step."""
        self._engine.advance({self._trial.id: step})

    @torch.no_grad()
    def evaluate(self) -> tuple[float, bool]:
        """The metric, and whether the trial has diverged."""
        x, y = self._workload.split("val")
        weights: dict[str, Tensor] = dict(self._engine.weights(self._trial.id))
        output = torch.cat(
            [
                functional_call(self._model, weights, (x[i : i + 512],))
                for i in range(0, len(x), 512)
            ]
        )
        block = float(self._workload.loss(output[:BLOCK], y[:BLOCK]).double().mean())
        if self._engine.step(self._trial.id) == 0:
            self._block = block
        first, recent = self._engine.losses(self._trial.id)
        bad = not block <= DIVERGED * self._block or block != block
        if recent == recent or first == first:
            bad |= not recent <= DIVERGED * max(first, self._block)
        return float(self._metric(output, y).double().mean()), bad


def competent(spec: StudySpec, place: Path) -> int | None:
    """QMC points, per-trial budget, stop at the goal, cut at the best S so far, redraw diverged ones."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    key, goal = spec.searches()[0], spec.goals[0]
    grid = spec.grid.points(spec.steps)
    best = spec.steps
    records: list[tuple[int | None, int | None]] = []

    def objective(trial: Any) -> float:
        nonlocal best
        lr = trial.suggest_float("lr", 1e-9, 1e9, log=True)
        trial.suggest_float("momentum", 0.0, 1.0)
        trained = Trained(spec, key, trial.number)
        assert abs(lr - trained._trial.parameters["lr"]) < 1e-9 * lr
        for step in grid:
            if step > best:
                break
            trained.advance(step)
            value, diverged = trained.evaluate()
            if value < goal.value:
                best = min(best, step)
                records.append((step, None))
                return float(step)
            if diverged:
                records.append((None, step))
                raise optuna.TrialPruned
        records.append((None, None))
        return float("inf")

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    points = draws(spec, key, 0, spec.budget.draws)
    for point in points:
        study.enqueue_trial({name: point.parameters[name] for name in ("lr", "momentum")})

    def enough(study: Any, _trial: Any) -> None:
        if (
            sum(crossed is not None or diverged is None for crossed, diverged in records)
            >= spec.budget.feasible
        ):
            study.stop()

    study.optimize(objective, n_trials=spec.budget.draws, callbacks=[enough])
    study.trials_dataframe().to_csv(place / "trials.csv")
    return first_crossing(records, spec.budget.feasible)


def first_crossing(records: Sequence[tuple[int | None, int | None]], feasible: int) -> int | None:
    """S by the definition: the first h at which one of the first N trials not diverged by h has crossed."""
    for step in sorted({crossed for crossed, _ in records if crossed is not None}):
        count = 0
        for crossed, diverged in records:
            if diverged is not None and diverged <= step:
                continue
            count += 1
            if crossed is not None and crossed <= step:
                return step
            if count == feasible:
                break
    return None


def usual(spec: StudySpec) -> int | None:
    """TPE and a median pruner, each trial to the budget, evaluated once an epoch."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    key, goal = spec.searches()[0], spec.goals[0]
    epoch = max(1, spec.resolved.samples("train") // key.global_batch)
    crossed: list[int] = []

    def objective(trial: Any) -> float:
        settings = {
            "lr": trial.suggest_float("lr", 3e-3, 8.0, log=True),
            "momentum": 1 - trial.suggest_float("one_minus_momentum", 0.01, 1.0, log=True),
        }
        trained = Trained(spec, key, trial.number)
        trained._trial.parameters.update(settings)  # type: ignore[attr-defined]
        trained._engine.release(trial.number)
        trained._engine.admit(trained._trial)
        value = float("inf")
        for step in range(epoch, spec.steps + 1, epoch):
            trained.advance(step)
            value, diverged = trained.evaluate()
            if diverged or value != value:
                raise optuna.TrialPruned
            if value < goal.value:
                crossed.append(step)
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner()
    )
    study.optimize(objective, n_trials=spec.budget.feasible)
    return min(crossed, default=None)
