"""Figures of a run as matplotlib objects: one panel, or all of them on one axis of samples.

Everything goes through matplotlib's object interface (``Figure`` and its Agg canvas); pyplot and
its global state are never touched, so figures can be made in any thread and embedded anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.report.marks import (
    FAINT,
    GRID,
    INK,
    MUTED,
    NARROW_BELOW,
    event_legend,
    legend_inches,
    mark_events,
)
from shoal.report.panels import PANELS, Panel, say
from shoal.report.run import Run
from shoal.report.series import sample_range
from shoal.report.wording import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _RIGHT = 0.62, 0.28  # inches beside the panels


def overview(run: Run, *, width: float = 9.2) -> Figure:
    """All panels of a run, one above the other on a shared axis of samples, every event marked.

    Args:
        run: what :func:`shoal.report.run.load_run` returned; an empty one gives empty panels.
        width: inches; below 6 the figure is laid out for a phone.

    Returns:
        A new figure. Each panel's axes carry the group id ``panel-NAME`` (NAME of :data:`PANELS`).
    """
    heights = [panel.height for panel in PANELS]
    gap, top, bottom = 0.42, legend_inches(run, width) + 0.4, 0.66
    total = sum(heights) + gap * (len(heights) - 1) + top + bottom
    figure = _figure(width, total)
    axes: list[Axes] = []
    edge = total - top
    for panel in PANELS:
        axes.append(_axes(figure, width, total, edge - panel.height, panel.height, axes[:1]))
        edge -= panel.height + gap
    for place, panel in zip(axes, PANELS, strict=True):
        _fill(place, panel, run)
    for place in axes[:-1]:
        place.tick_params(labelbottom=False)
    _label_samples(axes[-1], run)
    event_legend(figure, run, left=_LEFT)
    return figure


def panel(run: Run, name: str, *, width: float = 9.2) -> Figure:
    """One panel of :func:`overview` as a figure of its own.

    Args:
        run: what :func:`shoal.report.run.load_run` returned.
        name: of :data:`PANELS`: workers, global_batch, lr, loss, scores or throughput.
        width: inches.

    Raises:
        ValueError: another name.
    """
    known = {panel.name: panel for panel in PANELS}
    if name not in known:
        raise ValueError(
            f"name = {name!r}; a panel is one of {', '.join(known)}; choose one of them"
        )
    chosen = known[name]
    height = chosen.height * 1.6
    total = height + legend_inches(run, width) + 0.4 + 0.66
    figure = _figure(width, total)
    place = _axes(figure, width, total, 0.66, height, [])
    _fill(place, chosen, run)
    _label_samples(place, run)
    event_legend(figure, run, left=_LEFT)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, facecolor="none")
    FigureCanvasAgg(figure)
    return figure


def _axes(
    figure: Figure, width: float, total: float, low: float, height: float, shared: Sequence[Axes]
) -> Axes:
    """Axes at a place given in inches, so that panels stay aligned whatever their labels."""
    axes = figure.add_axes(
        (_LEFT / width, low / total, (width - _LEFT - _RIGHT) / width, height / total),
        sharex=shared[0] if shared else None,
    )
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=FAINT, linewidth=0.8)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=MUTED, pad=4)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0)
    return axes


def _fill(axes: Axes, panel: Panel, run: Run) -> None:
    """Title, events and data of one panel."""
    axes.set_gid(f"panel-{panel.name}")
    axes.annotate(
        panel.title,
        (0, 1),
        xytext=(0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        fontweight="bold",
        color=INK,
        gid=f"title-{panel.name}",
    )
    low, high = sample_range(run)
    axes.set_xlim(low, high)
    panel.draw(axes, run)
    if not len(run.steps) and panel.name != "scores":
        say(axes, "no committed step yet")
    mark_events(axes, run)


def _label_samples(axes: Axes, run: Run) -> None:
    """Ticks of the shared axis: samples, and below them the time at which they had been used."""
    from matplotlib.ticker import MaxNLocator

    narrow = axes.figure.bbox.width / axes.figure.dpi < NARROW_BELOW
    low, high = axes.get_xlim()
    ticks = [
        float(tick)
        for tick in MaxNLocator(4 if narrow else 8, integer=True).tick_values(low, high)
        if low <= tick <= high
    ]
    labels = [f"{tick:,.0f}" for tick in ticks]
    steps = run.steps
    if len(steps):
        at = np.interp(ticks, steps.samples, steps.seconds)
        labels = [f"{text}\n{clock(float(when))}" for text, when in zip(labels, at, strict=True)]
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_xlabel(
        "samples, and time since the start" if len(steps) else "samples",
        fontsize=8.5,
        color=MUTED,
        labelpad=6,
    )
