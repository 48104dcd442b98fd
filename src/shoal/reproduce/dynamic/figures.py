"""The pictures of ``shoal reproduce dynamic``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.reproduce.dynamic.methods import DYNAMIC, LINEAR, METHODS, SHORT_METHODS
from shoal.reproduce.dynamic.spikes import BEFORE_STEPS
from shoal.reproduce.dynamic.tier1 import Responses
from shoal.reproduce.dynamic.tier2 import DigitsRows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with colour-blind eyes too.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A8F98"
COLOURS = {"linear, at once": ORANGE, "T=8": PINK, "T=8r": BLUE, "noise-matched": GREEN}
SHOWN_STEPS = 150


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shoal", "font.size": 11}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _plain_axes(axes: object) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)  # type: ignore[attr-defined]


def draw_tier1(responses: Responses, path: Path) -> None:
    """Expected loss after 1 -> 16 and after 16 -> 1, relative to before the change."""
    figure = _figure(9, 3.6)
    panels = figure.subplots(1, 2)
    shown = (
        ((1, 16), ("linear, at once", "T=8", "noise-matched", "T=8r")),
        ((16, 1), ("linear, at once", "T=8", "T=8r", "T=128")),
    )
    for axes, (change, names) in zip(panels, shown, strict=True):
        for name in names:
            losses = responses[change, name].losses[:SHOWN_STEPS]
            axes.plot(losses, color=COLOURS.get(name, GREY), linewidth=1.8, label=name)
        axes.set_yscale("log")
        axes.set_yticks([0.3, 0.5, 1, 2, 5, 10], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.axhline(1, color=GREY, linewidth=0.8, zorder=0)
        axes.set_title(f"{change[0]} to {change[1]} workers", loc="left")
        axes.set_xlabel("steps since the change")
        axes.legend(frameon=False)
        _plain_axes(axes)
    panels[0].set_ylabel("expected loss / loss before")
    _save(figure, path)


def draw_accuracies(rows: DigitsRows, path: Path) -> None:
    """Test accuracy of every method, a dot for each seed and a bar at the mean."""
    figure = _figure(9, 4.6)
    axes = figure.subplots()
    names = [method.name for method in METHODS]
    for place, name in enumerate(names):
        values = np.sort(rows.main[name].accuracy)
        colour = {LINEAR: ORANGE, DYNAMIC: BLUE}.get(name, GREY)
        spread = place + np.linspace(-0.22, 0.22, len(values))
        axes.plot(values, spread, "o", color=colour, markersize=4.5, alpha=0.75)
        axes.plot([values.mean()] * 2, [place - 0.36, place + 0.36], color=colour, linewidth=2.4)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, % (dot: one seed, bar: mean)")
    _plain_axes(axes)
    _save(figure, path)


def draw_spikes(rows: DigitsRows, path: Path) -> None:
    """Training loss around a scale-out from 1 to 16 workers, mean over seeds and scale-outs."""
    figure = _figure(9, 3.8)
    axes = figure.subplots()
    shown = (
        (LINEAR, ORANGE),
        ("T=8 up, drop at once", PINK),
        ("noise-matched", GREEN),
        (DYNAMIC, BLUE),
        ("none", GREY),
    )
    for name, colour in shown:
        curve = rows.main[name].around
        if curve:
            steps = np.arange(len(curve)) - BEFORE_STEPS
            axes.plot(steps, curve, color=colour, linewidth=1.6, label=name)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_xlabel("steps since the scale-out")
    axes.set_ylabel("training loss")
    if axes.get_lines()[:-1]:
        axes.legend(frameon=False)
    _plain_axes(axes)
    _save(figure, path)


def draw_short(rows: DigitsRows, path: Path) -> None:
    """Accuracy of short static runs, by epochs and method."""
    figure = _figure(9, 3.0)
    axes = figure.subplots()
    names = [method.name for method in SHORT_METHODS]
    marks = {0: ("o", BLUE), 1: ("D", ORANGE)}
    for number, (epochs, table) in enumerate(rows.short.items()):
        mark, colour = marks[number % len(marks)]
        means = [float(table[name].accuracy.mean()) for name in names]
        axes.plot(means, range(len(names)), mark, color=colour, label=f"{epochs} epochs")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("mean test accuracy, %")
    axes.legend(frameon=False, loc="upper left")
    _plain_axes(axes)
    _save(figure, path)
