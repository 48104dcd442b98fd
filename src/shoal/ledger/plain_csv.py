"""Measurements as plain CSV, out and in: three files that any table program opens.

    evaluations.csv   study, curve, global_batch, repeat, trial, step, diverged, and either metric, value, kind
                      (one row per value) or a column per metric, named split/name
    trials.csv        study, curve, global_batch, repeat, trial, outcome, end_step, attempt, engine, seed,
                      address, a column p_NAME per parameter and u_NAME per unit coordinate
    searches.csv      study, curve, global_batch, repeat, state, end, draws

Of what is read only ``global_batch``, ``trial`` and ``step`` must be there, and the other two files need
not exist: study and curve then have the name ``imported``, the repeat is 0, every trial counts as feasible.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.ledger import archive_views
from shoal.ledger.archive import ArchiveReport, finish, fresh_tables
from shoal.ledger.archive_layout import COMPLETE, INCOMPLETE, INFEASIBLE
from shoal.ledger.statements import quoted, text
from shoal.ledger.store import connect, with_rows, write_rows

if TYPE_CHECKING:
    import duckdb

Key = tuple[str, str, int, int]

_KEYS = ("study", "curve", "global_batch", "repeat")
_UNNAMED = "imported"
_STATUSES = {
    "diverged": INFEASIBLE,
    "infeasible": INFEASIBLE,
    "preempted": INCOMPLETE,
    "crashed": INCOMPLETE,
    "incomplete": INCOMPLETE,
}


def export_csv(study: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write a study's three files.

    Args:
        study: the study's directory.
        directory: where the files go.

    Raises:
        UsageError: one of the files is there already.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("evaluations.csv", "trials.csv", "searches.csv"):
        if (directory / name).exists():
            raise UsageError(f"directory = {directory}; it has a {name}; give another one")
    name = Path(study).resolve().name

    def write(connection: duckdb.DuckDBPyConnection) -> None:
        keys = f"{text(name)} AS study, curve, global_batch, repeat"
        parameters = connection.execute(
            "SELECT map_keys(parameters), len(unit) FROM trials ORDER BY len(unit) DESC"
        ).fetchall()
        names = sorted({key for row in parameters for key in row[0]})
        columns = [f"parameters[{text(n)}] AS {quoted('p_' + n)}" for n in names]
        columns += [f"unit[{i + 1}] AS u_{i}" for i in range(parameters[0][1] if parameters else 0)]
        queries = {
            "evaluations": f"SELECT {keys}, trial, step, diverged, metric, value, kind "
            "FROM evaluations ORDER BY ALL",
            "trials": f"SELECT {keys}, trial, outcome, end_step, attempt, engine, seed, address"
            f"{''.join(', ' + column for column in columns)} FROM trials ORDER BY ALL",
            "searches": f'SELECT {keys}, state, "end", draws FROM searches ORDER BY ALL',
        }
        for stem, query in queries.items():
            target = text(str(directory / f"{stem}.csv"))
            connection.execute(f"COPY ({query}) TO {target} (FORMAT csv, HEADER)")

    with_rows(Path(study), write)


def import_csv(directory: str | os.PathLike[str], out: str | os.PathLike[str]) -> ArchiveReport:
    """Read plain CSV into the same tables that ``import_archive`` makes.

    Args:
        directory: with ``evaluations.csv`` and, if there are any, ``trials.csv`` and ``searches.csv``.
        out: where ``tables/`` is made.

    Returns:
        Counts.

    Raises:
        UsageError: a file that is missing or broken (named, with the line where there is one), or ``out``
            holds tables already.
    """
    directory = Path(directory)
    trials = _by_key(directory / "trials.csv", with_trial=True)
    searches = _by_key(directory / "searches.csv", with_trial=False)
    with (
        fresh_tables(Path(out)) as tables,
        tempfile.TemporaryDirectory() as temporary,
        connect(Path(temporary)) as connection,
    ):
        metrics = _load(connection, directory / "evaluations.csv")
        measured = connection.execute(
            "SELECT study, curve, global_batch, repeat, trial, max(step), "
            "list(step ORDER BY step) FILTER (diverged) FROM grid GROUP BY ALL"
        ).fetchall()
        for *key, trial, last, diverged_at in measured:
            row = trials.setdefault((*key, trial), {})
            row["last_step"] = str(last)
            row["diverged_at"] = json.dumps(diverged_at or [])
        drawn = Counter(key[:4] for key in trials)
        keys = sorted(drawn)
        _write_searches(connection, keys, drawn, searches, tables)
        _write_trials(connection, trials, keys, tables)
        values = _write_evaluations(connection, metrics, tables)
        report = ArchiveReport(
            searches=len(keys),
            trials=len(trials),
            evaluations=_one(connection, "SELECT count(*) FROM grid"),
            values=values,
            problems=[],
        )
        finish(tables, report)
    return report


def _load(connection: duckdb.DuckDBPyConnection, path: Path) -> list[str]:
    """Fill the table ``grid``, a row per evaluation; give the metrics' names."""
    import duckdb

    if not path.is_file():
        raise UsageError(f"csv = {path}; there is no such file; it holds the measurements")
    source = f"read_csv({text(str(path))}, header = true, all_varchar = true, delim = ',')"
    try:
        connection.execute(f"CREATE TABLE given AS SELECT * FROM {source}")
        names = [str(row[0]) for row in connection.execute("DESCRIBE given").fetchall()]
        for name in ("global_batch", "trial", "step"):
            if name not in names:
                raise UsageError(f"{path}: no column {name!r}; it has {', '.join(names)}; add it")
        keys = _key_columns(names)
        if {"metric", "value"} <= set(names):
            metrics = _long(connection, names, keys)
        else:
            metrics = sorted(
                name for name in names if name.split("/")[0] in ("train", "val", "test")
            )
            columns = [
                f"CAST({quoted(name)} AS DOUBLE) AS {quoted(name)}, NULL::VARCHAR AS "
                f"{quoted(name + archive_views.KIND)}"
                for name in metrics
            ]
            connection.execute(
                f"CREATE TABLE grid AS SELECT {', '.join([*keys, *columns])} FROM given"
            )
        if not metrics:
            raise UsageError(
                f"{path}: no metric; columns are named split/name, or metric and value"
            )
    except (duckdb.ConversionException, duckdb.InvalidInputException) as error:
        raise UsageError(f"{path}: {str(error).splitlines()[0]}; correct it there") from None
    bad = _one(
        connection, "SELECT count(*) FROM grid WHERE step IS NULL OR step < 0 OR trial IS NULL"
    )
    if bad:
        raise UsageError(f"{path}: {bad} rows without a trial or a step >= 0; correct them")
    return metrics


def _key_columns(names: Sequence[str]) -> list[str]:
    defaults = {"study": text(_UNNAMED), "curve": text(_UNNAMED), "repeat": "'0'"}
    columns: list[str] = []
    for name in (*_KEYS, "trial", "step"):
        given = quoted(name) if name in names else defaults[name]
        kind = "VARCHAR" if name in ("study", "curve") else "BIGINT"
        columns.append(f"CAST({given} AS {kind}) AS {name}")
    flag = "coalesce(CAST(diverged AS BOOLEAN), false)" if "diverged" in names else "false"
    return [*columns, f"{flag} AS diverged"]


def _long(
    connection: duckdb.DuckDBPyConnection, names: Sequence[str], keys: Sequence[str]
) -> list[str]:
    found = connection.execute(
        "SELECT DISTINCT metric FROM given WHERE metric IS NOT NULL ORDER BY metric"
    ).fetchall()
    metrics = [name for (name,) in found]
    kind = "nullif(kind, '=')" if "kind" in names else "NULL::VARCHAR"
    columns = ["bool_or(diverged) AS diverged"]
    for name in metrics:
        where = f"FILTER (metric = {text(name)})"
        columns.append(f"any_value(value) {where} AS {quoted(name)}")
        columns.append(f"any_value(kind) {where} AS {quoted(name + archive_views.KIND)}")
    by = ", ".join((*_KEYS, "trial", "step"))
    connection.execute(
        f"CREATE TABLE grid AS SELECT {by}, {', '.join(columns)} FROM ("
        f"SELECT {', '.join(keys)}, metric, CAST(value AS DOUBLE) AS value, {kind} AS kind FROM given"
        f") GROUP BY {by}"
    )
    return metrics


def _by_key(path: Path, *, with_trial: bool) -> dict[tuple, dict[str, str]]:
    """Rows of a small file by (study, curve, global_batch, repeat[, trial])."""
    if not path.exists():
        return {}
    found: dict[tuple, dict[str, str]] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                key: tuple = (
                    row.get("study") or _UNNAMED,
                    row.get("curve") or _UNNAMED,
                    int(row["global_batch"]),
                    int(row.get("repeat") or 0),
                )
                key = (*key, int(row["trial"])) if with_trial else key
                for name, value in row.items():
                    if value and name.startswith(("p_", "u_")):
                        float(value)
            except (KeyError, ValueError, AttributeError) as error:
                reason = f"no column {error}" if isinstance(error, KeyError) else str(error)
                raise UsageError(f"{path}, line {number}: {reason}; correct it there") from None
            found[key] = row
    return found


def _write_searches(
    connection: duckdb.DuckDBPyConnection,
    keys: Sequence[Key],
    drawn: Mapping[Key, int],
    searches: Mapping[tuple, Mapping[str, str]],
    tables: Path,
) -> None:
    rows: list[dict[str, object]] = []
    for number, key in enumerate(keys):
        given = searches.get(key, {})
        end = int(given["end"]) if given.get("end") else None
        ours = {
            "state": given.get("state") or None,
            "end": end,
            "draws": int(given.get("draws") or drawn[key]),
        }
        rows.append(
            {
                **dict(zip(_KEYS, key, strict=True)),
                "search": number,
                "group": "",
                "dataset": key[0],
                "model": "",
                "optimizer": key[1],
                "train_steps": end,
                "parameter_configs": "{}",
                "extra": json.dumps(ours),
            }
        )
    write_rows(
        connection, rows, archive_views.SEARCH_COLUMNS, "search", tables / "searches.parquet"
    )


def _write_trials(
    connection: duckdb.DuckDBPyConnection,
    trials: Mapping[tuple, Mapping[str, str]],
    keys: Sequence[Key],
    tables: Path,
) -> None:
    number = {key: i for i, key in enumerate(keys)}
    rows: list[dict[str, object]] = []
    for place, key in enumerate(sorted(trials)):
        given = trials[key]
        outcome = given.get("outcome") or ""
        steps = given.get("end_step") or given.get("last_step")
        status = given.get("status") or _STATUSES.get(outcome, COMPLETE)
        ours = {
            "outcome": outcome or None,
            "attempt": given.get("attempt") or "",
            "engine": given.get("engine") or "",
            "seed": int(given.get("seed") or 0),
            "address": given.get("address") or "",
            "unit": [float(value) for value in _starting(given, "u_").values()],
            "diverged_at": json.loads(given.get("diverged_at", "[]")),
        }
        rows.append(
            {
                "place": place,
                "search": number[key[:4]],
                "trial": key[4],
                "status": status.upper(),
                "steps": int(steps) if steps else None,
                "parameters": {n: float(v) for n, v in _starting(given, "p_").items()},
                "extra": json.dumps(ours) if "outcome" in given else "",
            }
        )
    write_rows(connection, rows, archive_views.TRIAL_COLUMNS, "place", tables / "trials.parquet")


def _starting(row: Mapping[str, str], start: str) -> dict[str, str]:
    return {name[len(start) :]: v for name, v in row.items() if name.startswith(start) and v}


def _write_evaluations(
    connection: duckdb.DuckDBPyConnection, metrics: Sequence[str], tables: Path
) -> int:
    columns: list[str] = []
    for name in metrics:
        value, kind = quoted(name), quoted(name + archive_views.KIND)
        # Values that are not finite may come as such or by their kind.
        columns.append(f"CASE WHEN isfinite({value}) THEN {value} END AS {value}")
        columns.append(
            f"CASE WHEN {value} IS NULL OR isfinite({value}) THEN {kind} "
            f"ELSE CAST({value} AS VARCHAR) END AS {kind}"
        )
    keys = ", ".join(_KEYS)
    connection.execute(
        f"COPY (SELECT t.place, g.step, {', '.join(columns)} FROM grid g "
        f"JOIN (SELECT s.*, t.place, t.trial FROM read_parquet({text(str(tables / 'trials.parquet'))}) t "
        f"JOIN read_parquet({text(str(tables / 'searches.parquet'))}) s USING (search)) t "
        f"USING ({keys}, trial) ORDER BY t.place, g.step) "
        f"TO {text(str(tables / 'evaluations-000000000.parquet'))} (FORMAT parquet, COMPRESSION zstd)"
    )
    counted = " + ".join(
        f"count(*) FILTER ({quoted(n)} IS NOT NULL OR {quoted(n + archive_views.KIND)} IS NOT NULL)"
        for n in metrics
    )
    return _one(connection, f"SELECT {counted} FROM grid")


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0
