"""Several curves on one pair of axes: by goal, side by side, normalised, and in samples against steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import FAINT, MUTED
from shoal.report.study_curves import BATCH, STEPS, draw_points, perfect_level, say
from shoal.report.study_style import (
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
    from matplotlib.figure import Figure


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
        if perfect_level(goal, curve) is not None
    ]
    rows: list[Row] = []
    for label, goal, curve in entries:
        level = perfect_level(goal, curve) or math.nan
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
        level = perfect_level(goal, curve) or math.nan
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
