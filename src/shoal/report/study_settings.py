"""Figures of settings: optima over the batch, where trials ended, whether ranges were wide enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import FAINT, INK, MUTED
from shoal.report.study_curves import BATCH, say
from shoal.report.study_style import (
    BEST,
    DIVERGED,
    MISSED,
    REACHED,
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
from shoal.study.budgets import ScatterPoint, scatter, share_within, usual_budgets
from shoal.study.edges import INNER, Place
from shoal.study.optima import effective_lr, learning_rate, momentum_of, monotone, rules
from shoal.study.records import Outcome
from shoal.study.search_summary import SearchSummary, cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def optima_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """Best effective learning rate, learning rate and momentum against the batch, a figure per curve."""
    goal = study.main
    found: list[StudyFigure] = []
    for curve in goal.curves:
        points = [o for o in goal.optima if o.curve == curve]
        if not points:
            continue
        rows: list[Row] = [
            {
                "curve": curve,
                "global_batch": s.key.global_batch,
                "repeat": s.key.repeat,
                "lr": learning_rate(s.winner.trial.parameters),
                "momentum": momentum_of(s.winner.trial.parameters),
                "effective_lr": effective_lr(s.winner.trial.parameters),
                "effective_lr_best_five": next(
                    o.effective_lr for o in points if o.global_batch == s.key.global_batch
                ),
            }
            for s in goal.of(curve)
            if s.winner is not None
        ]
        found.append(
            StudyFigure(
                name=f"optima-{curve}",
                title=f"Best settings: {curve}",
                caption=(
                    "Hollow: the winner of each search; filled: the five best trials over all repeats. Line: "
                    "the nearest curve that never falls, to interpolate with. Dashed: the linear rule from the "
                    f"smallest batch; dash-dot: the square root rule. {_exponent_words(goal, curve)}"
                ),
                draw=partial(_draw_optima, goal, curve),
                rows=rows,
            )
        )
    return found


def _exponent_words(goal: GoalAnalysis, curve: str) -> str:
    parts: list[str] = []
    for name, where in (("over all batches", goal.exponents), ("up to B_crit", goal.rising)):
        for exponent in where.get(curve, ()):
            if exponent.parameter != "effective_lr":
                continue
            between = (
                f" ({exponent.interval.low:.2f} to {exponent.interval.high:.2f})"
                if exponent.interval
                else ""
            )
            parts.append(f"{exponent.value:.2f}{between} {name}")
    return f"Fitted exponent of the effective learning rate: {'; '.join(parts)}." if parts else ""


def _draw_optima(goal: GoalAnalysis, curve: str, width: float) -> Figure:
    winners = [s for s in goal.of(curve) if s.winner is not None]
    has_momentum = any(
        momentum_of(s.winner.trial.parameters) > 0 for s in winners if s.winner is not None
    )
    figure, axes = panels(width, 3 if has_momentum else 1, across=3, height=3.4)
    look = looks(goal.curves)[curve]
    points = [o for o in goal.optima if o.curve == curve]
    batches = [float(o.global_batch) for o in points]
    quantities: list[tuple[str, Callable[[SearchSummary], float], list[float]]] = [
        ("effective learning rate", _of_winner(effective_lr), [o.effective_lr for o in points])
    ]
    if has_momentum:
        quantities.append(("learning rate", _of_winner(learning_rate), [o.lr for o in points]))
        quantities.append(
            (
                "1 - momentum",
                _of_winner(lambda p: 1 - momentum_of(p)),
                [1 - o.momentum for o in points],
            )
        )
    for one, (name, of, best) in zip(axes, quantities, strict=True):
        x = [float(s.key.global_batch) for s in winners]
        y = [of(s) for s in winners]
        one.plot(
            x,
            y,
            linestyle="",
            marker=look.marker,
            markersize=3.5,
            alpha=0.5,
            color=look.colour,
            label="winner of a search",
        )
        one.plot(
            batches,
            best,
            linestyle="",
            marker=look.marker,
            markersize=7,
            markeredgecolor="white",
            color=look.colour,
            label="five best trials",
        )
        if name == "effective learning rate":
            _draw_rules(one, goal, curve)
        title(one, name)
        power_axis(one, "x", batches)
        power_axis(one, "y", [*y, *best], base=10)
        name_axes(one, BATCH, "")
    legend(figure, axes[0], columns=5)
    return figure


def _of_winner(of: Callable[..., float]) -> Callable[[SearchSummary], float]:
    def value(search: SearchSummary) -> float:
        assert search.winner is not None
        return of(search.winner.trial.parameters)

    return value


def _draw_rules(axes: Axes, goal: GoalAnalysis, curve: str) -> None:
    points = sorted((o for o in goal.optima if o.curve == curve), key=lambda o: o.global_batch)
    batches = [o.global_batch for o in points]
    lines = rules(points[0], batches)
    axes.plot(
        batches, lines["linear"], color=MUTED, linewidth=1.0, linestyle="--", label="linear rule"
    )
    axes.plot(
        batches,
        lines["square_root"],
        color=MUTED,
        linewidth=1.0,
        linestyle="-.",
        label="square root rule",
    )
    rising = monotone(points)
    span = np.geomspace(batches[0], batches[-1], 60)
    axes.plot(span, [rising.at(b) for b in span], color=INK, linewidth=1.2, label="never falling")


def scatter_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """Every trial's setting and how it ended, per curve; per budget too where the study was full."""
    goal = study.main
    found: list[StudyFigure] = []
    for curve in goal.curves:
        searches = goal.of(curve)
        points = [p for s in searches for p in scatter(s)]
        found.append(_scatter_figure(curve, points, "", "by the end of each search"))
        if study.settings.grid is not None and not study.settings.budget.full:
            continue
        for unit, budgets in usual_budgets(searches).items():
            if len(budgets) > 2:
                budget = budgets[1]
                under = [p for s in searches for p in scatter(s, budget=budget, unit=unit)]
                words = f"within {budget:,} {unit}"
                found.append(_scatter_figure(curve, under, f"-{unit}", words))
    return found


def _scatter_figure(
    curve: str,
    points: Sequence[ScatterPoint],
    suffix: str,
    words: str,
) -> StudyFigure:
    return StudyFigure(
        name=f"scatter-{curve}{suffix}",
        title=f"Where trials ended {words}: {curve}",
        caption=(
            "Each drawn trial. Circle: it reached the goal; triangle: it did not; cross: it diverged. Star: "
            "the winner of a search. Faint lines join equal effective learning rates, lr/(1 - momentum). "
            "The share that reached the goal stands above each panel."
        ),
        draw=partial(_draw_scatter, points),
        rows=[
            {
                "curve": curve,
                "global_batch": p.key.global_batch,
                "repeat": p.key.repeat,
                "trial": p.trial,
                "lr": p.lr,
                "momentum": 1 - p.one_minus_momentum,
                "effective_lr": p.effective_lr,
                "outcome": str(p.outcome),
                "steps": p.steps,
                "is_winner": p.is_best,
            }
            for p in points
        ],
    )


def _draw_scatter(points: Sequence[ScatterPoint], width: float) -> Figure:
    batches = sorted({p.key.global_batch for p in points})
    flat = not any(p.one_minus_momentum < 1 for p in points)
    figure, axes = panels(width, len(batches), across=4, height=2.5)
    lrs = [p.lr for p in points]
    rests = [p.one_minus_momentum for p in points]
    for one, batch in zip(axes, batches, strict=True):
        here = [p for p in points if p.key.global_batch == batch]
        if not flat:
            _draw_contours(one, lrs, rests)
        _draw_outcomes(one, here, flat=flat)
        title(one, f"{batch:,}: {share_within(here):.0%} reached")
        power_axis(one, "x", lrs, base=10, ticks=4)
        if flat:
            one.set_yticks(sorted({p.key.repeat for p in points}))
            name_axes(one, "learning rate", "repeat")
            one.set_ylim(-0.6, max(p.key.repeat for p in points) + 0.6)
        else:
            power_axis(one, "y", rests, base=10)
            name_axes(one, "learning rate", "1 - momentum")
    legend(figure, axes[0])
    return figure


def _draw_contours(axes: Axes, lrs: Sequence[float], rests: Sequence[float]) -> None:
    """Ten lines of equal lr / (1 - momentum)."""
    low, high = min(lrs) / max(rests), max(lrs) / min(rests)
    x = np.array([min(lrs), max(lrs)])
    for level in np.geomspace(low, high, 12)[1:-1]:
        axes.plot(x, x / level, color=FAINT, linewidth=0.6, zorder=1)


def _draw_outcomes(axes: Axes, points: Sequence[ScatterPoint], *, flat: bool) -> None:
    looks_of = (
        (Outcome.DIVERGED, "x", DIVERGED, "diverged", 3.5),
        (Outcome.NOT_REACHED, "^", MISSED, "not reached", 3.5),
        (Outcome.REACHED, "o", REACHED, "reached", 3.5),
    )

    def place(p: ScatterPoint) -> float:
        return float(p.key.repeat) if flat else p.one_minus_momentum

    for outcome, marker, colour, label, size in looks_of:
        chosen = [p for p in points if p.outcome is outcome]
        axes.plot(
            [p.lr for p in chosen],
            [place(p) for p in chosen],
            linestyle="",
            marker=marker,
            markersize=size,
            color=colour,
            alpha=0.75,
            markeredgewidth=0.8,
            label=label,
        )
    best = [p for p in points if p.is_best]
    axes.plot(
        [p.lr for p in best],
        [place(p) for p in best],
        linestyle="",
        marker="*",
        markersize=12,
        color=BEST,
        markeredgecolor=INK,
        markeredgewidth=0.7,
        label="winner",
        zorder=5,
    )


def space_figures(study: StudyAnalysis) -> list[StudyFigure]:
    """Whether ranges were wide enough: steps of every crossing trial over each searched coordinate."""
    goal = study.main
    found: list[StudyFigure] = []
    for curve, names in study.parameters.items():
        searches = goal.of(curve)
        for axis, name in enumerate(names):
            if not any(len(t.trial.unit) > axis for s in searches for t in s.trials):
                continue
            rows: list[Row] = [
                {
                    "curve": curve,
                    "parameter": name,
                    "global_batch": s.key.global_batch,
                    "repeat": s.key.repeat,
                    "trial": t.trial.id,
                    "unit": t.trial.unit[axis],
                    "value": t.trial.parameters.get(name),
                    "steps": t.crossing,
                    "is_winner": t.trial.id == s.result.winner,
                }
                for s in searches
                for t in s.trials
                if t.is_feasible and t.has_crossed and len(t.trial.unit) > axis
            ]
            found.append(
                StudyFigure(
                    name=f"space-{curve}-{name}",
                    title=f"Was the range wide enough: {name} of {curve}",
                    caption=(
                        f"Trials that reached the goal over the coordinate of {name}, 0 and 1 being the ends "
                        "of its range. Stars: winners. Shaded: the outer tenths, where the median of the five "
                        "best must not lie. The words above say what was found."
                    ),
                    draw=partial(_draw_space, goal, curve, axis),
                    rows=rows,
                )
            )
    return found


def _draw_space(goal: GoalAnalysis, curve: str, axis: int, width: float) -> Figure:
    grouped = {batch: rows for (c, batch), rows in cells(goal.of(curve)).items() if c == curve}
    figure, axes = panels(width, len(grouped), across=4, height=2.3)
    for one, (batch, searches) in zip(axes, grouped.items(), strict=True):
        crossed = [
            (t.trial.unit[axis], float(t.crossing or 1), t.trial.id == s.result.winner)
            for s in searches
            for t in s.trials
            if t.is_feasible and t.has_crossed and len(t.trial.unit) > axis
        ]
        for low, high in ((0.0, INNER[0]), (INNER[1], 1.0)):
            one.axvspan(low, high, color=INK, alpha=0.06, linewidth=0)
        one.plot(
            [u for u, _, _ in crossed],
            [s for _, s, _ in crossed],
            linestyle="",
            marker="o",
            markersize=3,
            alpha=0.6,
            color=REACHED,
            label="reached",
        )
        best = [(u, s) for u, s, wins in crossed if wins]
        one.plot(
            [u for u, _ in best],
            [s for _, s in best],
            linestyle="",
            marker="*",
            markersize=11,
            color=BEST,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            label="winner",
        )
        edges = goal.edges.get((curve, batch), ())
        edge = edges[axis] if axis < len(edges) else None
        word = "" if edge is None else f": {edge.place}"
        if edge is not None and edge.place is Place.INSIDE and edge.is_insensitive:
            word = ": insensitive"
        title(one, f"{batch:,}{word}")
        if crossed:
            power_axis(one, "y", [s for _, s, _ in crossed])
        else:
            say(one, "no trial reached the goal")
        one.set_xlim(-0.03, 1.03)
        one.set_xticks([0, 0.5, 1])
        name_axes(one, "coordinate", "steps")
    legend(figure, axes[0])
    return figure
