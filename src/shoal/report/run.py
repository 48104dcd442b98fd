"""A run directory read into the columns, events and tables that figures and pages are made from.

Nothing here draws or formats. Whatever is missing or torn becomes a note, never an exception: a
page about a run that crashed is wanted most of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from shoal.errors import UsageError
from shoal.fleet.run_config import configuration
from shoal.report.columns import (
    Row,
    Steps,
    Worker,
    columns_of,
    count_samples,
    number,
    place_events,
    workers_of,
)

MEMBERSHIP = ("join", "leave", "kill")
LIGHT = ("hang", "fleet_lost", "coordinator_restarted", "resume", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory in memory.

    Args:
        directory: where it was read from.
        config: what the workers described (``run.json``), empty if nothing is known.
        summary: ``summary.json``, empty if there is none.
        finished: whether the run has ended in order.
        steps: the committed steps, in order.
        events: membership changes and the lighter events, in order, each with ``at`` (samples) and
            ``seconds`` (since the start of the run) added.
        evaluations: rows of kind ``evaluate``, in order, with the same two fields added.
        workers: one entry per worker, in order of appearance.
        counts: samples ``used``, ``repeated`` and ``missed``; empty when nothing tells.
        notes: one sentence for each thing that makes the data partial.
    """

    directory: Path
    config: Row
    summary: Row
    finished: bool
    steps: Steps
    events: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    workers: tuple[Worker, ...]
    counts: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """The run's name: that of its directory."""
        return self.directory.resolve().name

    @property
    def changes(self) -> tuple[Row, ...]:
        """The events that changed the membership."""
        return tuple(row for row in self.events if row["kind"] in MEMBERSHIP)

    @property
    def seconds(self) -> float:
        """How long the run took or has taken so far; NaN when nothing tells."""
        told = number(self.summary.get("seconds"))
        if not math.isnan(told):
            return told
        last = [number(row.get("seconds")) for row in (*self.events, *self.evaluations)]
        last += [float(self.steps.seconds[-1])] if len(self.steps) else []
        known = [value for value in last if not math.isnan(value)]
        return max(known) if known else math.nan


def find_run(run: Path) -> Path:
    """``run`` itself, or the run of that name under ``runs/`` if only that is a directory."""
    named = Path("runs") / run
    return named if not run.is_dir() and named.is_dir() else run


def is_run_directory(directory: Path) -> bool:
    """Whether ``directory`` holds at least one of the files a supervisor or worker writes."""
    names = ("events.jsonl", "run.json", "summary.json", "metrics")
    return directory.is_dir() and any((directory / name).exists() for name in names)


def load_run(directory: Path) -> Run:
    """Read a run directory, finished or not.

    Args:
        directory: holds ``events.jsonl``, ``metrics/*.jsonl``, ``summary.json`` and ``run.json``;
            each may be missing.

    Returns:
        The run; ``notes`` says what was missing or torn.

    Raises:
        UsageError: ``directory`` is not a run directory.
    """
    if not is_run_directory(directory):
        what = (
            "holds none of events.jsonl, run.json, metrics/"
            if directory.is_dir()
            else "no such directory"
        )
        raise UsageError(
            f"RUN = {str(directory)!r}: {what}; a run directory is what `shoal run` writes "
            "(runs/NAME unless --out said otherwise)"
        )
    notes: list[str] = []
    config = _read_object(directory / "run.json", notes)
    summary = _read_object(directory / "summary.json", notes)
    events = _read_journal(directory / "events.jsonl", notes)
    config = configuration(config, events)
    rows: list[Row] = []
    for path in sorted((directory / "metrics").glob("*.jsonl")):
        rows += [{"worker": path.stem, **row} for row in _read_journal(path, notes)]
    chain, lineage = _committed(rows, events)
    finished = bool(summary) or _has_finished(events)
    if not finished:
        notes.append(_unfinished(directory))
    start = _start(events, chain)
    steps = columns_of(chain, start)
    marked = place_events(events, steps, start)
    notes += _not_finite(steps)
    return Run(
        directory=directory,
        config=config,
        summary=summary,
        finished=finished,
        steps=steps,
        events=tuple(row for row in marked if row.get("kind") in (*MEMBERSHIP, *LIGHT)),
        evaluations=tuple(row for row in marked if row.get("kind") == "evaluate"),
        workers=workers_of(lineage, marked, _micro_batch(config)),
        counts=_counts(summary, chain),
        notes=tuple(notes),
    )


def _read_object(path: Path, notes: list[str]) -> Row:
    """One JSON document; a missing one is empty, a broken one is empty and noted."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error}); the page does without it.")
        return {}
    if isinstance(value, dict):
        return cast(Row, value)
    notes.append(f"{path.name} is not a JSON object; the page does without it.")
    return {}


def _read_journal(path: Path, notes: list[str]) -> list[Row]:
    """The rows of one journal; a torn last line is left out and noted."""
    from shoal.ledger.journal import read

    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(0, 2)
        if stream.tell():
            stream.seek(-1, 2)
            if stream.read(1) != b"\n":
                notes.append(
                    f"The last line of {path.name} is torn or still being written; it is left out."
                )
    return [row for row in cast("list[object]", read(path)) if isinstance(row, dict)]


def _committed(rows: Sequence[Row], events: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The committed steps, one row each and oldest first; and the rows of all workers for them."""
    from shoal.fleet.supervisor.lineage import committed
    from shoal.fleet.supervisor.summary import NEW_STARTS

    whole = [row for row in rows if "row" in row and math.isfinite(number(row.get("commits")))]
    begun = [number(row.get("time")) for row in events if row.get("kind") in NEW_STARTS]
    since = max((time for time in begun if math.isfinite(time)), default=0.0)
    chain = committed(whole, since)
    ids = {row["row"] for row in chain}
    return chain, [row for row in whole if row["row"] in ids]


def _micro_batch(config: Row) -> int | None:
    value = config.get("micro_batch")
    return value if isinstance(value, int) and value > 0 else None


def _has_finished(events: Sequence[Row]) -> bool:
    """Whether the workers said that they were done, and nothing was started after that."""
    kinds = [row.get("kind") for row in events]
    return "finish" in kinds and "start" not in kinds[kinds.index("finish") :]


def _unfinished(directory: Path) -> str:
    """Why there is no summary: the run goes on, or it ended without writing one."""
    if (directory / "control.json").exists():
        return "The run is still going, or its supervisor was killed: there is no summary yet."
    return "There is no summary: the run did not end in order. Figures are what its workers wrote."


def _not_finite(steps: Steps) -> list[str]:
    """A sentence about committed steps whose loss was not finite, if there were any."""
    bad = np.flatnonzero(~np.isfinite(steps.loss))
    if not len(bad):
        return []
    first = steps.step[bad[0]]
    return [
        f"The training loss is not finite at {len(bad):,} of {len(steps):,} committed steps, "
        f"first at step {first:,.0f}."
    ]


def _start(events: Sequence[Row], chain: Sequence[Row]) -> float:
    """The clock's reading when the run began: the earliest time anybody wrote."""
    times = [number(row.get("time")) for row in (*events, *chain)]
    known = [value for value in times if math.isfinite(value)]
    return min(known) if known else 0.0


def _counts(summary: Row, chain: Sequence[Row]) -> dict[str, int]:
    """How often samples were used: the summary's word, else counted from the committed shares."""
    told = {key: number(summary.get(f"samples_{key}")) for key in ("used", "repeated", "missed")}
    if all(not math.isnan(value) for value in told.values()):
        return {key: int(value) for key, value in told.items()}
    return count_samples(chain)
