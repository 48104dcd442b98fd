"""The page of a study: what to do, how sure that is, every figure, every table, in one file."""

from __future__ import annotations

import base64
import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.report.page import NARROW, WIDE, svg
from shoal.report.study_budgets import budget_figure, trials_figure
from shoal.report.study_curves import steps_figures
from shoal.report.study_notes import expectation_notes, notes_of, plan_rows
from shoal.report.study_overlays import (
    comparison_figure,
    goals_figure,
    overlay_figures,
    samples_figure,
)
from shoal.report.study_settings import optima_figures, scatter_figures, space_figures
from shoal.report.study_style import Row, StudyFigure
from shoal.report.study_text import (
    Table,
    comparison_table,
    edge_table,
    fit_table,
    noise_scale_table,
    steps_table,
    validation_table,
)
from shoal.report.templates import environment, require_packages
from shoal.study.analysis import GoalAnalysis, StudyAnalysis
from shoal.study.curve_table import as_csv, cell
from shoal.study.noise_scale import NoiseScale


def study_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """Every figure of a study, in the order of its page."""
    maybe = [
        *steps_figures(study),
        *overlay_figures(study),
        goals_figure(study),
        samples_figure(study),
        *optima_figures(study),
        budget_figure(study),
        trials_figure(study),
        *scatter_figures(study),
        *space_figures(study),
    ]
    return [figure for figure in maybe if figure is not None]


def write_study_report(
    study: StudyAnalysis,
    out_dir: str | os.PathLike[str],
    *,
    noise_scales: Mapping[str, NoiseScale] | None = None,
) -> Path:
    """Write ``report.html``, and under ``figures/`` each figure as SVG with its table as CSV beside it.

    Args:
        study: what :func:`shoal.study.analysis.analyse` returned.
        out_dir: made if it is not there; files of the same names are replaced, each at once.
        noise_scales: by curve, where a replay measured them.

    Returns:
        The page. It needs no other file.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
        OSError: it cannot be written.
    """
    directory = Path(out_dir)
    figures = [drawn(figure) for figure in study_figures(study)]
    page = render_study(study, figures, noise_scales=noise_scales)
    write_figures(figures, directory / "figures")
    for goal in study.goals:
        name = "searches.csv" if goal is study.main else f"searches-{goal.goal.value:g}.csv"
        write_whole(directory / "figures" / name, as_csv(goal.rows))
    return write_whole(directory / "report.html", page)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure drawn for wide and for narrow screens, as SVG, with its table as CSV."""

    name: str
    title: str
    caption: str
    wide: str
    narrow: str
    table: str

    @property
    def csv(self) -> str:
        """The table as an address that holds it."""
        return data_uri(self.table)


def drawn(figure: StudyFigure) -> Drawn:
    """Draw a figure once for everything it is needed for."""
    require_packages()
    return Drawn(
        name=figure.name,
        title=figure.title,
        caption=figure.caption,
        wide=svg(figure.draw(WIDE), f"{figure.name}-wide", [], figure.title),
        narrow=svg(figure.draw(NARROW), f"{figure.name}-narrow", [], figure.title),
        table=rows_as_csv(figure.rows),
    )


def write_figures(figures: Sequence[Drawn], directory: Path) -> None:
    """Each figure as SVG, and its table as CSV beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        head = '<svg xmlns="http://www.w3.org/2000/svg"'
        stands_alone = 'xmlns="http' in figure.wide[:400]
        text = figure.wide if stands_alone else figure.wide.replace("<svg", head, 1)
        write_whole(directory / f"{figure.name}.svg", text)
        write_whole(directory / f"{figure.name}.csv", figure.table)


def write_whole(path: Path, text: str) -> Path:
    """A file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render_study(
    study: StudyAnalysis,
    figures: Sequence[Drawn] | None = None,
    *,
    noise_scales: Mapping[str, NoiseScale] | None = None,
) -> str:
    """The whole page as text.

    Args:
        study: the analysis.
        figures: those of :func:`study_figures`, drawn, by default.
        noise_scales: as :func:`write_study_report`.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    chosen = [drawn(f) for f in study_figures(study)] if figures is None else figures
    goal = study.main
    lead, rest = _lead(goal)
    return render_page(
        name=study.name or "study",
        lead=lead,
        rest=rest,
        findings=[
            {"curve": curve, "lead": words[0], "rest": words[1]}
            for curve, words in goal.findings.items()
        ]
        if len(goal.findings) > 1
        else [],
        notes=notes_of(study),
        figures=chosen,
        tables=[
            steps_table(goal),
            fit_table(goal),
            *([comparison_table(goal)] if goal.comparisons else []),
            edge_table(goal),
            *([validation_table(study)] if study.curve_noise else []),
            *([noise_scale_table(goal, noise_scales)] if noise_scales else []),
        ],
        downloads=[("searches.csv", as_csv(goal.rows), "every search and its winner")],
        design=plan_rows(study),
        expectations=expectation_notes(study),
    )


def _lead(goal: GoalAnalysis) -> tuple[str, str]:
    """The first sentence: of the curve whose fewest steps are fewest, by name where there are several."""
    least = {
        curve: min(
            (c.centre for c in goal.cells_of(curve) if c.centre is not None), default=float("inf")
        )
        for curve in goal.findings
    }
    best = min(least, key=lambda curve: least[curve])
    lead, rest = goal.findings[best]
    if len(goal.findings) == 1:
        return lead, rest
    return f"{best}: {lead[0].lower()}{lead[1:]}", rest


def write_comparison(studies: Mapping[str, StudyAnalysis], out_dir: str | os.PathLike[str]) -> Path:
    """One page that lays workloads side by side, each normalised by its own least samples.

    Args:
        studies: by name, at least two; their first goals are compared.
        out_dir: ``report.html`` and ``figures/`` are written there.

    Returns:
        The page.

    Raises:
        UsageError: fewer than two studies, unequal numbers of feasible trials, or a missing package.
    """
    if len(studies) < 2:
        raise UsageError(f"studies = {len(studies)}; a comparison needs two; give more directories")
    trials = {name: study.settings.budget.feasible for name, study in studies.items()}
    if len(set(trials.values())) > 1:
        some = ", ".join(f"{name}: {count}" for name, count in trials.items())
        raise UsageError(
            f"trials = {some}; S is the best of that many, so only equal numbers compare; re-analyse the "
            "larger studies with the smallest number"
        )
    goals = {name: study.main for name, study in studies.items()}
    figure = drawn(comparison_figure(goals, name="workloads"))
    directory = Path(out_dir)
    page = render_page(
        name="comparison of workloads",
        lead=f"{len(studies)} workloads side by side.",
        rest="Where the borders lie is a property of each workload and its goal.",
        findings=[
            {"curve": f"{name}: {curve}", "lead": words[0], "rest": words[1]}
            for name, goal in goals.items()
            for curve, words in goal.findings.items()
        ],
        notes=[],
        figures=[figure],
        tables=[_named(fit_table(goal), name) for name, goal in goals.items()],
        downloads=[],
        design=[],
        expectations=["Steps are not time: workloads differ in what a step costs."],
    )
    write_figures([figure], directory / "figures")
    return write_whole(directory / "report.html", page)


def _named(table: Table, name: str) -> Table:
    return Table(
        id=f"{table.id}-{name}",
        title=f"{table.title}: {name}",
        head=table.head,
        rows=table.rows,
        note=table.note,
    )


def render_page(
    *,
    name: str,
    lead: str,
    rest: str,
    findings: Sequence[Mapping[str, str]],
    notes: Sequence[str],
    figures: Sequence[Drawn],
    tables: Sequence[Table],
    downloads: Sequence[tuple[str, str, str]],
    design: Sequence[tuple[str, str]],
    expectations: Sequence[str],
) -> str:
    """The page's template filled in; figures twice, for wide and for narrow screens."""
    return (
        environment()
        .get_template("study.html.j2")
        .render(
            name=name,
            lead=lead,
            rest=rest,
            findings=findings,
            notes=notes,
            figures=figures,
            tables=tables,
            downloads=[
                {"file": file, "href": data_uri(text), "words": words}
                for file, text, words in downloads
            ],
            design=design,
            expectations=expectations,
            version=_version(),
            written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        )
    )


def rows_as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV text; columns in the order in which they appear first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([cell(row.get(name)) for name in names])
    return buffer.getvalue()


def data_uri(text: str) -> str:
    """A CSV text as an address that holds it."""
    return "data:text/csv;base64," + base64.b64encode(text.encode()).decode()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:
        return ""
