"""The layout of the released measurements, and how its words map to ours.

    [group/]dataset/model/optimizer/BATCH/study.json
    [group/]dataset/model/optimizer/BATCH/TRIAL/metadata.json
    [group/]dataset/model/optimizer/BATCH/TRIAL/measurements.csv

Its "study" is our search, its "workload" our curve. This codec alone reads and writes the field
``batch_size``. What we know beyond the layout goes under the key ``_shoal`` of both JSON files and into
``bounds.csv`` beside the measurements; the released loader looks at none of them.

Source: the released database of Shallue et al. 2019 as restated in sections 1.4 and 4 of the notes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shoal.errors import UsageError

COMPLETE, INFEASIBLE, INCOMPLETE = "COMPLETE", "INFEASIBLE", "INCOMPLETE"
STATUSES = (COMPLETE, INFEASIBLE, INCOMPLETE)
OURS = "_shoal"

_PARAMETERS: dict[str, str] = {
    "learning_rate": "lr",
    "learning_rate_decay_steps": "decay_steps",
    "end_learning_rate_factor": "end_factor",
}
_RELEASED_PARAMETERS: dict[str, str] = {ours: theirs for theirs, ours in _PARAMETERS.items()}
_OPTIMIZERS = {"heavy_ball": "momentum", "nesterov": "nesterov_momentum"}
_SCALES = {
    "linear": "LINEAR_SCALE",
    "log": "LOG_SCALE",
    "reverse_log": "REVERSE_LOG_SCALE",
}
_OUR_SCALES = {theirs: ours for ours, theirs in _SCALES.items()}


class Problem(NamedTuple):
    """Something in an archive that could not be used, or not as it is."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchFolder:
    """One BATCH directory.

    Args:
        path: the directory.
        group: what stands before ``dataset``; empty as a rule.
        dataset, model, optimizer: as its ``study.json`` says, or its path where that is broken.
        global_batch: samples per step.
        repeat: of ours; 0 for released ones.
        curve: our name of the curve.
        train_steps: steps of a complete trial; 0 for a time budget; None if unknown.
        early_stopping: whether bad trials were ended.
        parameter_configs: the search space, as JSON text.
        extra: what we had written under ``_shoal``, as JSON text; empty for released ones.
        trials: ids of the TRIAL directories, rising.
    """

    path: Path
    group: str
    dataset: str
    model: str
    optimizer: str
    global_batch: int
    repeat: int = 0
    curve: str
    train_steps: int | None
    early_stopping: bool | None
    parameter_configs: str
    extra: str = ""
    trials: list[int] = field(default_factory=list)

    @property
    def study(self) -> str:
        """Our study: ``[group/]dataset/model``."""
        return "/".join(part for part in (self.group, self.dataset, self.model) if part)


def find_searches(directory: Path) -> tuple[list[SearchFolder], list[Problem]]:
    """All BATCH directories under ``directory``, by study, curve and batch as a number.

    Returns:
        Them, and what in their names and ``study.json`` could not be used.

    Raises:
        UsageError: there are none.
    """
    found: list[SearchFolder] = []
    problems: list[Problem] = []
    for path in _batch_directories(directory, problems):
        folder = _search_folder(directory, path, problems)
        if folder is not None:
            found.append(folder)
    if not found:
        said = f"; {problems[0].path}: {problems[0].reason}" if problems else ""
        raise UsageError(
            f"archive = {directory}; it holds no [group/]dataset/model/optimizer/BATCH/study.json{said}; "
            "give the directory above the data sets"
        )
    found.sort(key=lambda f: (f.study, f.optimizer, f.curve, f.repeat, f.global_batch))
    return found, sorted(problems)


def _batch_directories(directory: Path, problems: list[Problem]) -> Iterator[Path]:
    """Directories with a ``study.json``, or, where that is gone, with trials; none is looked into further."""
    waiting = [directory]
    while waiting:
        path = waiting.pop()
        if (path / "study.json").exists():
            yield path
            continue
        try:
            inside = [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
        except OSError as error:
            problems.append(Problem(str(path), f"{error.strerror}; left out"))
            continue
        if any(p.name.isdecimal() and (p / "metadata.json").exists() for p in inside):
            yield path
        else:
            waiting += inside


def _search_folder(root: Path, path: Path, problems: list[Problem]) -> SearchFolder | None:
    parts = path.relative_to(root).parts
    if not path.name.isdecimal():
        problems.append(Problem(str(path), "not a batch size as a whole number; left out"))
        return None
    content = _study_json(path / "study.json", problems)
    names = dict(zip(("dataset", "model", "optimizer"), parts[-4:-1], strict=False))
    if len(parts) < 4:
        names = {}
    facts: dict[str, str] = {}
    for name in ("dataset", "model", "optimizer"):
        value = content.get(name, names.get(name))
        if not isinstance(value, str):
            problems.append(Problem(str(path / "study.json"), f"no {name}; search left out"))
            return None
        facts[name] = value
    batch = content.get("batch_size", int(path.name))
    if batch != int(path.name):
        reason = f"batch_size {batch}, but its directory says {path.name}; the directory counts"
        problems.append(Problem(str(path / "study.json"), reason))
    ours = content.get(OURS)
    ours = ours if isinstance(ours, dict) else {}
    train_steps, stopping = content.get("train_steps"), content.get("early_stopping")
    return SearchFolder(
        path=path,
        group=str(ours["group"]) if "group" in ours else "/".join(parts[:-4]),
        **facts,
        global_batch=int(path.name),
        repeat=int(ours.get("repeat", 0)),
        curve=str(ours.get("curve", facts["optimizer"])),
        train_steps=train_steps if isinstance(train_steps, int) else None,
        early_stopping=stopping if isinstance(stopping, bool) else None,
        parameter_configs=json.dumps(content.get("parameter_configs", {})),
        extra=json.dumps(ours) if ours else "",
        trials=_trial_ids(path, problems),
    )


def _study_json(path: Path, problems: list[Problem]) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"holds a {type(content).__name__}")
    except (OSError, ValueError) as error:
        problems.append(Problem(str(path), f"{error}; names taken from the path"))
        return {}
    return content


def _trial_ids(path: Path, problems: list[Problem]) -> list[int]:
    ids: list[int] = []
    for entry in sorted(path.iterdir()):
        if entry.name == "study.json":
            continue
        if entry.name.isdecimal() and str(int(entry.name)) == entry.name and entry.is_dir():
            ids.append(int(entry.name))
        elif not entry.name.startswith("."):
            problems.append(Problem(str(entry), "not a trial's directory; left out"))
    return sorted(ids)


class Metadata(NamedTuple):
    """What a ``metadata.json`` says, in our words.

    Args:
        status: one of :data:`STATUSES`.
        steps: taken.
        parameters: under our names.
        extra: what we had written under ``_shoal``, as JSON text; empty for released ones.
        remark: something odd about it that does not make it useless; empty if there is nothing.
    """

    status: str
    steps: int | None
    parameters: dict[str, float]
    extra: str
    remark: str


def read_metadata(content: bytes, trial: int) -> Metadata:
    """Read a ``metadata.json``.

    Raises:
        ValueError: it is broken; the text says how.
    """
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}, not an object")
    status = found.get("status")
    if status not in STATUSES:
        raise ValueError(f"status {status!r}; known are {', '.join(STATUSES)}")
    parameters = found.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError("parameters is no object")
    steps = found.get("steps")
    number = found.get("trial_id", trial)
    remark = "" if number == trial else f"trial_id {number}; the directory's number counts"
    ours = found.get(OURS)
    return Metadata(
        str(status),
        int(steps) if isinstance(steps, int | float) and math.isfinite(steps) else None,
        {_PARAMETERS.get(str(n), str(n)): float(value) for n, value in parameters.items()},
        json.dumps(ours) if isinstance(ours, dict) else "",
        remark,
    )


def released_parameters(parameters: Mapping[str, float]) -> dict[str, float]:
    """Parameters under the released names."""
    return {_RELEASED_PARAMETERS.get(name, name): value for name, value in parameters.items()}


def released_optimizer(optimizer: str) -> str:
    """The released name of an optimizer of ours."""
    return _OPTIMIZERS.get(optimizer, optimizer)


def parameter_configs(space: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The released form of a search space given as the plain values of ``study.json``."""
    found: dict[str, object] = {}
    for name, facts in space.items():
        kind = str(facts["scale"])
        if kind == "discrete":
            config: dict[str, object] = {"type": "DISCRETE", "feasible_points": facts["values"]}
        elif kind == "integer":
            scale = "LOG_SCALE" if facts.get("log") else ""
            config = {"type": "INTEGER", "scale": scale}
        else:
            config = {"type": "DOUBLE", "scale": _SCALES[kind]}
        if kind != "discrete":
            config |= {"min_value": facts["min"], "max_value": facts["max"]}
        found[_RELEASED_PARAMETERS.get(name, name)] = config
    return found


def space_facts(configs: str) -> dict[str, dict[str, object]]:
    """A search space as the plain values of our ``study.json``, from ``parameter_configs`` as JSON text.

    Parameters of a form that is not known are left out.
    """
    found: dict[str, dict[str, object]] = {}
    for theirs, config in json.loads(configs).items():
        name = _PARAMETERS.get(str(theirs), str(theirs))
        kind = config.get("type")
        ends = {"min": config.get("min_value"), "max": config.get("max_value")}
        if kind == "DISCRETE":
            found[name] = {"scale": "discrete", "values": config.get("feasible_points", [])}
        elif kind == "INTEGER":
            is_log = config.get("scale") == "LOG_SCALE"
            found[name] = {"scale": "integer", **ends, **({"log": True} if is_log else {})}
        elif kind == "DOUBLE" and config.get("scale") in _OUR_SCALES:
            found[name] = {"scale": _OUR_SCALES[config["scale"]], **ends}
    return found
