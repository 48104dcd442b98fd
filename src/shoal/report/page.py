"""The page of one run: every number formatted, every figure embedded, one file, no scripts."""

from __future__ import annotations

import base64
import csv
import io
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.report.columns import COLUMNS, Row, number
from shoal.report.run import MEMBERSHIP, Run, load_run
from shoal.report.series import sample_range
from shoal.report.templates import environment
from shoal.report.wording import clock, count, decimal, duration, headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSV_ROWS = 20_000
WIDE, NARROW = 9.2, 4.1


def write(directory: Path, run: Run | None = None) -> Path:
    """Write ``directory/report.html``, of ``run`` if it has been loaded already.

    See :func:`shoal.report.write_run_report`.
    """
    run = run if run is not None else load_run(directory)
    text = render(run)
    path = directory / "report.html"
    partial = path.with_suffix(f".html.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(run: Run) -> str:
    """The whole page as text.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    pages = environment()
    from shoal.report.figures import overview

    lead, rest = _sentences(headline(run))
    titles = [event_title(row) for row in run.events]
    return pages.get_template("run.html.j2").render(
        name=run.name,
        lead=lead,
        rest=rest,
        standing=_standing(run),
        dataset=str(run.summary.get("dataset") or ""),
        began=_began(run),
        notes=run.notes,
        wide=svg(overview(run, width=WIDE), "wide", titles, headline(run)),
        narrow=svg(overview(run, width=NARROW), "narrow", titles, headline(run)),
        has_steps=len(run.steps) > 0,
        csv=_data_uri(steps_csv(run)),
        csv_every=_csv_every(run),
        events=[_event(row) for row in run.events if row["kind"] != "checkpoint"],
        checkpoints=_checkpoints(run),
        comparison=_comparison(run.summary),
        accounts=_accounts(run),
        workers=_workers(run),
        config=_config(run.config),
        version=_version(),
        written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    )


def _sentences(text: str) -> tuple[str, str]:
    """The headline's first clause and the rest of it, each as a sentence of its own."""
    lead, _, rest = text.rstrip(".").partition("; ")
    return f"{lead}.", f"{rest[:1].upper()}{rest[1:]}." if rest else ""


def svg(figure: Figure, prefix: str, titles: Sequence[str], label: str) -> str:
    """A figure as inline SVG that scales with the page and shares no id with another one.

    Args:
        figure: any matplotlib figure.
        prefix: put before every id, since two inline drawings in one page share one space of ids.
        titles: text shown when a pointer rests on the mark of the event with that number.
        label: what the drawing shows, for those who cannot see it.
    """
    import matplotlib

    buffer = io.StringIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": prefix,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(
        rf'<g id="{prefix}-event-(\d+)-[^"]*">',
        lambda found: f"{found[0]}<title>{escape(titles[int(found[1])])}</title>",
        text,
    )
    text = re.sub(r'(<svg\b[^>]*?)\s(?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?)\s(?:width|height)="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1).strip()


def event_title(row: Row) -> str:
    """One event in one line: what, who, how many workers, when, and what it cost."""
    parts = [str(row["kind"]).replace("_", " ")]
    names = row.get("names")
    if isinstance(names, (list, tuple)) and names:
        parts.append("of " + ", ".join(map(str, names)))
    if "workers_before" in row and "workers_after" in row:
        parts.append(f"({row['workers_before']} → {row['workers_after']} workers)")
    text = " ".join(parts)
    if math.isfinite(number(row.get("at"))):
        text += f", sample {count(number(row['at']))}"
    pause = number(row.get("seconds_without_progress"))
    return text + (f", {duration(pause)} without progress" if math.isfinite(pause) else "")


def steps_csv(run: Run) -> str:
    """The table behind the figures, one row per committed step (thinned evenly when very long)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    columns = [getattr(run.steps, name)[:: _csv_every(run)] for name in COLUMNS]
    for values in zip(*columns, strict=True):
        writer.writerow(["" if np.isnan(value) else f"{value:.10g}" for value in values])
    return buffer.getvalue()


def _csv_every(run: Run) -> int:
    return max(1, math.ceil(len(run.steps) / CSV_ROWS))


def _data_uri(text: str) -> str:
    return "data:text/csv;base64," + base64.b64encode(text.encode()).decode()


def _standing(run: Run) -> str:
    """How the run ended, in a word or two."""
    if not run.finished:
        return "not finished"
    if run.summary.get("resumable"):
        return "stopped in order, can be resumed"
    code = run.summary.get("exit_code")
    return f"failed with exit code {code}" if code else "finished"


def _began(run: Run) -> str:
    """Local date and time of the run's first event, empty when nothing tells."""
    times = [number(row.get("time")) for row in (*run.events, *run.evaluations)]
    known = [value for value in times if math.isfinite(value) and value > 86_400]
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(min(known))) if known else ""


def _event(row: Row) -> dict[str, str]:
    """One row of the table of events, as texts."""
    names = row.get("names") or row.get("worker")
    who = ", ".join(map(str, names)) if isinstance(names, (list, tuple)) else str(names or "")
    before, after = number(row.get("workers_before")), number(row.get("workers_after"))
    lr, target = number(row.get("lr")), number(row.get("lr_target"))
    pause = number(row.get("seconds_without_progress"))
    known = math.isfinite(before) and math.isfinite(after)
    moves = math.isfinite(target) and not math.isclose(lr, target, rel_tol=1e-9)
    return {
        "kind": str(row["kind"]).replace("_", " "),
        "mark": str(row["kind"]),
        "light": "" if row["kind"] in MEMBERSHIP else "light",
        "time": clock(number(row.get("seconds"))),
        "samples": count(number(row.get("at"))),
        "step": count(number(row.get("step"))),
        "workers": f"{count(before)} → {count(after)}" if known else "–",
        "who": who or "–",
        "global_batch": count(number(row.get("global_batch"))),
        "lr": f"{decimal(lr)} → {decimal(target)}" if moves else decimal(lr),
        "ramp_end": count(number(row.get("ramp_end_step"))),
        "pause": duration(pause) if math.isfinite(pause) else "–",
    }


def _checkpoints(run: Run) -> str:
    """One sentence about checkpoints, which would drown the table."""
    rows = [row for row in run.events if row["kind"] == "checkpoint"]
    if not rows:
        return ""
    last = rows[-1]
    many = "1 checkpoint" if len(rows) == 1 else f"{count(len(rows))} checkpoints"
    return f"{many}, the last at sample {count(number(last['at']))}."


def _comparison(summary: Row) -> list[tuple[str, str]]:
    """Accuracies of this run and of the runs it was compared with, where the summary has them."""
    rows = (
        ("this run", "accuracy"),
        ("a fixed number of workers", "accuracy_static"),
        ("learning rate scaled at once", "accuracy_linear_at_once"),
    )
    found = [(name, number(summary.get(key))) for name, key in rows]
    shown = [(name, decimal(value, 4)) for name, value in found if math.isfinite(value)]
    return shown if len(shown) > 1 else []


def _accounts(run: Run) -> list[tuple[str, str]]:
    """Samples expected, used, repeated and missed, and restarts that no survivor should have."""
    rows = [("expected", number(run.summary.get("samples_expected")))]
    rows += [(key, float(run.counts[key])) for key in ("used", "repeated", "missed") if run.counts]
    rows += [("restarts of survivors", number(run.summary.get("restarts_of_survivors")))]
    return [(name, count(value)) for name, value in rows if math.isfinite(value)]


def _workers(run: Run) -> list[dict[str, object]]:
    """One row per worker; ``spells`` are (left, width) in per cent of the axis of samples."""
    low, high = sample_range(run)
    return [
        {
            "name": worker.name,
            "steps": count(worker.steps),
            "samples": "–" if worker.samples is None else count(worker.samples),
            "came": worker.came,
            "went": worker.went if run.finished or "at step" in worker.went else "present at last",
            "spells": [
                (
                    round(100 * (spell.first_samples - low) / (high - low), 2),
                    round(100 * (spell.last_samples - spell.first_samples) / (high - low), 2),
                )
                for spell in worker.spells
            ],
        }
        for worker in run.workers
    ]


def _config(config: Row) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configuration as groups of (name, value): plain values first, a group per object."""
    plain = [
        (key, _value(value)) for key, value in config.items() if not isinstance(value, Mapping)
    ]
    groups = [("run", plain)] if plain else []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            groups.append((key.replace("_", " "), _flat(value)))
    return [(name, [(key.replace("_", " "), text) for key, text in rows]) for name, rows in groups]


def _flat(values: Mapping[object, object], under: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name} · ")
        else:
            rows.append((name, _value(value)))
    return rows


def _value(value: object) -> str:
    """A configured value as a person writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return decimal(value, 6)
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(part) for part in value)
    return str(value)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:
        return ""
