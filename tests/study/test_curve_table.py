"""The tidy table, its CSV, summaries at the borders of what was trained, and the analysis as a whole."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest
from planted import METRIC, MOMENTUM_SPACE, Planted, Truth

from shoal.errors import UsageError
from shoal.study.analysis import analyse, searched_parameters, settings_of
from shoal.study.budgets import BestError
from shoal.study.curve_table import as_csv, cell, curve_table
from shoal.study.edges import Edge, Place
from shoal.study.fit import Estimate
from shoal.study.intervals import Interval
from shoal.study.records import Budget, Curve, Evaluation, Goal, Measured, Outcome, SearchKey
from shoal.study.search_summary import AnalysisSettings, summarise
from shoal.study.space import Log, Space
from shoal.study.spec import CurveSpec, StudySpec
from shoal.study.steps_to_result import Reach
from shoal.study.tables import SearchData, StudyTables

STUDY = Planted(
    truths={"sgd": Truth(luck=0.2), "heavy": Truth(s_min=30, b_crit=80, space=MOMENTUM_SPACE)},
    batches=(4, 32, 256),
    repeats=2,
    goals=(Goal(metric=METRIC, value=0.1), Goal(metric=METRIC, value=0.15)),
)


@pytest.fixture(scope="module")
def tables() -> StudyTables:
    return STUDY.tables()


@pytest.fixture(scope="module")
def analysis(tables):
    return analyse(tables, STUDY.settings, name="planted", parameters=STUDY.parameters, resamples=0)


def test_every_search_has_its_row_and_the_csv_holds_them(analysis):
    rows = analysis.main.rows
    assert [(r.curve, r.global_batch, r.repeat) for r in rows] == sorted(
        (k.curve, k.global_batch, k.repeat) for k in STUDY.search_keys()
    )
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert len(read) == len(rows)
    for text, row in zip(read, rows, strict=True):
        assert int(text["steps"]) == row.steps
        assert float(text["lr"]) == pytest.approx(row.lr, rel=1e-9)
        assert float(text["parameters.lr"]) == pytest.approx(row.parameters["lr"], rel=1e-9)
        assert text["steps_confirmed"] == ""
    heavy = [t for t in read if t["curve"] == "heavy"]
    assert all(t["parameters.momentum"] for t in heavy)


def test_csv_of_keys_intervals_and_odd_values():
    key = SearchKey(curve="a", global_batch=2, repeat=0)
    row = BestError(key=key, metric="val/x", unit="steps", budget=3, value=math.inf)
    assert as_csv([row]) == (
        "curve,global_batch,repeat,metric,unit,budget,value\na,2,0,val/x,steps,3,inf\n"
    )
    estimate = Estimate(value=1.5, profile=Interval(1.0, math.inf), bootstrap=None)
    assert as_csv([estimate]) == "value,profile_low,profile_high,bootstrap\n1.5,1,inf,\n"
    assert cell(True) == "yes" and cell(None) == "" and cell(1 / 3) == "0.3333333333"


def test_flags_are_in_words(tables):
    summary = summarise(next(iter(tables)), STUDY.goals[0], STUDY.settings)
    edge = Edge(parameter="lr", place=Place.BOUNDARY, side="upper", median=0.97, crossers=9)
    (row,) = curve_table([summary], edges={summary.key: [edge]}, void=[summary.key])
    assert "boundary: lr at its upper side" in row.flags
    assert any(flag.startswith("void") for flag in row.flags)
    few = replace(summary, result=replace(summary.result, steps=7, previous=6))
    assert any("too few to resolve" in flag for flag in curve_table([few])[0].flags)
    none = replace(summary, result=replace(summary.result, steps=0, previous=None))
    assert "met at step 0: the goal asks for nothing" in curve_table([none])[0].flags


def key(batch: int = 8) -> SearchKey:
    return SearchKey(curve="sgd", global_batch=batch, repeat=0)


def test_an_unfinished_search_is_cut_at_its_last_common_step(tables):
    data = next(d for d in tables if d.key.curve == "sgd" and d.key.global_batch == 32)
    goal = STUDY.goals[0]
    whole = summarise(data, goal, STUDY.settings)
    assert whole.steps is not None
    stop = [g for g in STUDY.grid if g < whole.steps][-5]
    cut = [
        Curve(evaluations=[e for e in c.evaluations if e.step <= (stop if i == 0 else stop * 2)])
        for i, c in enumerate(data.curves)
    ]
    part = replace(data, curves=cut, outcomes=[None] * len(cut), end=None, state=None)
    found = summarise(part, goal, STUDY.settings)
    assert found.result.reach is Reach.UNFINISHED
    if data.curves[0].diverged_at is None:
        assert found.censored_at == stop and found.end == stop
    assert all(t.crossing is None for t in found.trials)
    assert found.best(5) == []


def test_what_lies_beyond_the_end_is_not_seen(tables):
    data = next(iter(tables))
    goal = STUDY.goals[0]
    whole = summarise(data, goal, STUDY.settings)
    assert data.end is not None and whole.steps is not None
    late = [
        Curve(
            evaluations=[
                *c.evaluations,
                *(
                    Evaluation(step=s, metrics={METRIC: Measured(1e-9)})
                    for s in STUDY.grid
                    if c.diverged_at is None and max(c.step, data.end) < s < data.end * 2
                ),
            ]
        )
        for c in data.curves
    ]
    assert summarise(replace(data, curves=late), goal, STUDY.settings) == whole


def imported(outcomes, crossings, steps=((0, 100, 250, 400),) * 9):
    """Trials on steps of their own; error 0.05 from the crossing on."""
    trials, curves = [], []
    for i, (cross, own) in enumerate(zip(crossings, steps, strict=False)):
        trial = STUDY.trials(key())[0]
        trials.append(replace(trial, id=i + 3, search=key()))
        curves.append(
            Curve(
                evaluations=[
                    Evaluation(
                        step=s,
                        metrics={
                            METRIC: Measured(0.05 if cross is not None and s >= cross else 0.5)
                        },
                    )
                    for s in own
                ]
            )
        )
    return SearchData(key=key(), trials=trials, curves=curves, outcomes=outcomes)


IMPORTED = AnalysisSettings(
    goals=(Goal(metric=METRIC, value=0.1),),
    budget=Budget(feasible=2, draws=100, steps=400),
    grid=None,
)


def test_imported_searches_take_the_first_complete_trials():
    yes, no, bad = Outcome.REACHED, Outcome.NOT_REACHED, Outcome.DIVERGED
    goal = IMPORTED.goals[0]
    data = imported(
        [bad, yes, None, yes, yes],
        [100, 400, 100, 250, 100],
        ((0, 100),) * 3 + ((0, 90, 250, 400), (0, 100)),
    )
    data.curves[1].evaluations[:] = [
        Evaluation(step=s, metrics={METRIC: Measured(v)})
        for s, v in ((0, 0.5), (390, 0.5), (400, 0.05))
    ]
    found = summarise(data, goal, IMPORTED)
    # Diverged and incomplete trials do not count; the third complete one comes too late.
    assert (found.steps, found.previous, found.result.winner) == (250, 90, 6)
    assert [t.trial.id for t in found.trials if t.is_feasible] == [4, 6]
    missed = summarise(imported([no, no], [None, None]), goal, IMPORTED)
    assert missed.is_censored and missed.censored_at == 400
    short = summarise(imported([yes, bad], [100, None]), goal, IMPORTED)
    assert short.is_short and short.steps is None
    tie = summarise(imported([yes, yes], [250, 250]), goal, IMPORTED)
    assert tie.result.winner == 3


def test_the_whole_analysis(analysis, tables):
    assert analysis.name == "planted" and len(analysis.goals) == 2
    assert analysis.main.goal == STUDY.goals[0]
    easier = {(r.curve, r.global_batch, r.repeat): r.steps for r in analysis.goals[1].rows}
    for row in analysis.main.rows:
        assert easier[(row.curve, row.global_batch, row.repeat)] <= row.steps
    assert analysis.best_errors == (), "not a full study"
    assert set(analysis.main.comparisons) == {("heavy", "sgd")}
    assert {p.key for p in analysis.scatter} == set(STUDY.search_keys())
    assert analysis.exit_status in (0, 3)
    for lead, rest in analysis.main.findings.values():
        assert lead.endswith(".") and rest.endswith(".")
    with pytest.raises(UsageError, match="run it first"):
        analyse(StudyTables.of([]), STUDY.settings)


def test_without_units_nothing_is_said_about_edges(tables):
    bare = [
        replace(d, trials=[replace(t, unit=()) for t in d.trials])
        for d in tables
        if d.key.curve == "sgd"
    ]
    found = analyse(StudyTables.of(bare), STUDY.settings, parameters={"sgd": ["lr"]}, resamples=0)
    assert {e.place for edges in found.main.edges.values() for e in edges} == {Place.UNKNOWN}
    none = analyse(StudyTables.of(bare), STUDY.settings, resamples=0)
    assert all(edges == [] for edges in none.main.edges.values())
    assert none.exit_status == 0


def test_settings_come_from_the_spec():
    spec = StudySpec(
        name="s",
        workload="digits",
        curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=1e-3, max=1.0)}))},
        global_batches=(1, 2),
        goals=STUDY.goals,
        budget=Budget(feasible=5, draws=9, steps=50),
    )
    settings = settings_of(spec, train_samples=1024)
    assert settings.grid is not None and settings.grid[0] == 0 and settings.grid[-1] <= 50
    assert settings.goals == STUDY.goals and settings.train_samples == 1024
    assert searched_parameters(spec) == {"sgd": ["lr"]}
    with pytest.raises(UsageError, match="at least one"):
        replace(settings, goals=())
    with pytest.raises(UsageError, match="train_samples = 0"):
        replace(settings, train_samples=0)
