"""A study's spec from a TOML file, or from the ``study.json`` of a study directory."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from shoal.errors import UsageError
from shoal.study.grid import Grid
from shoal.study.records import Budget, Goal
from shoal.study.space import SCALES, Scale, Space
from shoal.study.spec import FORMAT, OPTIMIZERS, CurveSpec, StudySpec
from shoal.toml_file import read_toml

_STUDY = (
    "name",
    "workload",
    "workload_parameters",
    "curves",
    "global_batches",
    "goals",
    "budget",
    "repeats",
    "seed",
    "grid",
    "sampler",
    "allow_batch_norm",
)
_REQUIRED = ("name", "workload", "curves", "global_batches", "goals", "budget")
_CURVE = ("optimizer", "schedule", "fixed", "space", "space_at")
_BUDGET = {
    "trials": "feasible",
    "draw_limit": "draws",
    "max_steps": "steps",
    "kappa": "kappa",
    "full": "full",
}
_GRID = ("ratio", "stride")
_GOAL = ("metric", "value", "larger_is_better")
_DRAWS_PER_FEASIBLE = 4


def load_spec(path: Path | str) -> StudySpec:
    """Read a study from a TOML file.

    The keys are the fields of :class:`~shoal.study.spec.StudySpec`; ``budget`` has ``trials``,
    ``draw_limit`` (default 4 x trials), ``max_steps``, ``kappa`` and ``full``; a scale is a table with
    ``scale`` (linear, log, reverse_log, integer, discrete) and its fields; ``space_at`` holds other spaces
    for single batch sizes. A curve without ``optimizer`` is named after it.

    Args:
        path: the file; a relative path in ``workload`` starts at its folder.

    Raises:
        UsageError: it cannot be read, a key is unknown or missing, or a value does not fit; the line
            begins with the file.
    """
    path = Path(path)
    table = read_toml(path, "the study's TOML file")
    try:
        return spec_from(table, base=path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def spec_from(table: Mapping[str, object], *, base: Path | None = None) -> StudySpec:
    """A study from the plain values of its TOML file.

    Args:
        table: as :func:`load_spec` describes.
        base: what a relative path in ``workload`` starts from.

    Raises:
        UsageError: a key that is unknown or missing, or a value that does not fit.
    """
    _known(table, _STUDY, "")
    _present(table, _REQUIRED, "")
    global_batches = _integers(table["global_batches"], "global_batches")
    curves = _table(table["curves"], "curves")
    optional: dict[str, object] = {
        key: table[key]
        for key in ("seed", "repeats", "sampler", "allow_batch_norm")
        if key in table
    }
    _kinds(optional, {"seed": int, "repeats": int, "sampler": str, "allow_batch_norm": bool})
    _kinds(table, {"name": str, "workload": str})
    return StudySpec(
        name=cast(str, table["name"]),
        workload=cast(str, table["workload"]),
        workload_parameters=_table(table.get("workload_parameters", {}), "workload_parameters"),
        curves={
            name: _curve(name, _table(entry, f"curves.{name}")) for name, entry in curves.items()
        },
        global_batches=global_batches,
        goals=_goals(table["goals"]),
        budget=_budget(_table(table["budget"], "budget")),
        grid=_grid(_table(table.get("grid", {}), "grid")),
        base=base,
        **optional,  # pyright: ignore[reportArgumentType]
    )


def spec_from_canonical(facts: Mapping[str, object], *, base: Path | None = None) -> StudySpec:
    """The study of a ``study.json``: what :meth:`StudySpec.canonical` gave.

    It keeps the workload's recorded fingerprint, so that neither data nor the user's code is needed to
    read a study.

    Args:
        facts: the values read from JSON.
        base: what a relative path in ``workload`` starts from.

    Raises:
        UsageError: another format, or values that are no spec.
    """
    if facts.get("format") != FORMAT:
        raise UsageError(
            f"study.json: format = {facts.get('format')!r}; this shoal reads {FORMAT}; use the version "
            "that wrote it"
        )
    table = {
        key: value for key, value in facts.items() if key not in ("format", "workload_fingerprint")
    }
    spec = spec_from(table, base=base)
    recorded = facts.get("workload_fingerprint")
    object.__setattr__(spec, "recorded_fingerprint", recorded)
    return spec


def _curve(name: str, table: Mapping[str, object]) -> CurveSpec:
    where = f"curves.{name}"
    _known(table, _CURVE, where)
    optimizer = table.get("optimizer", name)
    if "optimizer" not in table and name not in OPTIMIZERS:
        raise UsageError(
            f"{where} = without `optimizer`; only a curve named after one can leave it out; set it to one "
            f"of {', '.join(OPTIMIZERS)}"
        )
    _present(table, ("space",), where)
    _kinds({"optimizer": optimizer, **table}, {"optimizer": str, "schedule": str}, where)
    spaces: dict[int, Space] = {}
    for key, entry in _table(table.get("space_at", {}), f"{where}.space_at").items():
        if not key.isdecimal():
            raise UsageError(f"{where}.space_at = {key!r}; its keys are batch sizes; correct it")
        spaces[int(key)] = _space(_table(entry, f"{where}.space_at.{key}"), where)
    fixed = _table(table.get("fixed", {}), f"{where}.fixed")
    for parameter, value in fixed.items():
        _number(value, f"{where}.fixed.{parameter}")
    try:
        return CurveSpec(
            optimizer=optimizer,  # pyright: ignore[reportArgumentType]
            schedule=table.get("schedule", "constant"),  # pyright: ignore[reportArgumentType]
            fixed=cast(Mapping[str, float], fixed),
            space=_space(_table(table["space"], f"{where}.space"), where),
            spaces=spaces,
        )
    except UsageError as error:
        raise _located(error, where) from error


def _space(table: Mapping[str, object], where: str) -> Space:
    scales: dict[str, Scale] = {}
    for name, entry in table.items():
        scales[name] = _scale(_table(entry, f"{where}.space.{name}"), f"{where}.space.{name}")
    try:
        return Space(scales)
    except UsageError as error:
        raise _located(error, where) from error


def _scale(table: Mapping[str, object], where: str) -> Scale:
    _present(table, ("scale",), where)
    kind = table["scale"]
    if not isinstance(kind, str) or kind not in SCALES:
        hint = _nearest(str(kind), list(SCALES))
        raise UsageError(f"{where}.scale = {kind!r}; {hint}")
    fields = list(inspect.signature(SCALES[kind]).parameters)
    _known(table, ["scale", *fields], where)
    _present(table, [name for name in fields if name != "log"], where)
    given = {name: table[name] for name in fields if name in table}
    for name, value in given.items():
        if name == "values":
            values = value if isinstance(value, list) else [value]
            given[name] = tuple(_number(entry, f"{where}.values") for entry in values)
        elif name == "log":
            _kinds({name: value}, {name: bool}, where)
        else:
            _number(value, f"{where}.{name}")
    try:
        return SCALES[kind](**given)
    except UsageError as error:
        raise _located(error, where) from error


def _goals(value: object) -> tuple[Goal, ...]:
    entries = value if isinstance(value, list) else [value]
    goals: list[Goal] = []
    for number, entry in enumerate(entries):
        where = f"goals[{number}]"
        table = _table(entry, where)
        _known(table, _GOAL, where)
        _present(table, ("metric", "value"), where)
        _kinds(table, {"metric": str, "larger_is_better": bool}, where)
        goals.append(
            Goal(
                metric=cast(str, table["metric"]),
                value=_number(table["value"], f"{where}.value"),
                larger_is_better=bool(table.get("larger_is_better", False)),
            )
        )
    return tuple(goals)


def _budget(table: Mapping[str, object]) -> Budget:
    _known(table, list(_BUDGET), "budget")
    _present(table, ("trials", "max_steps"), "budget")
    kinds: dict[str, type] = {"trials": int, "draw_limit": int, "max_steps": int, "full": bool}
    _kinds(table, kinds, "budget")
    if "kappa" in table:
        _number(table["kappa"], "budget.kappa")
    given = {_BUDGET[key]: value for key, value in table.items()}
    given.setdefault("draws", _DRAWS_PER_FEASIBLE * cast(int, table["trials"]))
    return Budget(**given)  # pyright: ignore[reportArgumentType]


def _grid(table: Mapping[str, object]) -> Grid:
    _known(table, _GRID, "grid")
    _kinds(table, {"stride": int}, "grid")
    if "ratio" in table:
        _number(table["ratio"], "grid.ratio")
    return Grid(**table)  # pyright: ignore[reportArgumentType]


def _known(table: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            name = f"{where}.{key}" if where else key
            raise UsageError(f"{name} = unknown key; {_nearest(key, keys)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    # What other tools call it is nearer in meaning than in letters.
    synonyms = {"batch_size": "global_batches", "batch_sizes": "global_batches"}
    near = [synonyms[word]] if synonyms.get(word) in known else []
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _present(table: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in table:
            raise UsageError(f"{where or 'the study'} = without `{key}`, which it needs; add it")


def _table(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} = {value!r}; it is a table of keys and values; write [{where}]")
    return {str(key): entry for key, entry in cast(Mapping[object, object], value).items()}


def _kinds(table: Mapping[str, object], kinds: Mapping[str, type], where: str = "") -> None:
    words = {int: "a whole number", str: "a text", bool: "true or false"}
    for key, kind in kinds.items():
        if key in table and type(table[key]) is not kind:
            name = f"{where}.{key}" if where else key
            raise UsageError(f"{name} = {table[key]!r}; it is {words[kind]}; correct it")


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} = {value!r}; it is a number; correct it")
    return value


def _integers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise UsageError(f"{where} = {value!r}; it is a list of whole numbers, for example [8, 16]")
    return tuple(cast(list[int], value))


def _located(error: UsageError, where: str) -> UsageError:
    return UsageError(f"{where}: {error}")
