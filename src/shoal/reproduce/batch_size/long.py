"""``--long``: Fashion-MNIST with a small CNN and fully connected nets; resumable, overnight if need be.

Goals are not chosen by hand: a pilot of 12 trials at B = 32 is trained on 16,384 samples, and the goal is its
least validation error times 1.1, to two digits. The CNN has its own; the fully connected nets share that of
the middle one, so that they can be compared. kappa is 1 and R is 2: steps to the goal, no edge check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from shoal.errors import UsageError
from shoal.reproduce.batch_size import criteria
from shoal.reproduce.batch_size.paper import judge_sizes, judge_spread
from shoal.reproduce.batch_size.studies import HEAVY, SGD, Measured, measured, processes
from shoal.reproduce.claims import Claim
from shoal.reproduce.result import Table
from shoal.study import Budget, CurveSpec, Goal, Grid, Log, ReverseLog, Space, StudySpec
from shoal.study.directory import StudyDirectory
from shoal.study.fit import TradeoffFit
from shoal.study.run import Running, run_study
from shoal.study.runners import RunnersStopped
from shoal.study.screen import Onlooker
from shoal.study.tables import read_study

METRIC = "val/classification_error"
BATCHES = tuple(2**k for k in range(2, 11))
PILOT_BATCH, PILOT_STEPS, PILOT_TRIALS = 32, 512, 12
PILOT_SLACK = 1.1
QUARTER = 13_750
SEED = 1814

_RATES = Log(min=1e-3, max=2.0)
_MOMENTA = ReverseLog(min=0.0, max=0.99)


@dataclass(frozen=True, kw_only=True)
class LongStudy:
    """One workload of the long experiment.

    Args:
        name: of the study.
        workload: registered name.
        parameters: of the workload.
        curves: optimizers.
        pilot: the study whose pilot gives the goal.
    """

    name: str
    workload: str
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])
    curves: Sequence[str] = (SGD,)
    pilot: str


_FC = "fc_128x3"
STUDIES = (
    LongStudy(name="cnn", workload="fashion_cnn", curves=(SGD, HEAVY), pilot="cnn"),
    LongStudy(name=_FC, workload="fashion_fc_128x3", pilot=_FC),
    LongStudy(
        name="fc_128x3_quarter",
        workload="fashion_fc_128x3",
        parameters={"train_samples": QUARTER},
        pilot=_FC,
    ),
    LongStudy(name="fc_64x3", workload="fashion_fc_64x3", pilot=_FC),
    LongStudy(name="fc_256x3", workload="fashion_fc_256x3", pilot=_FC),
)
SEARCHES = 2 * len(BATCHES) * sum(len(study.curves) for study in STUDIES)


@dataclass(frozen=True, kw_only=True)
class LongResult:
    """What of the long experiment is there.

    Args:
        studies: by name, those with a finished search.
        goals: validation errors, by name of the study.
        finished: finished searches by study.
    """

    studies: Mapping[str, Measured]
    goals: Mapping[str, float]
    finished: Mapping[str, int]

    @property
    def is_whole(self) -> bool:
        """Whether every search is finished."""
        return sum(self.finished.values()) == SEARCHES


def _curve(name: str) -> CurveSpec:
    if name == SGD:
        return CurveSpec(optimizer="sgd", space=Space({"lr": _RATES}))
    return CurveSpec(optimizer="heavy_ball", space=Space({"lr": _RATES, "momentum": _MOMENTA}))


def pilot_spec(study: LongStudy) -> StudySpec:
    """12 trials of SGD at B = 32, all trained on 16,384 samples, evaluated whole at each doubling."""
    return StudySpec(
        name=f"{study.name}-pilot",
        workload=study.workload,
        workload_parameters=study.parameters,
        curves={SGD: _curve(SGD)},
        global_batches=(PILOT_BATCH,),
        goals=(Goal(metric=METRIC, value=1e-6),),
        budget=Budget(feasible=PILOT_TRIALS, draws=60, steps=PILOT_STEPS, full=True),
        grid=Grid(ratio=2.0),
        repeats=1,
        seed=SEED,
    )


def goal_of(pilot: Measured) -> float:
    """The goal that a pilot gives."""
    column = pilot.tables.metric(pilot.spec.searches()[0], METRIC)
    finite = column.value[column.exact]
    least = min(float(v) for v in finite if math.isfinite(v))
    digits = 1 - math.floor(math.log10(least * PILOT_SLACK))
    return round(least * PILOT_SLACK, digits)


def long_spec(study: LongStudy, goal: float) -> StudySpec:
    """One study of the long experiment."""
    return StudySpec(
        name=study.name,
        workload=study.workload,
        workload_parameters=study.parameters,
        curves={name: _curve(name) for name in study.curves},
        global_batches=BATCHES,
        goals=(Goal(metric=METRIC, value=goal),),
        budget=Budget(feasible=20, draws=80, steps=20_000, kappa=1.0),
        repeats=2,
        seed=SEED + 1,
    )


def run_long(directory: Path, stream: TextIO, *, most_searches: int | None = None) -> LongResult:
    """Go on with the long experiment, study by study.

    Args:
        directory: holds a directory per study.
        stream: where progress goes.
        most_searches: stop in order after so many new searches.

    Returns:
        What is finished; not all of it where it was stopped.
    """
    goals: dict[str, float] = {}
    left = most_searches
    try:
        for study in STUDIES:
            goals[study.name] = _goal(directory, study, goals, stream)
            spec = long_spec(study, goals[study.name])
            place = directory / study.name
            before = _finished(place, spec)
            if left is not None and left <= 0 and before < len(spec.searches()):
                break
            _carry_out(spec, place, stream, None if left is None else before + left)
            if left is not None:
                left -= _finished(place, spec) - before
    except RunnersStopped:
        pass
    return collected(directory, goals)


def collected(directory: Path, goals: Mapping[str, float]) -> LongResult:
    """What lies in the directory, of the studies whose goal is known."""
    studies: dict[str, Measured] = {}
    finished: dict[str, int] = {}
    for study in STUDIES:
        if study.name not in goals:
            continue
        spec, place = long_spec(study, goals[study.name]), directory / study.name
        finished[study.name] = _finished(place, spec)
        if finished[study.name]:
            studies[study.name] = measured(spec, place, read_study(place))
    return LongResult(studies=studies, goals=dict(goals), finished=finished)


def _goal(directory: Path, study: LongStudy, known: Mapping[str, float], stream: TextIO) -> float:
    if study.pilot in known:
        return known[study.pilot]
    own = next(one for one in STUDIES if one.name == study.pilot)
    spec, place = pilot_spec(own), directory / f"{own.name}-pilot"
    _carry_out(spec, place, stream, None)
    return goal_of(measured(spec, place, read_study(place)))


def _carry_out(spec: StudySpec, place: Path, stream: TextIO, most: int | None) -> None:
    directory = StudyDirectory(place)
    with Onlooker(stream) as onlooker:

        def look(running: Running) -> None:
            onlooker.look(running)
            done = sum(directory.end_of(key) is not None for key in spec.searches())
            if most is not None and most <= done < len(spec.searches()):
                raise RunnersStopped(f"{done} searches are finished, as many as were asked for")

        run_study(spec, place, processes=processes(), confirm_seeds=0, look=look)


def _finished(place: Path, spec: StudySpec) -> int:
    directory = StudyDirectory(place)
    return sum(directory.end_of(key) is not None for key in spec.searches())


def check_data() -> None:
    """Refuse early if Fashion-MNIST cannot be had.

    Raises:
        UsageError: it cannot, with what was tried.
    """
    from shoal.data.fashion_mnist import DataMissing
    from shoal.data.image_tasks import image_task

    try:
        image_task("fashion-mnist")
    except DataMissing as error:
        raise UsageError(f"--long = Fashion-MNIST, which is missing: {error}") from error


def fit_of(long: LongResult, name: str) -> TradeoffFit | None:
    """SGD's fit of one finished study."""
    study = long.studies.get(name)
    if study is None or long.finished.get(name, 0) < len(study.spec.searches()):
        return None
    return study.analysis.main.fits.get(SGD)


def judge_long(long: LongResult | None, digits: TradeoffFit | None) -> tuple[Claim, Claim]:
    """C2 and C8; not run unless the studies that they need are finished."""
    if long is None:
        return criteria.C2.not_run(), criteria.C8.not_run()
    fits = {"digits": digits} | {study.name: fit_of(long, study.name) for study in STUDIES}
    names = (_FC, "fc_128x3_quarter", "fc_64x3", "fc_256x3")
    whole, quarter, narrow, wide = (fits[name] for name in names)
    return (
        judge_spread(fits, (SEED + 1,)),
        judge_sizes(whole, quarter, narrow, wide, (SEED + 1,)),
    )


def table(long: LongResult) -> Table:
    """Every cell, finished or not: S of both repeats."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for study in STUDIES:
        analysis = long.studies[study.name].analysis if study.name in long.studies else None
        for curve in study.curves:
            cells = {c.global_batch: c for c in analysis.main.cells_of(curve)} if analysis else {}
            words: list[str] = []
            for batch in BATCHES:
                cell = cells.get(batch)
                said = [str(s) for s in cell.steps] if cell else []
                said += [f">{end}" for end in cell.censored_at] if cell else []
                words.append(" ".join(said) or "-")
            rows.append((study.name, curve, long.goals.get(study.name), *words))
    return Table(
        title="Fashion-MNIST: steps to the goal, each of two searches",
        columns=("workload", "optimizer", "goal", *(str(b) for b in BATCHES)),
        rows=tuple(rows),
        note=(
            "20 feasible trials per search, kappa 1. - : not finished; run the same command again. "
            "> : not reached by then, or under way. Goals come from the pilot."
        ),
    )
