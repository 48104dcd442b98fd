"""Steps against batch, one figure per curve; and how measured points are drawn on any axes."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import INK, MUTED
from shoal.report.study_style import (
    Look,
    Row,
    StudyFigure,
    legend,
    looks,
    name_axes,
    panels,
    power_axis,
)
from shoal.study.analysis import GoalAnalysis, StudyAnalysis

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
        level = perfect_level(goal, curve)
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
        # A goal met at step 0 has no place on this axis.
        drawn = [value for value in values if value > 0]
        if level is not None and drawn:
            # Far right the dashed line would squeeze the measurements.
            axes.set_ylim(min(drawn) / 1.6, max(drawn) * 1.3)
    else:
        say(axes, "no search has a result yet")
    name_axes(axes, BATCH, STEPS)
    legend(figure, axes)
    return figure


def perfect_level(goal: GoalAnalysis, curve: str) -> float | None:
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
    # One curve may stand in a figure several times, and ids are those of the whole page.
    gid = re.sub(
        r"[^A-Za-z0-9_.-]+", "-", f"{curve} {label}" if label not in (None, curve) else curve
    )
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
            _draw_censored(axes, batch, end / scale, look, gid=gid, named=label is None)
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
            gid=f"points-{gid}",
        )
    if label is None:
        _draw_confirmed(axes, goal, curve, scale, batches, values)
    return batches, values


def _draw_censored(
    axes: Axes, batch: float, value: float, look: Look, *, gid: str, named: bool
) -> None:
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
        gid=f"censored-{gid}-{batch:g}-{value:.6g}",
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
