"""The figures of simulated runs: error against what it cost, idle shares, and who was there when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.report.marks import FAINT, MARKS
from shoal.report.study_style import (
    COLOURS,
    Row,
    StudyFigure,
    is_narrow,
    legend,
    looks,
    name_axes,
    panels,
    power_axis,
    title,
)
from shoal.world.virtual.record import SimulatedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, SimulatedRun]

_AXES = (
    ("samples", "samples used"),
    ("bytes", "bytes on all links"),
    ("virtual_seconds", "virtual seconds"),
)
_SHADES = {"computing": "#c9d3e0", "waiting": "#a6611a", "exchanging": "#2369bd"}
_MOST_BARS = 64


def metric_of(runs: Runs) -> str:
    """The metric that is drawn: the target's, or the first that was measured."""
    for run in runs.values():
        if run.target is not None:
            return run.target[0]
    for run in runs.values():
        for evaluation in run.evaluations:
            for scores in evaluation.scores.values():
                return next(iter(scores))
    return "error"


def models_of(run: SimulatedRun) -> list[str]:
    """Models that were measured, in the order in which they appear."""
    return list(dict.fromkeys(name for e in run.evaluations for name in e.scores))


def error_figure(runs: Runs) -> StudyFigure:
    """Error against samples, bytes and virtual seconds; with one run a line for each of its models."""
    metric = metric_of(runs)
    lines = _lines(runs, metric)
    target = next((run.target[1] for run in runs.values() if run.target is not None), None)

    def draw(width: float) -> Figure:
        from matplotlib.ticker import MaxNLocator

        figure, axes = panels(width, 3, height=3.1, share_y=not is_narrow(width))
        styles = looks(list(lines))
        for (key, words), one in zip(_AXES, axes, strict=True):
            for name, rows in lines.items():
                known = [row for row in rows if math.isfinite(_number(row[metric]))]
                if key == "bytes":
                    known = [row for row in known if _number(row[key]) > 0]
                one.plot(
                    [_number(row[key]) for row in known],
                    [_number(row[metric]) for row in known],
                    label=name,
                    color=styles[name].colour,
                    marker=styles[name].marker,
                    markersize=4,
                    linewidth=1.4,
                )
            if target is not None:
                one.axhline(target, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)))
            name_axes(one, words, metric.replace("_", " ") if one is axes[0] else "")
            if key == "bytes":
                spent = [_number(row[key]) for found in lines.values() for row in found]
                power_axis(one, "x", spent, base=10, ticks=5)
                one.xaxis.set_major_formatter(bytes_in_words)
            else:
                one.set_xlim(left=0)
                one.xaxis.set_major_formatter("{x:,.0f}")
                one.xaxis.set_major_locator(MaxNLocator(4))
        legend(figure, axes[0])
        return figure

    rows: list[Row] = [row for found in lines.values() for row in found]
    return StudyFigure(
        name="error",
        title="Error against samples, bytes and virtual time",
        caption=_error_caption(runs, target),
        draw=draw,
        rows=rows,
    )


def _error_caption(runs: Runs, target: float | None) -> str:
    caption = "Simulated. Each point is an evaluation of the weights of one model."
    if any(not sum(run.counted_bytes.values()) for run in runs.values()):
        caption += " What sends nothing has no place on a logarithmic axis of bytes."
    if target is not None:
        caption += f" The broken line is the target, {target:g}."
    return caption


def _lines(runs: Runs, metric: str) -> dict[str, list[Row]]:
    """By line its points: of one run all models, of several each run's first model."""
    found: dict[str, list[Row]] = {}
    for name, run in runs.items():
        models = models_of(run)
        for model in models if len(runs) == 1 else models[:1]:
            label = model.replace("_", " ") if len(runs) == 1 else f"{name} ({model})"
            found[label] = [
                {
                    "run": name,
                    "model": model,
                    "samples": evaluation.samples,
                    "bytes": evaluation.bytes,
                    "virtual_seconds": evaluation.virtual_seconds,
                    metric: evaluation.scores[model][metric],
                }
                for evaluation in run.evaluations
                if model in evaluation.scores
            ]
    return found


def bytes_in_words(value: float, _: object = None) -> str:
    """Bytes in decimal units.

    Example:
        >>> bytes_in_words(1_560_000.0), bytes_in_words(12.0)
        ('1.56 MB', '12 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def idle_figure(runs: Runs) -> StudyFigure:
    """How each worker spent its time."""
    rows: list[Row] = [
        {
            "run": name,
            "worker": worker.worker,
            "slowdown": worker.slowdown,
            "computing": worker.computing,
            "waiting": worker.waiting,
            "exchanging": worker.exchanging,
            "idle_share": worker.idle_share,
        }
        for name, run in runs.items()
        for worker in run.workers
    ]

    def draw(width: float) -> Figure:
        figure, axes = panels(width, len(runs), height=2.5, share_y=not is_narrow(width))
        for (name, run), one in zip(runs.items(), axes, strict=True):
            shown = run.workers[:_MOST_BARS]
            bottoms = [0.0] * len(shown)
            for part, colour in _SHADES.items():
                shares = [_share(worker, part) for worker in shown]
                one.bar(
                    range(len(shown)), shares, bottom=bottoms, color=colour, width=0.86, label=part
                )
                bottoms = [b + s for b, s in zip(bottoms, shares, strict=True)]
            one.set_ylim(0, 1)
            one.grid(False)
            title(one, f"{name}: {100 * run.idle_share:.1f} % idle")
            name_axes(one, "worker", "share of its time" if one is axes[0] else "")
            _whole_ticks(one, [worker.worker for worker in shown])
        legend(figure, axes[0])
        return figure

    many = max(len(run.workers) for run in runs.values())
    caption = (
        "Simulated. Idle is waiting (for others or for a link) and exchanging (bytes under way)."
    )
    if many > _MOST_BARS:
        caption += f" The first {_MOST_BARS} of {many} workers; the table has all."
    return StudyFigure(
        name="idle", title="How workers spent their time", caption=caption, draw=draw, rows=rows
    )


def _share(worker: object, part: str) -> float:
    total = sum(float(getattr(worker, name)) for name in _SHADES)
    return float(getattr(worker, part)) / total if total else 0.0


def _whole_ticks(axes: Axes, numbers: Sequence[int]) -> None:
    every = max(1, math.ceil(len(numbers) / 8))
    places = list(range(0, len(numbers), every))
    axes.set_xticks(places, [str(numbers[place]) for place in places])


def membership_figure(runs: Runs) -> StudyFigure:
    """When each worker was there, and who led."""
    rows: list[Row] = [
        {
            "run": name,
            "worker": worker.worker,
            "joined": worker.joined,
            "left": run.virtual_seconds if worker.left is None else worker.left,
            "how": worker.how,
            "steps": worker.steps,
            "faults": ", ".join(worker.faults),
        }
        for name, run in runs.items()
        for worker in run.workers
    ]

    def draw(width: float) -> Figure:
        most = max(len(run.workers) for run in runs.values())
        height = 1.3 + 0.16 * min(most, _MOST_BARS)
        figure, axes = panels(width, len(runs), height=height)
        for (name, run), one in zip(runs.items(), axes, strict=True):
            _lives(one, run)
            title(one, name)
            name_axes(one, "virtual seconds", "worker" if one is axes[0] else "")
        legend(figure, axes[0])
        return figure

    return StudyFigure(
        name="membership",
        title="Who was there, and who led",
        caption=(
            "Simulated. A bar is a worker's life, red if it has a fault; a dot is a round that it led; "
            "triangles are joins and leaves, crosses kills."
        ),
        draw=draw,
        rows=rows,
    )


def _lives(axes: Axes, run: SimulatedRun) -> None:
    shown = run.workers[:_MOST_BARS]
    ends = [run.virtual_seconds if w.left is None else w.left for w in shown]
    axes.barh(
        range(len(shown)),
        [end - w.joined for w, end in zip(shown, ends, strict=True)],
        left=[w.joined for w in shown],
        color=["#e8b4b0" if w.faults else "#d7dfe9" for w in shown],
        height=0.7,
    )
    places = {worker.worker: place for place, worker in enumerate(shown)}
    leaders = [(e["virtual_seconds"], e.get("leader")) for e in run.events if e["kind"] == "round"]
    led = [(time, places[who]) for time, who in leaders if isinstance(who, int) and who in places]
    if led:
        axes.plot(
            [_number(time) for time, _ in led],
            [place for _, place in led],
            linestyle="",
            marker="o",
            markersize=2.6,
            color=COLOURS[0],
            label="led a round",
        )
    comes = [(w.joined, place, "join") for place, w in enumerate(shown) if w.joined > 0]
    goes = [
        (end, place, "kill" if w.how == "killed" else "leave")
        for place, (w, end) in enumerate(zip(shown, ends, strict=True))
        if w.how != "there"
    ]
    for time, place, kind in [*comes, *goes]:
        mark = MARKS[kind]
        axes.plot(
            [time], [place], marker=mark.marker, markersize=6, color=mark.colour, linestyle=""
        )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    every = max(1, math.ceil(len(shown) / 12))
    ticks = list(range(0, len(shown), every))
    axes.set_yticks(ticks, [str(shown[place].worker) for place in ticks])
    axes.set_xlim(0, max(run.virtual_seconds, 1e-9) * 1.01)
    axes.grid(False)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
