"""The page of simulated runs, in the dress of a study's page: one file, no scripts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.report.simulation_figures import (
    Runs,
    bytes_in_words,
    error_figure,
    idle_figure,
    membership_figure,
    metric_of,
    models_of,
)
from shoal.report.study_page import (
    Drawn,
    drawn,
    write_figures,
    write_whole,
)
from shoal.report.study_style import StudyFigure
from shoal.report.study_text import Table
from shoal.report.templates import FOLDER, environment
from shoal.report.wording import count, decimal, duration
from shoal.world.virtual.record import SIMULATED, SimulatedRun

_LIMITS = (
    "Every time on this page is virtual: it follows from the step times, links and prices that the recipe "
    "names, not from a measurement.",
    "Collectives cost what their formulas say on free links; real ones share links with other traffic.",
    "Accuracies are real: the models were trained. They are those of one seed.",
)


def write_simulation(name: str, runs: Mapping[str, SimulatedRun], out_dir: Path) -> Path:
    """Write ``report.html``, ``result.json``, and under ``figures/`` each figure with its table.

    Args:
        name: of the recipe.
        runs: by name, at least one.
        out_dir: made if it is not there; files of the same names are replaced, each at once.

    Returns:
        The page. It needs no other file.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
        OSError: it cannot be written.
    """
    figures = [drawn(figure) for figure in simulation_figures(runs)]
    page = render_simulation(name, runs, figures)
    document = {
        "name": name,
        "simulated": SIMULATED,
        "runs": {key: run.to_dict() for key, run in runs.items()},
    }
    write_whole(out_dir / "result.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_figures(figures, out_dir / "figures")
    return write_whole(out_dir / "report.html", page)


def simulation_figures(runs: Runs) -> list[StudyFigure]:
    """Every figure, in the order of the page."""
    return [error_figure(runs), idle_figure(runs), membership_figure(runs)]


def render_simulation(name: str, runs: Runs, figures: Sequence[Drawn] | None = None) -> str:
    """The whole page as text.

    Args:
        name: of the recipe.
        runs: by name.
        figures: those of :func:`simulation_figures` by default.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    pages = environment()
    study = (FOLDER / "study.html.j2").read_text(encoding="utf-8")
    style = study[study.index("<style>") : study.index("</style>") + len("</style>")]
    chosen = [drawn(f) for f in simulation_figures(runs)] if figures is None else figures
    return pages.get_template("simulation.html.j2").render(
        name=name,
        style=style,
        lead=_lead(runs),
        simulated=SIMULATED[0].upper() + SIMULATED[1:] + ".",
        findings=summary_lines(runs) if len(runs) > 1 else [],
        notes=[f"{key}: {note}" for key, run in runs.items() for note in run.notes],
        figures=chosen,
        tables=[cost_table(runs), score_table(runs), account_table(runs), *_reached_tables(runs)],
        limits=_LIMITS,
        settings={key: _flat(run.settings) for key, run in runs.items()},
        written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        version=_version(),
    )


def summary_lines(runs: Runs) -> list[str]:
    """One sentence for each run."""
    return [f"{name}: {_sentence(run, metric_of(runs))}" for name, run in runs.items()]


def _sentence(run: SimulatedRun, metric: str) -> str:
    parts = [f"{count(run.used)} samples in {duration(run.virtual_seconds)} of virtual time"]
    parts.append(f"{100 * run.idle_share:.1f} % idle")
    parts.append(f"{bytes_in_words(sum(run.counted_bytes.values()))} sent")
    models = models_of(run)
    if models:
        last = run.evaluations[-1].scores.get(models[0], {})
        words = metric.replace("_", " ")
        parts.append(f"{words} {decimal(last.get(metric, math.nan), 3)} ({models[0]})")
    ended = "" if run.ended == "finished" else f"; {run.ended}"
    return ", ".join(parts) + ended + " (simulated)"


def _lead(runs: Runs) -> str:
    if len(runs) == 1:
        run = next(iter(runs.values()))
        sentence = _sentence(run, metric_of(runs))
        return sentence[0].upper() + sentence[1:] + "."
    many = max(len(run.workers) for run in runs.values())
    return f"{len(runs)} simulated runs of up to {many} virtual workers."


def cost_table(runs: Runs) -> Table:
    """Time, idle shares and bytes of each run."""
    rows = [
        [
            name,
            count(run.used),
            duration(run.virtual_seconds),
            f"{100 * run.waiting_share:.2f} %",
            f"{100 * run.exchange_share:.2f} %",
            count(run.rounds),
            bytes_in_words(run.counted_bytes["intra"]),
            bytes_in_words(run.counted_bytes["inter"]),
            bytes_in_words(sum(run.payload_bytes.values())),
            bytes_in_words(run.formula_bytes),
        ]
        for name, run in runs.items()
    ]
    return Table(
        id="costs",
        title="What it cost (simulated)",
        head=[
            "Run",
            "Samples",
            "Virtual time",
            "Waiting",
            "Exchanging",
            "Rounds",
            "Inside nodes",
            "Between nodes",
            "Payload by the rule's record",
            "By formula",
        ],
        rows=rows,
        note="Bytes inside and between nodes are counted message by message on the links.",
    )


def score_table(runs: Runs) -> Table:
    """The last evaluation of every model."""
    rows: list[list[str]] = []
    metrics: list[str] = []
    for name, run in runs.items():
        for model, scores in run.evaluations[-1].scores.items() if run.evaluations else ():
            metrics = metrics or list(scores)
            rows.append([name, model.replace("_", " "), *(decimal(scores[m], 4) for m in metrics)])
    return Table(
        id="scores",
        title="Models at the end",
        head=["Run", "Model", *(m.replace("_", " ") for m in metrics)],
        rows=rows,
        note=(
            "Leader: the worker that led last, as it is. Mean: of all workers whose weights are finite. Best: "
            "the lowest error of any worker. Center: the rule's own average."
        ),
    )


def account_table(runs: Runs) -> Table:
    """Samples drawn, used, discarded; rounds lost; pulls in the background."""
    rows = [
        [
            name,
            count(run.drawn),
            count(run.used),
            count(run.discarded),
            count(run.pending),
            count(run.lost_rounds),
            _mean(run.snapshot_ages, " s"),
            _mean(run.snapshot_lags, " steps"),
            count(run.late_pulls),
            run.engine,
        ]
        for name, run in runs.items()
    ]
    return Table(
        id="account",
        title="Samples and rounds",
        head=[
            "Run",
            "Drawn",
            "Used",
            "Discarded",
            "Under way at the end",
            "Rounds lost",
            "Mean snapshot age",
            "Leader ahead by",
            "Late pulls",
            "Computed by",
        ],
        rows=rows,
        note="Drawn = used + discarded + under way. Snapshots are those of background rounds.",
    )


def _reached_tables(runs: Runs) -> list[Table]:
    targets = {run.target for run in runs.values() if run.target is not None}
    if not targets:
        return []
    rows = [
        [
            name,
            model.replace("_", " "),
            _or_dash(found.samples, count),
            _or_dash(found.virtual_seconds, duration),
            _or_dash(found.bytes, bytes_in_words),
        ]
        for name, run in runs.items()
        for model, found in run.reached.items()
    ]
    words = "; ".join(
        f"{metric.replace('_', ' ')} ≤ {value:g}" for metric, value in sorted(targets)
    )
    return [
        Table(
            id="reached",
            title=f"When the target was reached: {words}",
            head=["Run", "Model", "Samples", "Virtual time", "Bytes"],
            rows=rows,
            note="At the first evaluation at or below it; a dash: not in this run.",
        )
    ]


def _or_dash(value: float | None, words: object) -> str:
    return "–" if value is None else words(value)  # type: ignore[operator]


def _mean(values: Sequence[float], unit: str) -> str:
    return f"{decimal(sum(values) / len(values), 3)}{unit}" if values else "–"


def _flat(values: Mapping[str, object], under: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{under}{key} · ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for place, part in enumerate(value):
                found += _flat(part, f"{under}{key} {place + 1} · ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((f"{under}{key}".replace("_", " "), text))
    return found


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:
        return ""
