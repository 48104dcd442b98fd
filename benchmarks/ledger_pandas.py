"""The peer of the ledger's benchmark: pandas doing what the released loader and analysis do.

Written from the description of what they do, not from their code: per study one table indexed by trial and
step; steps to result by filtering, sorting by step and trial and taking the first row; best error by
sorting all measurements within the budget and taking the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Table = Any  # pandas.DataFrame; pandas need not be installed

BUDGETS = (0.25, 0.5, 1.0, 2.0)
"""Of a figure, in multiples of what its workload's smallest batch needs."""


def load(directory: Path) -> dict[str, tuple[list[int], Table]]:
    """Every study of an archive: ids of its COMPLETE trials in order, and the table of all its trials."""
    import pandas

    found: dict[str, tuple[list[int], Table]] = {}
    for path in sorted(directory.rglob("study.json")):
        json.loads(path.read_text())
        tables, complete = [], []
        for trial in sorted(int(p.name) for p in path.parent.iterdir() if p.is_dir()):
            place = path.parent / str(trial)
            metadata = json.loads((place / "metadata.json").read_text())
            if metadata["status"] == "COMPLETE":
                complete.append(trial)
            table = pandas.read_csv(place / "measurements.csv")
            table["trial_id"] = trial
            tables.append(table)
        table = pandas.concat(tables, ignore_index=True)
        found[str(path.parent.relative_to(directory))] = (
            complete,
            table.set_index(["trial_id", "step"]),
        )
    return found


def from_arrays(trial: np.ndarray, step: np.ndarray, values: Mapping[str, np.ndarray]) -> Table:
    """The same table of a study whose numbers are in memory."""
    import pandas

    table = pandas.DataFrame({"trial_id": trial, "step": step, **values})
    return table.set_index(["trial_id", "step"])


def first_complete(complete: Sequence[int], table: Table, count: int) -> Table:
    """The rows of the first so many complete trials."""
    return table[table.index.get_level_values("trial_id").isin(complete[:count])]


def steps_to_result(table: Table, metric: str, goal: float, larger: bool) -> tuple[int, int] | None:
    """(steps, trial) of the first row by step and trial that is strictly better than the goal."""
    better = table[table[metric] > goal] if larger else table[table[metric] < goal]
    if better.empty:
        return None
    first = better.reset_index().sort_values(["step", "trial_id"]).iloc[0]
    return int(first["step"]), int(first["trial_id"])


def best_error(table: Table, metric: str, budget: int, larger: bool) -> float:
    """The best value within a budget of steps; NaN if there is none."""
    within = table[table.index.get_level_values("step") <= budget]
    if within.empty:
        return float("nan")
    return float(within.sort_values(metric, ascending=not larger)[metric].iloc[0])
