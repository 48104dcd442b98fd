"""``summary.json``: what a run did, from its own files alone; the newest state decides."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.fleet.supervisor.endings import RESUMABLE
from shoal.fleet.supervisor.lineage import committed, coverage
from shoal.ledger.journal import read

Row = Mapping[str, object]
MEMBERSHIP_KINDS = ("join", "leave", "kill")
NEW_STARTS = ("start", "fleet_lost")  # all workers after it go on from a checkpoint


def build(run_dir: Path, exit_code: int, more: Iterable[Row] = ()) -> dict[str, object]:
    """The summary of the run in ``run_dir``, over all its starts and resumptions.

    Args:
        run_dir: holds ``events.jsonl`` and ``metrics/*.jsonl``; either may be missing.
        exit_code: what ``shoal run`` exits with.
        more: events that could not be written.

    Raises:
        OSError: a file cannot be read.
        UsageError: a file is damaged.
    """
    events = [*_rows([run_dir / "events.jsonl"]), *map(dict, more)]
    begun = [_number(event, "time") for event in events if event.get("kind") in NEW_STARTS]
    metrics = _rows(sorted((run_dir / "metrics").glob("*.jsonl")))
    chain = committed(metrics, since=max(begun, default=0.0))
    expected = _expected(events)
    used, repeated, missed = coverage(chain, expected)
    last = chain[-1] if chain else {}
    return {
        "run": run_dir.name,
        "seconds": round(_running_seconds(events), 3),
        "steps": len(chain),
        "samples_expected": expected,
        "samples_used": used,
        "samples_repeated": repeated,
        "samples_missed": missed,
        "loss": last.get("loss"),
        "restarts_of_survivors": sum(event.get("survivor") is True for event in events),
        "respawns": sum(event.get("kind") == "respawn" for event in events),
        "events": [_membership(event) for event in events if event.get("kind") in MEMBERSHIP_KINDS],
        "workers": {
            str(event["worker"]): event.get("code")
            for event in events
            if event.get("kind") == "worker_exited"
        },
        "evaluations": [dict(event) for event in events if event.get("kind") == "evaluate"],
        "resumable": exit_code == RESUMABLE,
        "exit_code": exit_code,
    }


def write_json(path: Path, document: Mapping[str, object], mode: int = 0o644) -> None:
    """Write a JSON document so that readers see the old one or the new one, never a part.

    Raises:
        OSError: it could not be written; the old one is there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(as_text(document) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def as_text(document: Mapping[str, object]) -> str:
    """The document as :func:`write_json` writes it."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _running_seconds(events: list[dict[str, object]]) -> float:
    """Seconds between each start and the last event after it; not those in between."""
    total, started, latest = 0.0, None, 0.0
    for event in events:
        now = _number(event, "time")
        if event.get("kind") == "start":
            total += latest - started if started is not None else 0.0
            started = now
        latest = now
    return total + (latest - started if started is not None else 0.0)


def _rows(paths: Iterable[Path]) -> list[dict[str, object]]:
    return [row for path in paths if path.exists() for row in read(path)]


def _expected(events: list[dict[str, object]]) -> int | None:
    """Samples the run was to train, as the workers last said."""
    for event in reversed(events):
        for key in ("samples_expected", "total_samples"):
            value = event.get(key)
            if isinstance(value, int):
                return value
        config = event.get("config")
        if isinstance(config, Mapping) and isinstance(config.get("total_samples"), int):
            return config["total_samples"]
    return None


def _membership(event: Row) -> dict[str, object]:
    return {key: value for key, value in event.items() if key != "worker"}


def _number(event: Row, key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _finite(value: object) -> object:
    """The same with non-finite numbers as text: strict JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
