"""Checks of a machine and of a run for the traps that cost people days, each with its way out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import UsageError
from shoal.fleet.findings import Check, worst
from shoal.fleet.machine import Machine, look
from shoal.fleet.machine_checks import directory_checks, machine_checks
from shoal.fleet.outlook import Outlook, outlook
from shoal.fleet.run_config import Config, configuration
from shoal.fleet.training_checks import config_checks
from shoal.ledger import journal

__all__ = ["Check", "Machine", "Outlook", "examine", "outlook", "read_run", "worst"]


def examine(run: Path | None = None, *, machine: Machine | None = None) -> list[Check]:
    """Check this machine and, if given, a run.

    Args:
        run: a run directory; without it only the machine is checked.
        machine: facts to judge instead of looking at this machine.

    Returns:
        All findings, the good ones too, grouped by what they are about.

    Raises:
        UsageError: ``run`` is not a run directory, or its files cannot be read.
    """
    if run is None:
        return machine_checks(machine or look())
    config, control = read_run(run)
    facts = machine or look(run, control)
    workers = config.get("workers")
    checks = machine_checks(facts, workers=workers if isinstance(workers, int) else 1)
    checks += directory_checks(facts, config)
    return checks + (config_checks(config, facts) if config else [])


def read_run(run: Path) -> tuple[Config, Config]:
    """Configuration and control endpoint of a run directory; empty where one is not there.

    Raises:
        UsageError: not a run directory, or a file that is no JSON object.
    """
    names = ("run.json", "control.json", "events.jsonl", "metrics")
    if not any((run / name).exists() for name in names):
        what = f"holds none of {', '.join(names)}" if run.is_dir() else "no such directory"
        raise UsageError(
            f"RUN = {str(run)!r}: {what}; a run directory is what `shoal run` writes; give its path"
        )
    events = run / "events.jsonl"
    rows = journal.read(events) if events.exists() else []
    config = configuration(_read_object(run / "run.json"), rows)
    return config, _read_object(run / "control.json")


def _read_object(path: Path) -> Config:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); it is a JSON object") from None
    if not isinstance(value, Mapping):
        raise UsageError(f"{path}: holds a {type(value).__name__}; it is a JSON object")
    return value
