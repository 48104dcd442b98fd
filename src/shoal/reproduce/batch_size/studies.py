"""The studies on digits that the claims rest on: what is measured, and how it is carried out and read."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shoal.study import Budget, CurveSpec, Goal, Log, ReverseLog, Space, StudySpec
from shoal.study.analysis import StudyAnalysis, analyse, searched_parameters, settings_of
from shoal.study.edges import Place, recenter
from shoal.study.records import SearchKey
from shoal.study.run import run_study
from shoal.study.screen import Onlooker
from shoal.study.tables import SearchData, StudyTables, read_study

METRIC = "val/cross_entropy_error"
GOALS = tuple(Goal(metric=METRIC, value=value) for value in (0.13, 0.15, 0.17))
SGD, HEAVY, NESTEROV = "sgd", "heavy_ball", "nesterov"
BATCHES = tuple(2**k for k in range(11))
QUICK_BATCHES = tuple(2**k for k in range(1, 9))
FULL_STEPS = 1_000
TRAIN_SAMPLES = 1024

_RATES = Log(min=3e-3, max=8.0)
_MOMENTA = ReverseLog(min=0.0, max=0.99)


def _curves(*names: str) -> dict[str, CurveSpec]:
    spaces = {
        SGD: Space({"lr": _RATES}),
        HEAVY: Space({"lr": _RATES, "momentum": _MOMENTA}),
        NESTEROV: Space({"lr": _RATES, "momentum": _MOMENTA}),
    }
    return {name: CurveSpec(optimizer=name, space=spaces[name]) for name in names}  # type: ignore[arg-type]


def digits_spec(*, repeats: int = 5) -> StudySpec:
    """SGD, heavy ball and Nesterov at every power of two from 1 to the full batch; three goals."""
    return StudySpec(
        name="digits",
        workload="digits_mlp",
        curves=_curves(SGD, HEAVY, NESTEROV),
        global_batches=BATCHES,
        goals=GOALS,
        budget=Budget(feasible=40, draws=160, steps=40_000, kappa=3.0),
        repeats=repeats,
        seed=1811,
    )


def full_spec(*, repeats: int = 3) -> StudySpec:
    """Heavy ball with every trial trained to 1,000 steps: what a budget buys, and the training error."""
    return StudySpec(
        name="digits-full",
        workload="digits_mlp",
        curves=_curves(HEAVY),
        global_batches=BATCHES,
        goals=GOALS,
        budget=Budget(feasible=40, draws=160, steps=FULL_STEPS, full=True),
        repeats=repeats,
        seed=1812,
    )


def quick_spec() -> StudySpec:
    """One small search per point, stopped at the goal: a smoke test of the study itself."""
    return StudySpec(
        name="digits-quick",
        workload="digits_mlp",
        curves=_curves(SGD, HEAVY),
        global_batches=QUICK_BATCHES,
        goals=GOALS[:1],
        budget=Budget(feasible=20, draws=80, steps=20_000, kappa=1.0),
        repeats=1,
        seed=1813,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A study that was carried out.

    Args:
        spec: what was asked.
        directory: where it lies.
        tables: what was measured.
        analysis: what it says.
    """

    spec: StudySpec
    directory: Path
    tables: StudyTables
    analysis: StudyAnalysis


def processes() -> int:
    """Runner processes: one per core this process may use."""
    available = getattr(os, "sched_getaffinity", None)
    return max(1, len(available(0)) if available else os.cpu_count() or 1)


def carry_out(spec: StudySpec, directory: Path, stream: TextIO = sys.stderr) -> Measured:
    """Run a study to its end, or go on with it, and analyse it.

    Args:
        spec: the study.
        directory: its own; what is there already is not run again.
        stream: where progress goes.

    Raises:
        RunnersStopped: it was interrupted; all that was measured is kept.
    """
    with Onlooker(stream) as onlooker:
        run_study(spec, directory, processes=processes(), confirm_seeds=0, look=onlooker.look)
    return measured(spec, directory, read_study(directory))


def measured(spec: StudySpec, directory: Path, tables: StudyTables) -> Measured:
    """The analysis of what lies in memory."""
    return Measured(
        spec=spec,
        directory=directory,
        tables=tables,
        analysis=analyse(
            tables,
            settings_of(spec, train_samples=spec.resolved.samples("train")),
            name=spec.name,
            parameters=searched_parameters(spec),
            resamples=0,
        ),
    )


def at_boundary(analysis: StudyAnalysis) -> list[tuple[str, int]]:
    """Curves and batches whose best settings lie at the edge of their range, for the hardest goal."""
    return sorted(
        place
        for place, edges in analysis.main.edges.items()
        if any(edge.place is Place.BOUNDARY for edge in edges)
    )


def recentred(first: Measured) -> StudySpec | None:
    """The study with moved ranges at the batches at an edge, and no others; None where there is none.

    A study has one list of batches for all its curves, so a curve is measured again at every batch of
    the list; :func:`merged` takes only those that were at an edge.
    """
    places = at_boundary(first.analysis)
    spaces: dict[str, dict[int, Space]] = {}
    for curve, batch in places:
        space = first.spec.curves[curve].space_at(batch)
        proposal = recenter((curve, batch), space, first.analysis.main.edges[curve, batch])
        if proposal.changes:
            spaces.setdefault(curve, {})[batch] = proposal.space
    if not spaces:
        return None
    return dataclasses.replace(
        first.spec,
        name=f"{first.spec.name}-recentred",
        curves={
            name: dataclasses.replace(first.spec.curves[name], spaces=changed)
            for name, changed in spaces.items()
        },
        global_batches=tuple(sorted({b for changed in spaces.values() for b in changed})),
    )


def merged(first: Measured, again: Measured, places: Sequence[tuple[str, int]]) -> Measured:
    """The first study with the searches of ``places`` taken from the recentred one."""
    taken = set(places)

    def chosen(key: SearchKey) -> SearchData:
        source = again if (key.curve, key.global_batch) in taken else first
        return source.tables[key]

    tables = StudyTables.of([chosen(key) for key in first.spec.searches()], first.tables.spec)
    return measured(first.spec, first.directory, tables)


def steps_of(analysis: StudyAnalysis, curve: str, goal: int = 0) -> Mapping[int, float]:
    """Geometric mean of S by batch, where every search of the batch reached the goal."""
    return {
        cell.global_batch: cell.centre
        for cell in analysis.goals[goal].cells_of(curve)
        if cell.centre is not None and not cell.censored_at and not cell.left_out
    }
