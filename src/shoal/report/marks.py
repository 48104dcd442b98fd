"""The marks of events: one marker, line and colour per kind, the same on every panel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.report.columns import number
from shoal.report.run import LIGHT, MEMBERSHIP, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#2f3e56"
FAINT = "#a9b4c4"
GRID = "#e7eaef"
MUTED = "#6b7686"
NARROW_BELOW = 6.0  # inches; a narrower figure is laid out for a phone
SERIES = (INK, "#a6611a", "#7b5ea7", "#4d4d4d")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How one kind of event looks: told apart by its marker and line, not by its colour alone."""

    label: str
    colour: str
    marker: str
    line: Literal["-", ""] | tuple[float, Sequence[float]]


MARKS: Mapping[str, Mark] = {
    "join": Mark(label="join", colour="#00836b", marker="^", line="-"),
    "leave": Mark(label="leave", colour="#0069b4", marker="v", line=(0, (5, 2))),
    "kill": Mark(label="kill", colour="#c8281e", marker="X", line=(0, (1, 1))),
    "hang": Mark(label="hang", colour=MUTED, marker="s", line=(0, (1, 3))),
    "fleet_lost": Mark(label="fleet lost", colour=MUTED, marker="P", line=(0, (1, 3))),
    "coordinator_restarted": Mark(
        label="coordinator restarted", colour=MUTED, marker="D", line=(0, (1, 3))
    ),
    "resume": Mark(label="resume", colour=MUTED, marker=">", line=(0, (1, 3))),
    "checkpoint": Mark(label="checkpoint", colour=MUTED, marker="|", line=""),
}


def mark_events(axes: Axes, run: Run) -> None:
    """One vertical line and marker per event; ticks of checkpoints only where they stay apart."""
    low, high = axes.get_xlim()
    ticked = -math.inf
    for place, row in enumerate(run.events):
        at = number(row["at"])
        if not math.isfinite(at):
            continue
        if row["kind"] == "checkpoint":
            if at - ticked < 0.008 * (high - low):
                continue
            ticked = at
        mark = MARKS[str(row["kind"])]
        light = row["kind"] in LIGHT
        gid = f"event-{place}-{axes.get_gid()}"
        if mark.line:
            axes.axvline(
                at,
                color=mark.colour,
                linewidth=0.9 if light else 1.2,
                linestyle=mark.line,
                alpha=0.6 if light else 0.85,
                zorder=1.5,
                gid=gid,
            )
        axes.plot(
            [at],
            [0.0 if mark.marker == "|" else 1.0],
            transform=axes.get_xaxis_transform(),
            marker=mark.marker,
            markersize=4.5 if light else 7,
            color=mark.colour,
            markeredgecolor=mark.colour if light else "white",
            markeredgewidth=0.8 if light else 0.7,
            linestyle="",
            clip_on=False,
            zorder=4 if light else 4.1,
            gid=f"{gid}-marker",
        )


def legend_inches(run: Run, width: float) -> float:
    """The height that :func:`event_legend` takes, in inches."""
    if width >= NARROW_BELOW:
        return 0.2
    light = {str(row["kind"]) for row in run.events} & set(LIGHT)
    return 0.2 + 0.17 * math.ceil(len(light) / 3)


def event_legend(figure: Figure, run: Run, *, left: float) -> None:
    """What the markers mean: the three changes of membership always, others when they occur.

    Args:
        figure: drawn into at its top edge; a narrow one gets the lighter events on rows of their own.
        run: decides which of the lighter events are listed.
        left: where the row begins, in inches.
    """
    seen = {str(row["kind"]) for row in run.events}
    light = [kind for kind in LIGHT if kind in seen]
    width, height = figure.get_size_inches()
    if width >= NARROW_BELOW:
        _legend_row(figure, [*MEMBERSHIP, *light], (left / width, 1.0), 9.0)
        return
    _legend_row(figure, [*MEMBERSHIP], (left / width, 1.0), 9.0)
    for row, first in enumerate(range(0, len(light), 3)):
        top = 1.0 - (0.21 + 0.17 * row) / height
        _legend_row(figure, light[first : first + 3], (left / width, top), 7.5)


def _legend_row(figure: Figure, kinds: Sequence[str], at: tuple[float, float], size: float) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=MARKS[kind].colour,
            marker=MARKS[kind].marker,
            markersize=7 if kind in MEMBERSHIP else 4.5,
            linestyle=MARKS[kind].line or "none",
            linewidth=1.2,
            label=MARKS[kind].label,
        )
        for kind in kinds
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=at,
        ncols=len(handles),
        frameon=False,
        fontsize=size,
        labelcolor=INK,
        borderaxespad=0.2,
        borderpad=0.0,
        handlelength=1.8,
        handletextpad=0.6,
        columnspacing=1.2,
    )
