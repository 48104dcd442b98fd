"""A simulation's recipe: one TOML file, one fleet, one or several rules on it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal.errors import UsageError
from shoal.scaling import schedules
from shoal.study.workload import load_workload
from shoal.sync.table import by_name
from shoal.toml_file import read_toml
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.clock import Pace, Stall
from shoal.world.virtual.faults import Fault
from shoal.world.virtual.links import LinkClass, Network
from shoal.world.virtual.setup import Happening, Setup
from shoal.world.virtual.stack import Optimizer

T = TypeVar("T")

_PLAIN = (
    "workers",
    "samples",
    "local_batch",
    "trigger",
    "groups",
    "seed",
    "mode",
    "together",
    "shards",
    "lost",
    "lease_steps",
    "probe_samples",
    "broadcast",
    "wire",
    "detection_seconds",
    "evaluate_every_samples",
    "models",
    "split",
    "margin",
    "different_starts",
)
_TABLES = (
    "rule",
    "optimizer",
    "schedule",
    "pace",
    "network",
    "slowdowns",
    "stalls",
    "faults",
    "events",
    "target",
)
_TOP = ("name", "workload", "workload_parameters", "runs")
_OPTIMIZER = {"name": "kind"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What ``shoal simulate`` runs.

    Args:
        name: of the recipe.
        setups: by name of the run, in order; at least one.
        settings: of each run, as the file has them.
    """

    name: str
    setups: Mapping[str, Setup]
    settings: Mapping[str, Mapping[str, object]]


def read_recipe(path: Path | str) -> Recipe:
    """Read a recipe from a TOML file.

    The keys are the fields of :class:`~shoal.world.virtual.setup.Setup`; ``rule``, ``optimizer`` and
    ``schedule`` are tables with a ``name`` and settings; ``network`` has ``intra`` and ``inter``;
    ``slowdowns`` has worker numbers as keys; ``stalls`` and ``faults`` are lists with a ``worker`` each (or
    ``workers``, a list). ``runs`` lists runs to compare: each has a ``name`` and replaces what it sets.

    Args:
        path: the file; a relative path in ``workload`` starts at its folder.

    Raises:
        UsageError: it cannot be read, a key is unknown or missing, or a value does not fit; the line
            begins with the file.
    """
    path = Path(path)
    table = read_toml(path, "the recipe's TOML file")
    try:
        return recipe_from(table, default_name=path.stem, base=path.parent)
    except (UsageError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from error


def recipe_from(
    table: Mapping[str, object], *, default_name: str = "simulation", base: Path | None = None
) -> Recipe:
    """A recipe from the plain values of its TOML file.

    Args:
        table: the values.
        default_name: where the file gives none.
        base: what a relative path in ``workload`` starts from.

    Raises:
        UsageError: a key is unknown or missing, or a value does not fit.
    """
    _known("the recipe", table, (*_TOP, *_PLAIN, *_TABLES))
    reference = table.get("workload")
    if not isinstance(reference, str):
        raise UsageError(
            f"workload = {reference!r}; the name of what is trained is needed, for example "
            'workload = "digits_mlp"'
        )
    parameters = _table(table.get("workload_parameters", {}), "workload_parameters")
    workload = load_workload(reference, parameters, base=base)
    common = {key: value for key, value in table.items() if key not in _TOP}
    runs: list[Mapping[str, object]] = [
        _table(run, "runs") for run in _list(table.get("runs", [{}]), "runs")
    ]
    setups: dict[str, Setup] = {}
    settings: dict[str, Mapping[str, object]] = {}
    for run in runs:
        _known("runs", run, ("name", *_PLAIN, *_TABLES))
        merged = common | {key: value for key, value in run.items() if key != "name"}
        name = str(run.get("name", _rule_name(merged)))
        if name in setups:
            raise UsageError(f"runs = two of the name {name!r}; give each run a name of its own")
        try:
            setups[name] = _setup(merged, workload)
        except UsageError as error:
            raise UsageError(f"run {name}: {error}" if len(runs) > 1 else str(error)) from error
        settings[name] = {"workload": reference, **merged}
    if not setups:
        raise UsageError("runs = []; list at least one run, or leave it out for a single one")
    return Recipe(name=str(table.get("name", default_name)), setups=setups, settings=settings)


def _rule_name(values: Mapping[str, object]) -> str:
    rule = values.get("rule")
    return str(rule["name"]) if isinstance(rule, Mapping) and "name" in rule else "run"


def _setup(values: Mapping[str, object], workload: Workload) -> Setup:
    if "rule" not in values or "samples" not in values:
        missing = "rule" if "rule" not in values else "samples"
        example = (
            'rule = { name = "leader", sync_every = 64 }'
            if missing == "rule"
            else "samples = 100_000"
        )
        raise UsageError(f"{missing} = missing; a simulation needs it, for example {example}")
    given: dict[str, Any] = {key: values[key] for key in _PLAIN if key in values}
    readers: Mapping[str, Callable[[object], object]] = {
        "rule": lambda value: _named(value, "rule", by_name),
        "optimizer": _optimizer,
        "schedule": lambda value: _named(value, "schedule", schedules.by_name),
        "pace": lambda value: _made(Pace, value, "pace"),
        "network": _network,
        "slowdowns": _slowdowns,
        "stalls": lambda value: _per_worker(Stall, value, "stalls"),
        "faults": lambda value: _per_worker(Fault, value, "faults"),
        "events": _events,
        "target": _target,
    }
    given |= {key: read(values[key]) for key, read in readers.items() if key in values}
    for key, kind in _types().items():
        if key in given and not _is(given[key], kind):
            raise UsageError(f"{key} = {given[key]!r}; it is {_WORDS[kind]}; write it as such")
    return Setup(workload=workload, **given)


_WORDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "list": "a list",
}


def _types() -> dict[str, str]:
    """What kind of value each plain key has, by the setup's own annotations."""
    found: dict[str, str] = {}
    for entry in fields(Setup):
        if entry.name in _PLAIN:
            written = str(entry.type).partition(" |")[0]
            named = {"int": "int", "float": "float", "bool": "bool"}.get(written)
            found[entry.name] = named or ("list" if written.startswith("tuple") else "str")
    return found


def _is(value: object, kind: str) -> bool:
    kinds: Mapping[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "list": (list,),
    }
    return isinstance(value, kinds[kind]) and (kind == "bool" or not isinstance(value, bool))


def _named(value: object, what: str, make: Callable[..., T]) -> T:
    """A table with a name and settings, as one of the tables by name takes them."""
    table = dict(_table(value, what))
    if not isinstance(table.get("name"), str):
        raise UsageError(
            f"{what} = {dict(table)}; it needs a name and its settings, for example "
            f'{what} = {{ name = "..." }}'
        )
    return make(table.pop("name"), **table)


def _optimizer(value: object) -> Optimizer:
    table = _table(value, "optimizer")
    renamed = {_OPTIMIZER.get(key, key): part for key, part in table.items()}
    return _made(Optimizer, renamed, "optimizer")


def _network(value: object) -> Network:
    table = dict(_table(value, "network"))
    for name in ("intra", "inter"):
        if name in table:
            table[name] = _made(LinkClass, table[name], f"network.{name}")
    if "nodes" in table:
        places = _table(table["nodes"], "network.nodes")
        table["nodes"] = {_worker(key, "network.nodes"): node for key, node in places.items()}
    return _made(Network, table, "network")


def _slowdowns(value: object) -> dict[int, float]:
    table = _table(value, "slowdowns")
    return {_worker(key, "slowdowns"): float(cast(float, part)) for key, part in table.items()}


def _per_worker(kind: type[T], value: object, what: str) -> dict[int, tuple[T, ...]]:
    found: dict[int, tuple[T, ...]] = {}
    for entry in _list(value, what):
        table = dict(_table(entry, what))
        workers = table.pop("workers", None)
        one = table.pop("worker", None)
        if (workers is None) == (one is None):
            raise UsageError(f"{what} = {dict(table)}; give its worker, or workers, a list of them")
        for worker in _list(workers, what) if one is None else [one]:
            number = _worker(worker, what)
            found[number] = (*found.get(number, ()), _made(kind, table, what))
    return found


def _events(value: object) -> tuple[Happening, ...]:
    found: list[Happening] = []
    for entry in _list(value, "events"):
        table = dict(_table(entry, "events"))
        faults = [_made(Fault, f, "faults") for f in _list(table.pop("faults", []), "faults")]
        found.append(_made(Happening, {**table, "faults": tuple(faults)}, "events"))
    return tuple(found)


def _target(value: object) -> tuple[str, float]:
    table = _table(value, "target")
    _known("target", table, ("metric", "value"))
    if not isinstance(table.get("metric"), str) or not _is(table.get("value"), "float"):
        raise UsageError(
            f"target = {dict(table)}; it has a metric and a value, for example "
            'target = { metric = "classification_error", value = 0.05 }'
        )
    return str(table["metric"]), float(cast(float, table["value"]))


def _made(kind: type[T], value: object, what: str) -> T:
    """A dataclass from a table, its names and plain types checked."""
    table = _table(value, what)
    _known(what, table, [entry.name for entry in fields(cast(Any, kind))])
    try:
        return kind(**table)
    except UsageError:
        raise
    except TypeError as error:
        raise UsageError(
            f"{what} = {dict(table)}; {error}; check the types of its values"
        ) from error


def _worker(key: object, what: str) -> int:
    text = str(key)
    if not text.isdecimal():
        raise UsageError(
            f"{what} of worker {key!r}; workers are numbered 0, 1, ...; write the number"
        )
    return int(text)


def _table(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} = {value!r}; it is a table, [{what}] or {what} = {{ ... }}")
    return cast(Mapping[str, object], value)


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise UsageError(f"{what} = {value!r}; it is a list, [[{what}]]")
    return cast(Sequence[object], value)


def _known(where: str, table: Mapping[str, object], names: Iterable[str]) -> None:
    listed = sorted(names)
    for key in table:
        if key not in listed:
            near = difflib.get_close_matches(key, listed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(listed)}"
            raise UsageError(f"{key} = an unknown key of {where}; {hint}")
