"""Figures of budgets: what more trials would give, and the error that steps or samples buy."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import INK
from shoal.report.study_curves import BATCH
from shoal.report.study_notes import by_curve
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
from shoal.study.analysis import StudyAnalysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def trials_figure(study: StudyAnalysis) -> StudyFigure:
    """S from fewer trials, and the expected best of n."""
    goal = study.main
    keys = {str(s.key): s.key for s in goal.summaries}
    rows: list[Row] = [
        {
            "kind": "first trials",
            "curve": keys[r.key].curve,
            "global_batch": keys[r.key].global_batch,
            "repeat": keys[r.key].repeat,
            "trials": r.trials,
            "steps": r.steps,
            "error_of_log": None,
            "is_bound": r.steps is None,
        }
        for r in study.sensitivity
    ]
    rows += [
        {
            "kind": "expected best",
            "curve": e.curve,
            "global_batch": e.global_batch,
            "repeat": None,
            "trials": e.trials,
            "steps": e.steps,
            "error_of_log": e.error,
            "is_bound": e.is_bound,
        }
        for e in goal.expected
    ]
    warned = by_curve(study.still_falls)
    return StudyFigure(
        name="trials",
        title="Would more trials help?",
        caption=(
            "S over the number of feasible trials, relative to all of them. Filled: S from the first n of each "
            "search (geometric mean over the repeats that reached the goal). Hollow: the expected best of n, "
            "from all trials. "
            + (
                f"S still fell by more than 10 % over the last half of the trials: {warned}."
                if warned
                else "Nowhere did S fall by more than 10 % over the last half of the trials."
            )
        ),
        draw=partial(_draw_trials, study),
        rows=rows,
    )


def _draw_trials(study: StudyAnalysis, width: float) -> Figure:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    goal = study.main
    figure, axes = panels(width, len(goal.curves), across=2, height=3.2)
    keys = {str(s.key): s.key for s in goal.summaries}
    most = study.settings.budget.feasible
    for one, curve in zip(axes, goal.curves, strict=True):
        batches = sorted({s.key.global_batch for s in goal.of(curve)})
        drawn: list[float] = [1.0]
        for place, batch in enumerate(batches):
            colour = colormaps["viridis"](0.9 * place / max(1, len(batches) - 1))
            steps: dict[int, list[float]] = {}
            for r in study.sensitivity:
                key = keys[r.key]
                if (key.curve, key.global_batch) == (curve, batch) and r.steps:
                    steps.setdefault(r.trials, []).append(math.log(r.steps))
            if most not in steps:
                continue
            last = float(np.mean(steps[most]))
            x = sorted(steps)
            y = [math.exp(float(np.mean(steps[n])) - last) for n in x]
            expected = [
                (e.trials, e.steps / math.exp(last))
                for e in goal.expected
                if (e.curve, e.global_batch) == (curve, batch)
            ]
            one.plot(
                x,
                y,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.1,
                label=f"batch {batch:,}",
            )
            one.plot(
                [n for n, _ in expected],
                [v for _, v in expected],
                color=colour,
                marker="o",
                markersize=5,
                markerfacecolor="white",
                linestyle=":",
                linewidth=0.9,
            )
            drawn += [*y, *(v for _, v in expected)]
        title(one, curve)
        one.set_xlim(0, most * 1.05)
        one.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        one.set_ylim(min(drawn) * 0.92, max(drawn) * 1.08)
        name_axes(one, "feasible trials", "S, relative to all trials")
    legend(figure, axes[0], columns=5)
    return figure


def budget_figure(study: StudyAnalysis) -> StudyFigure | None:
    """Best error against the batch under step and sample budgets; None unless the study was full."""
    if not study.best_errors:
        return None
    return StudyFigure(
        name="budgets",
        title="The best error a budget buys",
        caption=(
            f"Least {study.main.goal.metric} over all trials and all evaluations within the budget, geometric "
            "mean over repeats. Under a step budget larger batches should be no worse; under a sample budget "
            "smaller ones."
        ),
        draw=partial(_draw_budgets, study),
        rows=[
            {
                "curve": e.key.curve,
                "global_batch": e.key.global_batch,
                "repeat": e.key.repeat,
                "metric": e.metric,
                "unit": e.unit,
                "budget": e.budget,
                "best": e.value,
            }
            for e in study.best_errors
        ],
    )


def _draw_budgets(study: StudyAnalysis, width: float) -> Figure:
    curves = study.main.curves
    figure, axes = panels(width, 2 * len(curves), across=2, height=3.2)
    spots = [(curve, unit) for curve in curves for unit in ("steps", "samples")]
    for one, (curve, unit) in zip(axes, spots, strict=True):
        here = [e for e in study.best_errors if e.key.curve == curve and e.unit == unit]
        budgets = sorted({e.budget for e in here})
        styles = looks([str(b) for b in budgets])
        batches: list[float] = []
        for budget in budgets:
            means: dict[int, list[float]] = {}
            for e in here:
                if e.budget == budget and e.value is not None and e.value > 0:
                    means.setdefault(e.key.global_batch, []).append(math.log(e.value))
            x = sorted(means)
            one.plot(
                x,
                [math.exp(float(np.mean(means[b]))) for b in x],
                color=styles[str(budget)].colour,
                marker=styles[str(budget)].marker,
                markersize=5,
                linewidth=1.1,
                label=f"{budget:,} {unit}",
            )
            batches += [float(b) for b in x]
        title(one, f"{curve}, {unit}")
        if batches:
            power_axis(one, "x", batches)
            one.legend(frameon=False, fontsize=8, labelcolor=INK)
        name_axes(one, BATCH, study.main.goal.metric)
    return figure
