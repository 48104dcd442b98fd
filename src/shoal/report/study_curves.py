"""Figures of steps against batch: one per curve, by goal, side by side, normalised, and against samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import FAINT, INK, MUTED
from shoal.report.study_style import (
    Look,
    Row,
    StudyFigure,
    legend,
    looks,
    name_axes,
    panels,
    power_axis,
    title,
)
from shoal.study.analysis import GoalAnalysis, StudyAnalysis
from shoal.study.finding import number
from shoal.study.fit import TradeoffFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS, BATCH = "steps to the goal, S", "batch (samples)"


def steps_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """S against the batch, a figure per curve, for the first goal."""
    found: list[StudyFigure] = []
    styles = looks(study.main.curves)
    for curve in study.main.curves:
        goal = study.main
        found.append(
            StudyFigure(
                name=f"steps-{curve}",
                title=f"Steps to the goal: {curve}",
                caption=(
                    f"Fewest steps at which a feasible trial is better than {goal.goal.value:g} in "
                    f"{goal.goal.metric}. Small marks: single searches; large: their geometric mean (the "
                    "median where a search is censored) with its 95 % interval, or smallest to largest where "
                    "there is none. Hollow with an arrow: not reached, S is larger. Plus: S_conf, the "
                    "winning setting with fresh seeds. Dashed: perfect scaling"
                    f"{_anchor(goal, curve)}. Line: the fitted trade-off. Shaded: diminishing returns."
                ),
                draw=partial(_draw_steps, goal, curve, styles[curve]),
                rows=_steps_rows(goal, curve),
            )
        )
    return found


def _anchor(goal: GoalAnalysis, curve: str) -> str:
    fit = goal.fits[curve]
    return (
        " from the fitted E_min"
        if fit is not None and fit.is_usable
        else " from the smallest batch"
    )


def _steps_rows(goal: GoalAnalysis, curve: str) -> list[Row]:
    confirmed = {(c.curve, c.global_batch): c.steps for c in goal.confirmed if c.curve == curve}
    fit = goal.fits[curve]
    rows: list[Row] = []
    for summary in goal.of(curve):
        rows.append(
            {
                "curve": curve,
                "global_batch": summary.key.global_batch,
                "repeat": summary.key.repeat,
                "reach": str(summary.result.reach),
                "steps": summary.steps,
                "previous": summary.previous if summary.steps is not None else None,
                "censored_at": summary.censored_at if summary.is_censored else None,
                "steps_confirmed": confirmed.get((curve, summary.key.global_batch)),
                "fitted": fit.steps(summary.key.global_batch) if fit is not None else None,
            }
        )
    return rows


def _draw_steps(goal: GoalAnalysis, curve: str, look: Look, width: float) -> Figure:
    figure, (axes,) = panels(width, 1, height=4.2 if width > 6 else 3.6)
    batches, values = draw_points(axes, goal, curve, look, label=None, singles=True)
    fit, borders = goal.fits[curve], goal.regimes[curve]
    if batches:
        span = np.geomspace(min(batches), max(batches), 100)
        level = _perfect_level(goal, curve)
        if level is not None:
            axes.plot(
                span,
                level / span,
                color=MUTED,
                linewidth=1.0,
                linestyle="--",
                label="perfect scaling",
            )
        if fit is not None:
            axes.plot(
                span,
                [fit.steps(b) for b in span],
                color=look.colour,
                linewidth=1.3,
                alpha=0.8 if fit.is_usable else 0.35,
                label="fit" if fit.is_usable else "fit (not usable)",
            )
        if borders.perfect_to is not None and borders.nothing_beyond is not None:
            end = min(borders.nothing_beyond.value, max(batches))
            begin = max(borders.perfect_to.value, min(batches))
            if end > begin:
                axes.axvspan(begin, end, color=INK, alpha=0.05, linewidth=0)
        power_axis(axes, "x", batches)
        power_axis(axes, "y", values)
        if level is not None:
            # Far right the dashed line would squeeze the measurements.
            axes.set_ylim(min(values) / 1.6, max(values) * 1.3)
    else:
        say(axes, "no search has a result yet")
    name_axes(axes, BATCH, STEPS)
    legend(figure, axes)
    return figure


def _perfect_level(goal: GoalAnalysis, curve: str) -> float | None:
    """B S under perfect scaling: the fitted E_min, else that of the smallest batch."""
    fit = goal.fits[curve]
    if fit is not None and fit.is_usable:
        return fit.e_min.value
    for cell in goal.cells_of(curve):
        if cell.centre is not None:
            return cell.centre * cell.global_batch
    return None


def draw_points(
    axes: Axes,
    goal: GoalAnalysis,
    curve: str,
    look: Look,
    *,
    label: str | None,
    singles: bool,
    scale: float = 1.0,
) -> tuple[list[float], list[float]]:
    """The measured S of one curve, censored searches as such.

    Args:
        axes: drawn into.
        goal: whose results.
        curve: which.
        look: its colour and marker.
        label: for the legend; the kinds of marks are named instead where None.
        singles: also draw every search.
        scale: S is divided by it.

    Returns:
        Batches and values that were drawn.
    """
    batches: list[float] = []
    values: list[float] = []
    line: list[tuple[float, float]] = []
    for cell in goal.cells_of(curve):
        batch = float(cell.global_batch)
        if singles and cell.steps:
            axes.plot(
                [batch] * len(cell.steps),
                [s / scale for s in cell.steps],
                marker=look.marker,
                linestyle="",
                markersize=3.2,
                color=look.colour,
                alpha=0.45,
                label="one search" if label is None else None,
            )
            values += [s / scale for s in cell.steps]
            batches.append(batch)
        for end in sorted(set(cell.censored_at)):
            _draw_censored(axes, batch, end / scale, look, named=label is None)
            batches.append(batch)
            values += [end / scale, 1.4 * end / scale]  # room for the arrow
        if cell.centre is not None:
            low, high = cell.interval or (cell.lowest or cell.centre, cell.highest or cell.centre)
            high = high if math.isfinite(high) else cell.centre
            line.append((batch, cell.centre / scale))
            axes.plot(
                [batch, batch],
                [low / scale, high / scale],
                color=look.colour,
                linewidth=1.2,
                zorder=3,
            )
            batches.append(batch)
            values += [cell.centre / scale, low / scale, high / scale]
    if line:
        axes.plot(
            [b for b, _ in line],
            [v for _, v in line],
            marker=look.marker,
            markersize=7,
            linestyle="-" if label is not None else "",
            linewidth=1.2,
            color=look.colour,
            markeredgecolor="white",
            markeredgewidth=0.7,
            label=label or "S, mean of the repeats",
            zorder=4,
            gid=f"points-{curve}",
        )
    if label is None:
        _draw_confirmed(axes, goal, curve, scale, batches, values)
    return batches, values


def _draw_censored(axes: Axes, batch: float, value: float, look: Look, *, named: bool) -> None:
    axes.annotate(
        "",
        (batch, value),
        xytext=(0, 18),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": look.colour, "linewidth": 1.0},
    )
    axes.plot(
        [batch],
        [value],
        marker=look.marker,
        markersize=6.5,
        linestyle="",
        markerfacecolor="white",
        markeredgecolor=look.colour,
        label="not reached: S is larger" if named else None,
        zorder=4,
        gid=f"censored-{batch:g}",
    )


def _draw_confirmed(
    axes: Axes,
    goal: GoalAnalysis,
    curve: str,
    scale: float,
    batches: list[float],
    values: list[float],
) -> None:
    rows = [c for c in goal.confirmed if c.curve == curve and c.steps is not None]
    if not rows:
        return
    axes.plot(
        [c.global_batch for c in rows],
        [(c.steps or 0) / scale for c in rows],
        marker="P",
        markersize=7,
        linestyle="",
        color="#c8281e",
        markeredgecolor="white",
        label="S_conf, fresh seeds",
        zorder=5,
    )
    batches += [float(c.global_batch) for c in rows]
    values += [(c.steps or 1) / scale for c in rows]


def say(axes: Axes, text: str) -> None:
    """A line in the middle of a panel that has nothing to show."""
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=9
    )


def goals_figure(study: StudyAnalysis) -> StudyFigure | None:
    """S for every goal, a panel per curve; None with one goal."""
    if len(study.goals) < 2:
        return None
    rows: list[Row] = [
        {
            "curve": cell.curve,
            "goal": goal.goal.value,
            "global_batch": cell.global_batch,
            "steps": cell.centre,
            "censored": len(cell.censored_at),
        }
        for goal in study.goals
        for cell in goal.cells
    ]
    return StudyFigure(
        name="goals",
        title="Other goals",
        caption=(
            "S for each goal, from the same trials. If only the level changes and not the shape, borders do "
            "not hang on the goal."
        ),
        draw=partial(_draw_goals, study),
        rows=rows,
    )


def _draw_goals(study: StudyAnalysis, width: float) -> Figure:
    curves = study.main.curves
    figure, axes = panels(width, len(curves), across=2, height=3.4)
    styles = looks([str(goal.goal.value) for goal in study.goals])
    for one, curve in zip(axes, curves, strict=True):
        batches: list[float] = []
        values: list[float] = []
        for goal in study.goals:
            b, v = draw_points(
                one,
                goal,
                curve,
                styles[str(goal.goal.value)],
                label=f"goal {goal.goal.value:g}",
                singles=False,
            )
            batches, values = batches + b, values + v
        title(one, curve)
        if batches:
            power_axis(one, "x", batches)
            power_axis(one, "y", values)
        name_axes(one, BATCH, STEPS)
    legend(figure, axes[0])
    return figure


def overlay_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """All curves on one pair of axes: as they are, and normalised; none with one curve."""
    if len(study.main.curves) < 2:
        return []
    return [optimizers_figure(study.main), comparison_figure({"": study.main}, name="comparison")]


def optimizers_figure(goal: GoalAnalysis) -> StudyFigure:
    """S of every curve of one goal, not normalised."""
    return StudyFigure(
        name="optimizers",
        title="Side by side",
        caption=(
            "S of each curve as measured. Momentum and plain SGD are expected to agree at small batches; a "
            "difference counts where the table below says so."
        ),
        draw=partial(_draw_optimizers, goal),
        rows=[
            {
                "curve": cell.curve,
                "global_batch": cell.global_batch,
                "steps": cell.centre,
                "low": cell.interval.low if cell.interval else cell.lowest,
                "high": cell.interval.high if cell.interval else cell.highest,
                "censored": len(cell.censored_at),
            }
            for cell in goal.cells
        ],
    )


def _draw_optimizers(goal: GoalAnalysis, width: float) -> Figure:
    figure, (axes,) = panels(width, 1, height=4.2 if width > 6 else 3.6)
    styles = looks(goal.curves)
    batches: list[float] = []
    values: list[float] = []
    for curve in goal.curves:
        b, v = draw_points(axes, goal, curve, styles[curve], label=curve, singles=False)
        batches, values = batches + b, values + v
    if batches:
        power_axis(axes, "x", batches)
        power_axis(axes, "y", values)
    name_axes(axes, BATCH, STEPS)
    legend(figure, axes)
    return figure


def comparison_figure(goals: Mapping[str, GoalAnalysis], *, name: str) -> StudyFigure:
    """Curves of one or several studies, each divided by its least samples.

    Args:
        goals: one goal of each study, by the study's name; "" for a study alone.
        name: of the figure.
    """
    entries = [
        (f"{study}: {curve}" if study else curve, goal, curve)
        for study, goal in goals.items()
        for curve in goal.curves
        if _perfect_level(goal, curve) is not None
    ]
    rows: list[Row] = []
    for label, goal, curve in entries:
        level = _perfect_level(goal, curve) or math.nan
        for cell in goal.cells_of(curve):
            rows.append(
                {
                    "curve": label,
                    "global_batch": cell.global_batch,
                    "normalised_by": _norm_words(goal.fits[curve]),
                    "divisor": level,
                    "steps_normalised": cell.centre / level if cell.centre is not None else None,
                    "censored": len(cell.censored_at),
                }
            )
    return StudyFigure(
        name=name,
        title="Normalised",
        caption=(
            "S divided by the least samples of its curve (the fitted E_min, or B S at the smallest batch where "
            "no fit is usable; the table says which). On the dashed line B S is that least: perfect scaling. "
            "Steps are not time, and workloads differ in what a step costs."
        ),
        draw=partial(_draw_comparison, entries),
        rows=rows,
    )


def _norm_words(fit: TradeoffFit | None) -> str:
    return "fitted E_min" if fit is not None and fit.is_usable else "B S at the smallest batch"


def _draw_comparison(entries: Sequence[tuple[str, GoalAnalysis, str]], width: float) -> Figure:
    figure, (axes,) = panels(width, 1, height=4.2 if width > 6 else 3.6)
    styles = looks([label for label, _, _ in entries])
    batches: list[float] = []
    values: list[float] = []
    for label, goal, curve in entries:
        level = _perfect_level(goal, curve) or math.nan
        b, v = draw_points(
            axes, goal, curve, styles[label], label=label, singles=False, scale=level
        )
        batches, values = batches + b, values + v
    if batches:
        span = np.geomspace(min(batches), max(batches), 50)
        axes.plot(
            span, 1 / span, color=MUTED, linewidth=1.0, linestyle="--", label="perfect scaling"
        )
        power_axis(axes, "x", batches)
        power_axis(axes, "y", values)
    name_axes(axes, BATCH, "S over the least samples")
    legend(figure, axes, columns=3)
    return figure


def samples_figure(study: StudyAnalysis) -> StudyFigure:
    """Samples against steps, with each curve's fitted hyperbola and its borders marked."""
    goal = study.main
    rows: list[Row] = [
        {
            "curve": s.key.curve,
            "global_batch": s.key.global_batch,
            "repeat": s.key.repeat,
            "steps": s.steps,
            "samples": s.steps * s.key.global_batch,
        }
        for s in goal.summaries
        if s.steps is not None
    ]
    borders = "; ".join(
        f"{curve}: B_crit {number(fit.b_crit.value)}"
        for curve, fit in goal.fits.items()
        if fit is not None and fit.is_usable
    )
    return StudyFigure(
        name="samples",
        title="What a step costs in samples",
        caption=(
            "Samples to the goal, B S, against steps. Lines: (S/S_min - 1)(E/E_min - 1) = 1 as fitted. "
            "Bottom right: fewest samples; top left: fewest steps."
            + (f" {borders}." if borders else "")
        ),
        draw=partial(_draw_samples, goal),
        rows=rows,
    )


def _draw_samples(goal: GoalAnalysis, width: float) -> Figure:
    figure, (axes,) = panels(width, 1, height=4.0 if width > 6 else 3.4)
    styles = looks(goal.curves)
    steps: list[float] = []
    samples: list[float] = []
    for curve in goal.curves:
        reached = [s for s in goal.of(curve) if s.steps is not None]
        x = [float(s.steps or 1) for s in reached]
        y = [float((s.steps or 1) * s.key.global_batch) for s in reached]
        axes.plot(
            x,
            y,
            linestyle="",
            marker=styles[curve].marker,
            markersize=5,
            color=styles[curve].colour,
            label=curve,
        )
        steps, samples = steps + x, samples + y
        fit = goal.fits[curve]
        if fit is not None and reached:
            span = np.geomspace(fit.batches[0], fit.batches[-1], 100)
            along = np.array([fit.steps(b) for b in span])
            axes.plot(along, along * span, color=styles[curve].colour, linewidth=1.2, alpha=0.8)
    if steps:
        power_axis(axes, "x", steps)
        power_axis(axes, "y", samples)
    else:
        say(axes, "no search reached the goal")
        axes.spines["bottom"].set(color=FAINT)
    name_axes(axes, STEPS, "samples to the goal, B S")
    legend(figure, axes)
    return figure
