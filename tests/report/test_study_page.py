"""A study's page: one file that needs nothing, its figures, the tables behind them, what it admits."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from planted import METRIC, MOMENTUM_SPACE, Planted, Truth

from shoal.errors import UsageError
from shoal.report.study_notes import by_curve, notes_of
from shoal.report.study_page import (
    render_study,
    rows_as_csv,
    study_figures,
    write_comparison,
    write_study_report,
)
from shoal.report.study_style import plain
from shoal.report.study_text import edge_table, fit_table, steps_table, validation_table
from shoal.study.analysis import StudyAnalysis, analyse
from shoal.study.edges import Edge, Place
from shoal.study.intervals import Interval
from shoal.study.noise_scale import NoiseScale
from shoal.study.records import Budget, Goal
from shoal.study.tables import StudyTables
from shoal.study.validation_noise import CurveNoise

TRUTHS = {
    "sgd": Truth(luck=0.2),
    "heavy": Truth(s_min=30, b_crit=60, luck=0.2, space=MOMENTUM_SPACE),
}


@pytest.fixture(scope="module")
def study() -> StudyAnalysis:
    planted = Planted(
        truths=TRUTHS,
        batches=(1, 4, 16, 64, 256),
        repeats=2,
        goals=(Goal(metric=METRIC, value=0.1), Goal(metric=METRIC, value=0.14)),
        budget=Budget(feasible=12, draws=40, steps=1600),
    )
    found = list(planted.tables())
    again = planted.confirmation(
        next(
            t for d in found if (d.key.curve, d.key.global_batch) == ("heavy", 16) for t in d.trials
        )
    )
    best = [d for d in found if (d.key.curve, d.key.global_batch) == ("sgd", 64)]
    from shoal.study.search_summary import summarise

    rows = [summarise(d, planted.goals[0], planted.settings) for d in best]
    winner = min(rows, key=lambda r: r.steps or 10**9).winner
    assert winner is not None
    confirmations = [again, planted.confirmation(winner.trial)]
    return analyse(
        StudyTables.of([*found, *confirmations]),
        planted.settings,
        name="planted <study>",
        parameters=planted.parameters,
        resamples=0,
    )


@pytest.fixture(scope="module")
def full() -> StudyAnalysis:
    planted = Planted(
        truths={"sgd": TRUTHS["sgd"]},
        batches=(4, 64),
        repeats=1,
        budget=Budget(feasible=8, draws=30, steps=1000, full=True),
    )
    return analyse(
        planted.tables(), planted.settings, name="full", parameters=planted.parameters, resamples=0
    )


@pytest.fixture(scope="module")
def written(study: StudyAnalysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study_report(study, tmp_path_factory.mktemp("report"))


def test_the_page_stands_alone(written: Path, study: StudyAnalysis):
    text = written.read_text()
    assert written.name == "report.html"
    assert "<script" not in text and "@import" not in text
    addresses = re.findall(r'(?:href|src)="([^"#][^"]*)"', text)
    assert addresses and all(a.startswith("data:text/csv;base64,") for a in addresses)
    assert "planted &lt;study&gt;" in text and "planted <study>" not in text
    for goal in study.goals[:1]:
        for lead, rest in goal.findings.values():
            assert html.escape(lead) in text or html.escape(lead[0].lower() + lead[1:]) in text
            assert html.escape(rest) in text


def test_the_first_sentence_comes_first(written: Path, study: StudyAnalysis):
    text = written.read_text()
    headline = re.search(r'<h1 id="headline">(.*?)</h1>', text, re.DOTALL)
    assert headline is not None
    lead = study.main.findings["heavy"][0]
    assert headline[1].startswith(html.escape("heavy: " + lead[0].lower() + lead[1:]))
    assert text.index("<h1") < text.index("<figure")


def test_ids_are_unique(written: Path):
    ids = re.findall(r'\bid="([^"]+)"', written.read_text())
    twice = sorted({i for i in ids if ids.count(i) > 1}) if len(ids) != len(set(ids)) else []
    assert not twice


def test_every_figure_has_its_table_in_the_page_and_beside_it(written: Path, study: StudyAnalysis):
    text = written.read_text()
    figures = study_figures(study)
    names = [f.name for f in figures]
    assert len(names) == len(set(names))
    assert {
        "steps-heavy",
        "steps-sgd",
        "optimizers",
        "comparison",
        "goals",
        "samples",
        "optima-heavy",
        "optima-sgd",
        "trials",
        "scatter-heavy",
        "scatter-sgd",
        "space-heavy-lr",
        "space-heavy-momentum",
        "space-sgd-lr",
    } == set(names)
    for figure in figures:
        drawing = (written.parent / "figures" / f"{figure.name}.svg").read_text()
        assert drawing.startswith("<svg") and drawing.rstrip().endswith("</svg>")
        beside = (written.parent / "figures" / f"{figure.name}.csv").read_text()
        rows = list(csv.DictReader(io.StringIO(beside)))
        assert rows, figure.name
        embedded = base64.b64encode(beside.encode()).decode()
        assert f'download="{figure.name}.csv" href="data:text/csv;base64,{embedded}"' in text
    searches = (written.parent / "figures" / "searches.csv").read_text()
    assert len(list(csv.DictReader(io.StringIO(searches)))) == len(study.main.rows)
    assert not list(written.parent.glob(".*")) and not list((written.parent / "figures").glob(".*"))


def figure_named(study: StudyAnalysis, name: str):
    return next(f for f in study_figures(study) if f.name == name)


def lines_with(axes, prefix: str):
    return [line for line in axes.lines if str(line.get_gid() or "").startswith(prefix)]


def test_measured_points_are_where_the_table_says(study: StudyAnalysis):
    figure = figure_named(study, "steps-sgd").draw(9.2)
    axes = figure.axes[0]
    (points,) = lines_with(axes, "points-sgd")
    expected = [
        (c.global_batch, c.centre) for c in study.main.cells_of("sgd") if c.centre is not None
    ]
    assert list(points.get_xdata()) == [batch for batch, _ in expected]
    assert list(points.get_ydata()) == pytest.approx([steps for _, steps in expected])
    low, high = axes.get_ylim()
    assert all(low < steps < high for _, steps in expected)
    assert axes.get_xscale() == "log" and axes.get_yscale() == "log"


def test_censored_searches_are_hollow_and_at_their_end(study: StudyAnalysis):
    # 30 (1 + 60) steps are more than the budget of 1,600.
    censored = [s for s in study.main.of("heavy") if s.is_censored]
    assert censored and all(s.key.global_batch == 1 for s in censored)
    axes = figure_named(study, "steps-heavy").draw(9.2).axes[0]
    marks = lines_with(axes, "censored-heavy-1-")
    assert sorted(float(m.get_ydata()[0]) for m in marks) == sorted(
        {float(s.censored_at) for s in censored}
    )
    assert all(m.get_markerfacecolor() == "white" for m in marks)
    assert len(axes.texts) == len(marks), "one arrow each"
    rows = figure_named(study, "steps-heavy").rows
    assert [r["censored_at"] for r in rows if r["steps"] is None] == [
        s.censored_at for s in censored
    ]
    assert any("not reached, S is larger" in note for note in notes_of(study))


def test_the_scatter_shows_every_trial_once(study: StudyAnalysis):
    figure = figure_named(study, "scatter-heavy")
    drawn = figure.draw(9.2)
    batches = sorted({s.key.global_batch for s in study.main.of("heavy")})
    assert len(drawn.axes) == len(batches)
    for axes, batch in zip(drawn.axes, batches, strict=True):
        kinds = {
            label: len(line.get_xdata())
            for line in axes.lines
            if (label := str(line.get_label())) in ("reached", "not reached", "diverged")
        }
        here = [r for r in figure.rows if r["global_batch"] == batch]
        assert sum(kinds.values()) == len(here)
        assert kinds["reached"] == sum(r["outcome"] == "reached" for r in here)
    winners = [r for r in figure.rows if r["is_winner"]]
    assert len(winners) == sum(s.steps is not None for s in study.main.of("heavy"))


def test_the_normalised_figure_starts_on_the_line_of_perfect_scaling(study: StudyAnalysis):
    figure = figure_named(study, "comparison")
    for row in figure.rows:
        cell = next(
            c
            for c in study.main.cells
            if (c.curve, c.global_batch) == (row["curve"], row["global_batch"])
        )
        if cell.centre is not None:
            assert row["steps_normalised"] == pytest.approx(cell.centre / row["divisor"])
        fit = study.main.fits[str(row["curve"])]
        usable = fit is not None and fit.is_usable
        assert row["normalised_by"] == ("fitted E_min" if usable else "B S at the smallest batch")


def test_narrow_figures_have_fewer_columns(study: StudyAnalysis):
    figure = figure_named(study, "scatter-sgd")
    wide, narrow = figure.draw(9.2), figure.draw(4.1)
    assert narrow.get_size_inches()[1] > wide.get_size_inches()[1]
    assert len(wide.axes) == len(narrow.axes)


def test_a_full_study_shows_what_budgets_buy(full: StudyAnalysis, tmp_path: Path):
    names = [f.name for f in study_figures(full)]
    assert "budgets" in names and "scatter-sgd-steps" in names and "scatter-sgd-samples" in names
    assert "comparison" not in names and "goals" not in names
    rows = figure_named(full, "budgets").rows
    assert {r["unit"] for r in rows} == {"steps", "samples"}
    for row in rows:
        entry = next(
            e
            for e in full.best_errors
            if (e.key.global_batch, e.key.repeat, e.unit, e.budget)
            == (row["global_batch"], row["repeat"], row["unit"], row["budget"])
        )
        assert row["best"] == entry.value
    text = write_study_report(full, tmp_path).read_text()
    assert "nothing is said about the best error" not in text


def test_a_study_that_stops_says_what_it_cannot(written: Path):
    assert "nothing is said about the best error a budget buys" in written.read_text()


def test_tables_hold_the_numbers(study: StudyAnalysis):
    steps = steps_table(study.main)
    assert len(steps.rows) == len(study.main.cells)
    assert all(len(row) == len(steps.head) for row in steps.rows)
    by_place = {(row[0], row[1]): row for row in steps.rows}
    found = next(c for c in study.main.confirmed if c.curve == "sgd")
    assert by_place[("sgd", "64")][6] == f"{round(found.steps or 0):,}"
    censored = by_place[("heavy", "1")]
    assert censored[2].startswith("> ") or "of 2" in censored[5]
    trade = fit_table(study.main)
    assert [row[0] for row in trade.rows] == ["heavy", "sgd"]
    assert "10 B_crit" in trade.note
    edges = edge_table(study.main)
    assert len(edges.rows) == 5 * (1 + 2)


def test_notes_name_what_must_not_be_used(study: StudyAnalysis):
    flagged = {
        **study.main.edges,
        ("sgd", 4): [
            Edge(parameter="lr", place=Place.BOUNDARY, side="upper", median=0.97, crossers=9)
        ],
        ("sgd", 1): [
            Edge(parameter="lr", place=Place.BOUNDARY, side="lower", median=0.02, crossers=9)
        ],
    }
    changed = replace(study, goals=(replace(study.main, edges=flagged), *study.goals[1:]))
    assert any("boundary of their range: sgd at 1, 4." in note for note in notes_of(changed))
    assert changed.exit_status == 3
    assert by_curve([("b", 2), ("a", 4), ("a", 1)]) == "a at 1, 4; b at 2"


def test_validation_noise_and_noise_scale_get_their_tables(study: StudyAnalysis):
    noise = CurveNoise(curve="sgd", common=0.123, between=0.04, samples=386, searches=10)
    more = replace(study, curve_noise=(noise,))
    assert validation_table(more).rows == [["sgd", "386", "0.12", "0.04", "10"]]
    scale = NoiseScale(value=30.0, interval=Interval(20.0, 44.0), bins=(), measurements=40)
    text = render_study(more, [], noise_scales={"sgd": scale})
    assert 'id="validation"' in text and 'id="noise-scale"' in text
    assert "within a decade" in text
    assert 'id="noise-scale"' not in render_study(study, [])


def test_workloads_are_laid_side_by_side(study: StudyAnalysis, tmp_path: Path):
    other = replace(study, name="other")
    page = write_comparison({"digits": study, "fashion": other}, tmp_path / "both")
    text = page.read_text()
    assert "digits: heavy" in text and "fashion: sgd" in text
    beside = (tmp_path / "both" / "figures" / "workloads.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(beside)))
    assert {r["curve"] for r in rows} == {
        f"{n}: {c}" for n in ("digits", "fashion") for c in ("heavy", "sgd")
    }
    with pytest.raises(UsageError, match="needs two"):
        write_comparison({"digits": study}, tmp_path)
    budget = replace(study.settings.budget, feasible=6)
    fewer = replace(study, settings=replace(study.settings, budget=budget))
    with pytest.raises(UsageError, match="digits: 12, fashion: 6"):
        write_comparison({"digits": study, "fashion": fewer}, tmp_path)


def test_a_study_without_any_result_still_has_its_page(tmp_path: Path):
    planted = Planted(
        truths={"sgd": Truth(s_min=10**5)},
        batches=(1, 4),
        repeats=1,
        budget=Budget(feasible=6, draws=20, steps=60),
    )
    found = analyse(planted.tables(), planted.settings, parameters=planted.parameters, resamples=0)
    text = write_study_report(found, tmp_path).read_text()
    assert "No search reached the goal within" in text


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(
    study: StudyAnalysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{package} is not installed"):
        write_study_report(study, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_small_texts():
    assert plain(65536.0) == "65,536" and plain(1e-6) == "1e-06"
    assert rows_as_csv([{"a": 1}, {"a": 2.5, "b": None}]) == "a,b\n1,\n2.5,\n"
