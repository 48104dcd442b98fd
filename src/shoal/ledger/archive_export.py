"""A study into the released layout, which the released loader, and everyone else's, can read.

A search becomes a BATCH directory. Repeats become groups ``repeat_0/``, ``repeat_1/``, ... if there are
several. ``train_steps`` is the step to which the search's analysis looks, which every trial that counts
reached; trials that were not trained that far are INCOMPLETE. A lower bound is no measurement: its cell
stays empty, and ``bounds.csv`` holds it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.ledger.archive_layout import (
    COMPLETE,
    INCOMPLETE,
    INFEASIBLE,
    OURS,
    parameter_configs,
    released_optimizer,
    released_parameters,
)

if TYPE_CHECKING:  # one room above; only its values are read
    from shoal.study.records import Curve
    from shoal.study.tables import SearchData, StudyTables

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def export(
    study: StudyTables,
    directory: str | os.PathLike[str],
    *,
    dataset: str | None = None,
    model: str | None = None,
) -> int:
    """Write a study in the released layout.

    Args:
        study: as ``read_study`` gives it.
        directory: which must not exist, or be empty.
        dataset: its name there; the workload's when None.
        model: its name there; the study's when None.

    Returns:
        How many trials were written.

    Raises:
        UsageError: the directory holds something, the study has no trials, or a name cannot be a
            directory's.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"directory = {directory}; it is not empty; give another one")
    if not study.searches:
        raise UsageError(
            "study = no trial was begun yet, so there is nothing to export; run it first"
        )
    dataset = dataset or _as_name(study.spec.get("workload", "dataset"))
    model = model or _as_name(study.spec.get("name", "model"))
    for field, name in (("dataset", dataset), ("model", model)):
        if not _NAME.fullmatch(name) or name.strip(".") == "":
            raise UsageError(f"{field} = {name!r}; letters, digits, _, . and -; give another name")
    several = len({key.repeat for key in study.searches}) > 1
    optimizers = _optimizers(study)
    written = 0
    for data in study:
        group = Path(f"repeat_{data.key.repeat}") if several else Path()
        optimizer = optimizers[data.key.curve]
        place = directory / group / dataset / model / optimizer / str(data.key.global_batch)
        place.mkdir(parents=True)
        steps = _train_steps(study.spec, data)
        facts = _study_json(study.spec, data, steps, dataset, model, optimizer)
        (place / "study.json").write_text(json.dumps(facts, indent=2))
        for i, trial in enumerate(data.trials):
            _write_trial(place / str(trial.id), data, i, steps, facts)
            written += 1
    return written


def _as_name(value: object) -> str:
    """``package.module:function`` or ``path/file.py:function`` without what a directory cannot be called."""
    name = str(value).rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "unnamed"


def _curve_facts(spec: Mapping[str, object], curve: str) -> Mapping[str, object]:
    curves = spec.get("curves")
    facts = curves.get(curve) if isinstance(curves, Mapping) else None
    return facts if isinstance(facts, Mapping) else {}


def _optimizers(study: StudyTables) -> dict[str, str]:
    """Directory names of the curves: of their optimizers, or their own where two have the same."""
    names = {
        curve: released_optimizer(str(_curve_facts(study.spec, curve).get("optimizer", curve)))
        for curve in study.curves()
    }
    taken = list(names.values())
    return {c: name if taken.count(name) == 1 else c for c, name in names.items()}


def _train_steps(spec: Mapping[str, object], data: SearchData) -> int:
    if data.end is not None:
        return data.end
    budget = spec.get("budget")
    if isinstance(budget, Mapping) and "max_steps" in budget:
        return int(budget["max_steps"])
    return max((curve.step for curve in data.curves), default=0)


def _study_json(
    spec: Mapping[str, object],
    data: SearchData,
    steps: int,
    dataset: str,
    model: str,
    optimizer: str,
) -> dict[str, object]:
    facts = _curve_facts(spec, data.key.curve)
    space = facts.get("space", {})
    others = facts.get("space_at", {})
    if isinstance(others, Mapping):
        space = others.get(str(data.key.global_batch), space)
    budget = spec.get("budget")
    full = bool(budget.get("full")) if isinstance(budget, Mapping) else False
    return {
        "batch_size": data.key.global_batch,
        "dataset": dataset,
        "model": model,
        "optimizer": optimizer,
        "early_stopping": not full,
        "train_steps": steps,
        "parameter_configs": parameter_configs(space) if isinstance(space, Mapping) else {},
        OURS: {
            "group": "",
            "curve": data.key.curve,
            "repeat": data.key.repeat,
            "end": data.end,
            "state": data.state,
            "draws": data.draws,
        },
    }


def _status(data: SearchData, i: int, steps: int) -> str:
    curve, outcome = data.curves[i], data.outcomes[i]
    if outcome == "diverged" or curve.diverged_at is not None:
        return INFEASIBLE
    if outcome in ("crashed", "preempted") or curve.step < steps:
        return INCOMPLETE
    return COMPLETE


def _write_trial(
    place: Path, data: SearchData, i: int, steps: int, facts: Mapping[str, object]
) -> None:
    place.mkdir()
    trial, curve, outcome = data.trials[i], data.curves[i], data.outcomes[i]
    ours = {
        "outcome": None if outcome is None else str(outcome),
        "attempt": data.attempts[i] if data.attempts else "",
        "engine": data.engines[i] if data.engines else "",
        "seed": trial.seed,
        "address": trial.address,
        "unit": list(trial.unit),
        "diverged_at": [e.step for e in curve.evaluations if e.diverged],
    }
    metadata = {
        "trial_id": trial.id,
        "status": _status(data, i, steps),
        "steps": max(curve.step, 0),
        "parameters": released_parameters(trial.parameters),
        "_internal_study_name": "/".join(str(facts[k]) for k in ("dataset", "model", "optimizer")),
        "_internal_trial_id": trial.id,
        OURS: ours,
    }
    (place / "metadata.json").write_text(json.dumps(metadata))
    measurements, bounds = _tables(curve)
    (place / "measurements.csv").write_text(measurements)
    if bounds:
        (place / "bounds.csv").write_text(bounds)


def _tables(curve: Curve) -> tuple[str, str]:
    """``measurements.csv``, and ``bounds.csv`` or nothing."""
    names = sorted({name for evaluation in curve.evaluations for name in evaluation.metrics})
    exact, bounded = io.StringIO(), io.StringIO()
    rows, bounds = csv.writer(exact, lineterminator="\n"), csv.writer(bounded, lineterminator="\n")
    rows.writerow(["step", *names])
    for evaluation in curve.evaluations:
        cells: list[str] = []
        for name in names:
            measured = evaluation.metrics.get(name)
            if measured is None:
                cells.append("")
            elif measured.bound == "=" or not math.isfinite(measured.value):
                cells.append(repr(float(measured.value)))
            else:
                cells.append("")
                bounds.writerow(
                    [evaluation.step, name, repr(float(measured.value)), measured.bound]
                )
        rows.writerow([evaluation.step, *cells])
    found = bounded.getvalue()
    return exact.getvalue(), f"step,metric,value,bound\n{found}" if found else ""
