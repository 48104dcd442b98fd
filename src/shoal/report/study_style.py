"""How a study's figures look: axes in powers of two, one colour and marker per curve, hollow for censored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.report.marks import FAINT, GRID, INK, MUTED, NARROW_BELOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (INK, "#a6611a", "#00836b", "#7b5ea7", "#0069b4", "#8c6d1f")
MARKERS = ("v", "o", "s", "D", "P", "X")
REACHED, MISSED, DIVERGED, BEST = "#2369bd", "#c8281e", "#1b1b1b", "#f2c230"

Row = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class StudyFigure:
    """One figure of a study's page.

    Args:
        name: of its files and in the page's addresses: letters, digits, ``-`` and ``_``.
        title: above it.
        caption: what is drawn and how it was computed.
        draw: makes it at a width in inches; below 6 laid out for a phone.
        rows: the tidy table behind it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[float], Figure]
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one curve is drawn."""

    colour: str
    marker: str


def looks(curves: Sequence[str]) -> dict[str, Look]:
    """A look for each curve, in order; they repeat after six."""
    return {
        curve: Look(colour=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)])
        for place, curve in enumerate(curves)
    }


def is_narrow(width: float) -> bool:
    """Whether a figure of this width is for a phone."""
    return width < NARROW_BELOW


def panels(
    width: float, count: int, *, height: float = 2.9, across: int = 3, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels in rows, every one dressed.

    Args:
        width: inches.
        count: of panels, >= 1.
        height: of a panel, inches.
        across: most panels beside each other; a phone gets half as many.
        share_y: one scale for all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, max(1, across // 2) if is_narrow(width) else across)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width, rows * height), dpi=100, facecolor="none")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    axes: list[Axes] = []
    for place in range(count):
        shared = axes[0] if axes and share_y else None
        axes.append(figure.add_subplot(rows, columns, place + 1, sharey=shared))
    for one in axes:
        dress(one)
    return figure, axes


def dress(axes: Axes) -> None:
    """The house's axes: no frame but the bottom, a faint grid."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=FAINT, linewidth=0.8)
    axes.tick_params(which="both", length=0, labelsize=8.5, labelcolor=MUTED, pad=4)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def title(axes: Axes, text: str) -> None:
    """A panel's name, flush left above it."""
    axes.set_title(text, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=8)


def name_axes(axes: Axes, x: str, y: str) -> None:
    """What the axes count."""
    axes.set_xlabel(x, fontsize=8.5, color=MUTED, labelpad=5)
    axes.set_ylabel(y, fontsize=8.5, color=MUTED, labelpad=5)


def power_axis(
    axes: Axes, which: str, values: Sequence[float], *, base: int = 2, ticks: int = 7
) -> None:
    """A logarithmic axis with few ticks at powers of ``base``, written out.

    Args:
        axes: whose.
        which: "x" or "y".
        values: what is drawn along it, positive.
        base: 2 for batches and steps, 10 for rates.
        ticks: about the most there is room for.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    known = [v for v in values if v > 0 and math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (1.0, float(base))
    pad = (high / low) ** 0.04 if high > low else base**0.5
    # Before the scale, which would otherwise fit limits of its own, and cannot around a single value.
    limits = low / pad, high * pad
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
    if which == "x":
        axes.set_xscale("log", base=base)
    else:
        axes.set_yscale("log", base=base)
    axis = axes.xaxis if which == "x" else axes.yaxis
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    every = max(1, math.ceil((last - first) / (ticks - 1)))
    places = [float(base) ** k for k in range(first, last + 1, every)]
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def plain(value: float) -> str:
    """A tick: thousands separated, four digits below one.

    Example:
        >>> plain(65536.0), plain(0.5), plain(1e-4)
        ('65,536', '0.5', '0.0001')
    """
    if value >= 1:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"
    return f"{value:.4g}" if value >= 1e-4 else f"{value:.0e}"


def legend(figure: Figure, axes: Axes, *, columns: int = 4) -> None:
    """What the marks mean, in rows under the figure; nothing if nothing is named."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    named = dict(zip(labels, handles, strict=True))
    narrow = is_narrow(float(figure.get_size_inches()[0]))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower left",
        ncols=2 if narrow else columns,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=2.0,
        columnspacing=1.4,
    )
