"""How each panel of a run is drawn; adding a panel is one function and one row of ``PANELS``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.report.columns import Floats, number
from shoal.report.marks import FAINT, INK, MARKS, MUTED, SERIES
from shoal.report.run import Run
from shoal.report.series import greatest, held, ramps, smoothed, thin, throughput
from shoal.report.wording import decimal, score_label, scores_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RAMP = "#f2b134"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: its title, what the title adds in small print, its height and how it is drawn."""

    name: str
    title: str
    unit: str
    height: float
    draw: Callable[[Axes, Run], None]


def say(axes: Axes, text: str) -> None:
    """A line in the middle of a panel that has nothing to show."""
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=9
    )


def _draw_workers(axes: Axes, run: Run) -> None:
    if not len(run.steps):
        return
    x, y = held(run, run.steps.workers)
    axes.fill_between(x, y, color=INK, alpha=0.10, linewidth=0)
    axes.plot(x, y, color=INK, linewidth=1.8, solid_joinstyle="miter")
    top = greatest(y)
    axes.set_ylim(0, top * 1.3)
    axes.set_yticks(np.arange(0, top + 1, max(1, math.ceil(top / 4))))
    _label_levels(axes, x, y, top)


def _draw_global_batch(axes: Axes, run: Run) -> None:
    if not len(run.steps):
        return
    x, y = held(run, run.steps.global_batch)
    axes.fill_between(x, y, color=INK, alpha=0.10, linewidth=0)
    axes.plot(x, y, color=INK, linewidth=1.8, solid_joinstyle="miter")
    top = greatest(y)
    axes.set_ylim(0, top * 1.3)
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(_plain)
    _label_levels(axes, x, y, top)


def _label_levels(axes: Axes, x: Floats, y: Floats, top: float) -> None:
    """The value of each stretch of a staircase written above it, where there is room."""
    low, high = axes.get_xlim()
    for begin, end, value in zip(x[0::2], x[1::2], y[0::2], strict=True):
        if end - begin > 0.05 * (high - low) and math.isfinite(value):
            axes.text(
                (begin + end) / 2,
                value + 0.04 * top,
                f"{value:,.0f}",
                ha="center",
                va="bottom",
                fontsize=8.5,
                color=INK,
            )


def _draw_lr(axes: Axes, run: Run) -> None:
    if not len(run.steps):
        return
    lr, target = run.steps.lr, run.steps.lr_target
    for place, (begin, end) in enumerate(ramps(run)):
        axes.axvspan(begin, end, color=RAMP, alpha=0.22, linewidth=0, gid=f"ramp-{place}")
    axes.plot(*thin(*held(run, lr)), color=INK, linewidth=1.8, label="in force", zorder=2.1)
    axes.plot(
        *thin(*held(run, target)),
        color="#b07d12",
        linewidth=1.4,
        linestyle=(0, (3, 2)),
        label="target",
    )
    both = np.concatenate([lr, target])
    axes.set_ylim(0, greatest(both) * 1.15)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(_plain)
    _key(axes, shaded="ramp" if ramps(run) else "")


def _draw_loss(axes: Axes, run: Run) -> None:
    if not len(run.steps):
        return
    x, loss = run.steps.samples, run.steps.loss
    axes.plot(*thin(x, loss), color=FAINT, linewidth=0.7, label="each step")
    window = max(5, len(loss) // 50)
    if len(loss) > window:
        mean = smoothed(loss, window)
        axes.plot(*thin(x, mean), color=INK, linewidth=1.8, label=f"mean of {window}")
    _draw_evaluations(axes, run, losses=True)
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        say(axes, "no finite loss")
    elif finite.min() > 0 and finite.max() > 50 * np.median(finite):
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=min(0.0, float(finite.min())))
        axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(_plain)
    _mark_not_finite(axes, x[~np.isfinite(loss)])
    _key(axes)


def _mark_not_finite(axes: Axes, at: Floats) -> None:
    """Crosses near the bottom edge where the loss was not finite, not closer than they are wide."""
    low, high = axes.get_xlim()
    shown: list[float] = []
    for place in at:
        if not shown or place - shown[-1] > 0.012 * (high - low):
            shown.append(float(place))
    if shown:
        axes.plot(
            shown,
            np.full(len(shown), 0.05),
            linestyle="",
            marker="x",
            markersize=4.5,
            color=MARKS["kill"].colour,
            transform=axes.get_xaxis_transform(),
            label="not finite",
            gid="not-finite",
        )


def _draw_scores(axes: Axes, run: Run) -> None:
    names = _draw_evaluations(axes, run, losses=False)
    if not names:
        say(axes, "nothing has been evaluated")
        return
    axes.margins(y=0.2)
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(_plain)
    _key(axes)


def _draw_evaluations(axes: Axes, run: Run, *, losses: bool) -> list[str]:
    """Each named score over samples, its last value in the key; returns the names drawn."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in run.evaluations:
        for key, value in scores_of(row).items():
            if (
                ("loss" in key) == losses
                and math.isfinite(value)
                and math.isfinite(number(row["at"]))
            ):
                name = score_label(row, key)
                lines.setdefault(name, []).append((number(row["at"]), value))
    colours = SERIES[1:] + SERIES[:1] if losses else SERIES
    for place, (name, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=colours[place % len(colours)],
            marker="osD^"[place % 4],
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=1.6,
            linestyle=("-", "--", "-.", ":")[place // 4 % 4],
            clip_on=False,
            zorder=3,
            label=f"{name}, last {decimal(points[-1][1], 3)}",
        )
    return list(lines)


def _draw_throughput(axes: Axes, run: Run) -> None:
    x, rate = throughput(run)
    if len(run.steps) and not np.isfinite(rate).any():
        say(axes, "too few steps to tell a rate")
    if not len(x):
        return
    axes.fill_between(x, rate, color=INK, alpha=0.10, linewidth=0)
    axes.plot(x, rate, color=INK, linewidth=1.2)
    axes.set_ylim(0, greatest(rate) * 1.1)
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(_plain)


def _plain(value: float, _place: float) -> str:
    return decimal(value, 4)


_KEY: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "labelcolor": MUTED,
    "handlelength": 1.6,
    "columnspacing": 1.2,
    "borderpad": 0.2,
    "borderaxespad": 0.0,
    "handletextpad": 0.5,
}
_SMALL_KEY = _KEY | {"fontsize": 7, "handlelength": 1.1, "columnspacing": 0.8}
_OBVIOUS = "each step"


def _key(axes: Axes, shaded: str = "") -> None:
    """The key to a panel's lines, at the right of its title as far as there is room.

    Where it is too wide it gets smaller, then loses its most obvious entry, then moves inside.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    handles, labels = axes.get_legend_handles_labels()
    entries: list[tuple[Any, str]] = list(zip(handles, labels, strict=True))
    if shaded:
        entries.append((Patch(facecolor=RAMP, alpha=0.3, linewidth=0), shaded))
    if not entries:
        return
    renderer = FigureCanvasAgg(axes.figure.figure).get_renderer()
    titles = [text for text in axes.texts if str(text.get_gid()).startswith("title-")]
    end = max((text.get_window_extent(renderer).x1 for text in titles), default=0.0)
    above = axes.transAxes + ScaledTranslation(0, 6 / 72, axes.figure.dpi_scale_trans)
    fewer = [entry for entry in entries if entry[1] != _OBVIOUS] or entries
    for chosen, look in ((entries, _KEY), (entries, _SMALL_KEY), (fewer, _SMALL_KEY)):
        legend = axes.legend(
            *zip(*chosen, strict=True),
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            bbox_transform=above,
            ncols=len(chosen),
            **look,
        )
        if legend.get_window_extent(renderer).x0 > end + 5:
            return
    inside = _SMALL_KEY | {"frameon": True, "framealpha": 0.85, "edgecolor": "none"}
    axes.legend(*zip(*entries, strict=True), loc="upper right", ncols=1, **inside)


PANELS = (
    Panel(name="workers", title="Workers", unit="", height=0.85, draw=_draw_workers),
    Panel(
        name="global_batch",
        title="Global batch",
        unit="samples",
        height=0.85,
        draw=_draw_global_batch,
    ),
    Panel(name="lr", title="Learning rate", unit="", height=1.15, draw=_draw_lr),
    Panel(name="loss", title="Training loss", unit="", height=1.5, draw=_draw_loss),
    Panel(name="scores", title="Evaluation", unit="", height=1.05, draw=_draw_scores),
    Panel(
        name="throughput",
        title="Samples per second",
        unit="",
        height=0.9,
        draw=_draw_throughput,
    ),
)
