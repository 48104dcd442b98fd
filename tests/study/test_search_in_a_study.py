"""The search in real study directories, its trials planted: what is on file is the definition."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shoal.study import Budget, CurveSpec, Goal, Grid, Log, ReverseLog, Space, StudySpec
from shoal.study.design import draws
from shoal.study.directory import StudyDirectory
from shoal.study.records import CONFIRM, Curve, SearchKey, Trial
from shoal.study.run import begin
from shoal.study.runner import Runner
from shoal.study.search import Search
from shoal.study.search_summary import AnalysisSettings, summarise
from shoal.study.tables import SearchData, StudyTables, read_study
from shoal.workloads.synthetic_curves import SyntheticCurves, SyntheticWorkshop
from study.brute_force import steps as by_words

CURVES = SyntheticCurves(
    smallest_steps=40,
    fewest_samples=400,
    noise=0.1,
    luck=0.2,
    stable_lr=1.5,
    hopeless=frozenset({32}),
)
GOALS = tuple(Goal(metric="val/classification_error", value=v) for v in (0.1, 0.2, 0.14))


def study(**budget: object) -> StudySpec:
    return StudySpec(
        name="planted",
        workload=CURVES.workload(64),
        curves={
            "sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=0.02, max=8.0)})),
            "heavy": CurveSpec(
                optimizer="heavy_ball",
                space=Space(
                    {"lr": Log(min=0.002, max=8.0), "momentum": ReverseLog(min=0.1, max=0.99)}
                ),
            ),
        },
        global_batches=(4, 32),
        goals=GOALS,
        budget=Budget(**({"feasible": 5, "draws": 11, "steps": 400} | budget)),
        repeats=1,
        grid=Grid(ratio=1.2),
    )


def work(path: Path, spec: StudySpec, stopped: Callable[[], bool], runner: str) -> bool:
    directory = StudyDirectory(path)
    begin(directory, spec, confirm_seeds=3)
    return Runner(
        directory,
        spec,
        name=runner,
        workshop=SyntheticWorkshop(CURVES),
        stopped=stopped,
    ).work()


def _pairs(data: SearchData) -> tuple[Sequence[Trial], Sequence[Curve]]:
    return data.trials, data.curves


def never() -> bool:
    return False


def results(tables: StudyTables, spec: StudySpec) -> dict[tuple[SearchKey, float], object]:
    """Per search and goal S, winner, end, and every trial's crossing, divergence and end."""
    settings = AnalysisSettings(
        goals=spec.goals, budget=spec.budget, grid=spec.grid.points(spec.steps)
    )
    found = {}
    for data in tables:
        if data.key.repeat == CONFIRM:
            continue
        for goal in spec.goals:
            row = summarise(data, goal, settings)
            trials = [(t.trial.id, t.crossing, t.diverged, t.last) for t in row.trials]
            found[data.key, goal.value] = (row.result, row.end, trials)
    return found


@pytest.mark.parametrize("full", [False, True])
def test_what_is_on_file_is_the_definition(tmp_path: Path, full: bool) -> None:
    spec = study(full=full)
    assert work(tmp_path / "study", spec, never, "one")
    tables = read_study(tmp_path / "study")
    grid = spec.grid.points(spec.steps)
    settings = AnalysisSettings(goals=spec.goals, budget=spec.budget, grid=grid)
    assert len([k for k in tables.searches if k.repeat != CONFIRM]) == len(spec.searches())
    reached = 0
    for key in spec.searches():
        curves = [
            [
                (e.step, e.metrics["val/classification_error"].value, e.diverged)
                for e in CURVES.curve(trial, grid).evaluations
            ]
            for trial in draws(spec, key, 0, spec.budget.draws)
        ]
        end = StudyDirectory(tmp_path / "study").end_of(key)
        assert end is not None
        noted = {goal["value"]: goal for goal in end["goals"]}  # type: ignore[index]
        for goal in spec.goals:
            kind, step, winner = by_words(
                curves, lambda value, at=goal.value: value < at, spec.budget.feasible, grid
            )
            row = summarise(tables[key], goal, settings)
            expected = (step, winner) if kind == "reached" else (None, None)
            assert (row.steps, row.result.winner) == expected
            assert (noted[goal.value]["steps"], noted[goal.value]["winner"]) == expected
            assert row.result.reach == noted[goal.value]["reach"] == kind
            reached += kind == "reached"
        if key.global_batch == 32:
            assert end["goals"][-1]["steps"] is None  # type: ignore[index]
    assert reached >= 6


@pytest.mark.parametrize("seed", range(2))
def test_stopped_twenty_times_by_as_many_runners_changes_nothing(tmp_path: Path, seed: int) -> None:
    spec = study()
    assert work(tmp_path / "whole", spec, never, "one")
    rng = random.Random(seed)
    for number in range(20):
        left = rng.randint(1, 60)

        def stopped() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        if work(tmp_path / "broken", spec, stopped, f"runner-{number}"):
            break
    work(tmp_path / "broken", spec, never, "last")
    whole, broken = read_study(tmp_path / "whole"), read_study(tmp_path / "broken")
    assert results(whole, spec) == results(broken, spec)
    for data in broken:
        # A trial that does not count in the end may have come a point further in one of the two.
        others = {t.id: c for t, c in zip(*_pairs(whole[data.key]), strict=True)}
        for trial, curve in zip(*_pairs(data), strict=True):
            other = others.get(trial.id, Curve()).evaluations
            common = min(len(curve.evaluations), len(other))
            assert repr(curve.evaluations[:common]) == repr(other[:common])


def test_a_study_that_was_stopped_in_its_first_moments_can_be_read(tmp_path: Path) -> None:
    spec = study()
    looks = iter([False, False, True])
    assert not work(tmp_path / "study", spec, lambda: next(looks, True), "one")
    found = results(read_study(tmp_path / "study"), spec)
    assert found and all(row[0].steps is None for row in found.values())  # type: ignore[index]


def test_a_search_rebuilt_from_its_rows_says_the_same(tmp_path: Path) -> None:
    spec = study()
    assert work(tmp_path / "study", spec, never, "one")
    tables = read_study(tmp_path / "study")
    for key in spec.searches():
        data = tables[key]
        known = {t.id: c for t, c in zip(data.trials, data.curves, strict=True)}
        search = Search(spec.goals, spec.budget, spec.grid.points(spec.steps), curves=known)
        end = StudyDirectory(tmp_path / "study").end_of(key)
        assert end is not None and search.finished
        assert search.summary() == {name: end[name] for name in search.summary()}
