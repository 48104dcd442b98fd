"""The pictures of ``shoal reproduce batch-size``: steps against batch size, and what budgets buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.reproduce.batch_size.full import Spread
from shoal.reproduce.batch_size.quadratic import QuadraticStudy, fit
from shoal.study.analysis import StudyAnalysis
from shoal.study.budgets import Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with colour-blind eyes too; and a mark each.
STYLES = {
    "sgd": ("#0072B2", "o"),
    "heavy_ball": ("#D55E00", "^"),
    "nesterov": ("#009E73", "s"),
}
GREY = "#8A8F98"
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw_quadratic(study: QuadraticStudy, path: Path) -> None:
    """S of both optimizers, their fits, and perfect scaling."""
    figure, axes = _axes()
    for name, optima in (("sgd", study.sgd), ("heavy_ball", study.momentum)):
        colour, mark = STYLES[name]
        batches = np.array([o.global_batch for o in optima], dtype=np.float64)
        axes.plot(
            batches, [o.steps for o in optima], mark, color=colour, label=name.replace("_", " ")
        )
        found = fit(optima)
        axes.plot(batches, found.s_min * (1 + found.b_crit / batches), color=colour, linewidth=1)
    _ideal(axes, study.sgd[0].global_batch, study.sgd[0].steps, study.sgd[-1].global_batch, 100)
    _finish(figure, axes, path, "steps to risk 0.01")


def draw_steps(analysis: StudyAnalysis, path: Path) -> None:
    """S of every curve with the range of its repeats and its fit; open marks: not reached by there."""
    figure, axes = _axes()
    goal = analysis.main
    for place, curve in enumerate(goal.curves):
        colour, mark = STYLES.get(curve, (OTHERS[place % len(OTHERS)], "o"))
        cells = goal.cells_of(curve)
        known = [c for c in cells if c.centre is not None and c.steps]
        if known:
            x = [c.global_batch for c in known]
            centres = np.array([c.centre for c in known], dtype=np.float64)
            low = centres - np.array([min(c.steps) for c in known])
            high = np.array([max(c.steps) for c in known]) - centres
            bars = np.clip([low, high], 0, None)
            axes.errorbar(
                x, centres, yerr=bars, fmt=mark, color=colour, label=curve.replace("_", " ")
            )
        for cell in cells:
            if cell.censored_at:
                axes.plot(
                    [cell.global_batch],
                    [max(cell.censored_at)],
                    mark,
                    color=colour,
                    fillstyle="none",
                )
        found = goal.fits.get(curve)
        if found is not None:
            x = np.geomspace(found.batches[0], found.batches[-1], 100)
            axes.plot(x, [found.steps(b) for b in x], color=colour, linewidth=1)
    _finish(figure, axes, path, f"steps to {goal.goal.metric} < {goal.goal.value:g}")


def draw_rates(analysis: StudyAnalysis, path: Path) -> None:
    """The best effective learning rates with the linear and the square-root rule."""
    figure, axes = _axes()
    for place, curve in enumerate(analysis.main.curves):
        colour, mark = STYLES.get(curve, (OTHERS[place % len(OTHERS)], "o"))
        rows = [o for o in analysis.main.optima if o.curve == curve]
        x = np.array([o.global_batch for o in rows], dtype=np.float64)
        y = [o.effective_lr for o in rows]
        axes.plot(x, y, mark + "-", color=colour, linewidth=1, label=curve.replace("_", " "))
        if place == 0 and rows:
            axes.plot(x, y[0] * x / x[0], "--", color=GREY, linewidth=1, label="linear")
            axes.plot(x, y[0] * np.sqrt(x / x[0]), "-.", color=GREY, linewidth=1, label="root")
    _finish(figure, axes, path, "best lr / (1 - momentum)")


def draw_budgets(table: Mapping[tuple[Unit, int], Spread], path: Path) -> None:
    """Best error under step budgets and sample budgets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, unit in zip(panels, ("steps", "samples"), strict=True):
        for (kind, budget), spread in table.items():
            if kind == unit:
                axes.plot(
                    list(spread.means),
                    list(spread.means.values()),
                    "o-",
                    label=f"{budget:,} {unit}",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("global batch")
        axes.legend(frameon=False)
        _plain(axes)
    panels[0].set_ylabel("best validation cross entropy")
    _save(figure, path)


def _axes() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    return figure, axes


def _ideal(axes: Any, first: float, steps: float, last: float, floor: float) -> None:
    x: Sequence[float] = [first, min(last, first * steps / floor)]
    axes.plot(
        x, [steps, steps * first / x[1]], "--", color=GREY, linewidth=1, label="perfect scaling"
    )


def _finish(figure: Figure, axes: Any, path: Path, label: str) -> None:
    axes.set_xlabel("global batch")
    axes.set_ylabel(label)
    axes.grid(visible=True, color="#E3E5E8", linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    _plain(axes)
    _save(figure, path)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shoal", "font.size": 11}):
        figure.savefig(path, format="svg", metadata={"Date": None})
