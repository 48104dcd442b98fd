"""One process's share of an import: searches in, parquet parts out.

Started as ``python -m shoal.ledger.archive_part TASK.json``; it answers with a file of JSON lines.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.children import die_with_parent
from shoal.ledger import measurements
from shoal.ledger.archive_layout import Metadata, Problem, read_metadata
from shoal.ledger.archive_views import TRIAL_COLUMNS
from shoal.ledger.statements import quoted, text
from shoal.ledger.store import connect, write_rows

if TYPE_CHECKING:
    import duckdb

BATCH_BYTES = 24 << 20
MEMORY_LIMIT = "500MB"


class Found(NamedTuple):
    """A trial with everything its directory holds."""

    place: int
    search: int
    trial: int
    path: Path
    metadata: Metadata
    table: measurements.Table
    bounds: list[tuple[int, str, float]]


@dataclass(kw_only=True)
class Batch:
    """Trials that go into the database together."""

    trials: list[Found] = field(default_factory=list)
    bytes: int = 0


class Share:
    """Reads searches batch by batch and writes one part of evaluations and one of trials per batch.

    Args:
        out: where the parts go.
        temporary: for files that live as long as this.
    """

    def __init__(self, out: Path, temporary: Path) -> None:
        self.problems: list[Problem] = []
        self.evaluations = 0
        self.values = 0
        self.trials = 0
        self._out = out
        self._temporary = temporary
        self._connection = connect(temporary)
        self._connection.execute("SET threads = 1")
        self._connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        self._batch = Batch()

    def search(self, number: int, path: Path, trials: list[int], first_place: int) -> None:
        """Take one search in; ``trials[i]`` gets the place ``first_place + i``."""
        for place, trial in enumerate(trials, start=first_place):
            found = self._read(number, path / str(trial), trial, place)
            if found is not None:
                self._batch.trials.append(found)
                self._batch.bytes += len(found.table.body)
                if self._batch.bytes >= BATCH_BYTES:
                    self.flush()

    def flush(self) -> None:
        """Write what was taken in since the last time."""
        batch, self._batch = self._batch, Batch()
        if not batch.trials:
            return
        name = f"{batch.trials[0].place:09d}.parquet"
        try:
            self._load(batch.trials)
        except _errors():
            batch.trials = list(self._checked(batch.trials))
            self._load(batch.trials)
        self._write_evaluations(batch.trials, self._out / f"evaluations-{name}")
        self._write_trials(batch.trials, self._out / f"trials-{name}")

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._connection.close()

    def _read(self, search: int, path: Path, trial: int, place: int) -> Found | None:
        at = path / "metadata.json"
        try:
            metadata = read_metadata(at.read_bytes(), trial)
            if metadata.remark:
                self.problems.append(Problem(str(at), metadata.remark))
            at = path / "measurements.csv"
            table = measurements.split(at.read_bytes())
            if table.remark:
                self.problems.append(Problem(str(at), table.remark))
            bounds: list[tuple[int, str, float]] = []
            if metadata.extra:
                at = path / "bounds.csv"
                bounds = _read_bounds(at)
        except (OSError, ValueError, TypeError) as error:
            self.problems.append(Problem(str(at), f"{_said(error)}; trial left out"))
            return None
        return Found(place, search, trial, path, metadata, table, bounds)

    def _checked(self, trials: list[Found]) -> Iterator[Found]:
        for found in trials:
            try:
                body = measurements.normalised(found.table)
            except (ValueError, csv.Error) as error:
                path = str(found.path / "measurements.csv")
                self.problems.append(Problem(path, f"{error}; trial left out"))
                continue
            yield found._replace(table=found.table._replace(body=body))

    def _load(self, trials: list[Found]) -> None:
        """Fill the table ``lines`` with all measurements as they are in the files."""
        bodies: dict[tuple[str, ...], list[Found]] = {}
        for found in trials:
            bodies.setdefault(found.table.header, []).append(found)
        sources: list[str] = []
        for i, (header, group) in enumerate(bodies.items()):
            path = self._temporary / f"{i}.csv"
            with path.open("wb") as file:
                for found in group:
                    file.write(measurements.numbered(found.place, found.table.body))
            sources.append(_read_csv(path, header))
        body = " UNION ALL BY NAME ".join(sources)
        self._connection.execute(f"CREATE OR REPLACE TEMP TABLE lines AS {body}")
        bad = self._connection.execute(
            "SELECT count(*) FROM lines WHERE step IS NULL OR step < 0 OR step <> floor(step)"
        ).fetchone()
        if bad and bad[0]:
            raise ValueError("a step is not a whole number")

    def _write_evaluations(self, trials: list[Found], path: Path) -> None:
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE bounds(place INTEGER, step BIGINT, metric VARCHAR, value DOUBLE)"
        )
        bounds = [(found.place, *bound) for found in trials for bound in found.bounds]
        if bounds:
            self._connection.executemany("INSERT INTO bounds VALUES (?, ?, ?, ?)", bounds)
        with_bounds = {metric for _, _, metric, _ in bounds}
        names = [row[0] for row in self._connection.execute("DESCRIBE lines").fetchall()]
        metrics = sorted({name for name in names if measurements.is_metric(name)} | with_bounds)
        columns = ["l.place", "CAST(l.step AS BIGINT) AS step"]
        joins = ""
        for i, metric in enumerate(metrics):
            value = f"l.{quoted(metric)}" if metric in names else "NULL::DOUBLE"
            bound = "NULL::DOUBLE"
            if metric in with_bounds:
                joins += (
                    f" LEFT JOIN (SELECT * FROM bounds WHERE metric = {text(metric)}) b{i} "
                    f"ON b{i}.place = l.place AND b{i}.step = l.step"
                )
                bound = f"b{i}.value"
            columns.append(
                f"CASE WHEN isfinite({value}) THEN {value} WHEN isfinite({bound}) THEN {bound} END "
                f"AS {quoted(metric)}"
            )
            columns.append(
                f"CASE WHEN isnan({value}) THEN 'nan' WHEN {value} = 'inf' THEN 'inf' "
                f"WHEN {value} = '-inf' THEN '-inf' WHEN {value} IS NULL AND {bound} IS NOT NULL "
                f"THEN '>=' END AS {quoted(metric + ' kind')}"
            )
            self.values += self._count(value if metric in names else None)
        query = f"SELECT {', '.join(columns)} FROM lines l{joins} ORDER BY l.place, l.step"
        self.evaluations += self._count("l.place")
        _copy(self._connection, query, path)

    def _count(self, column: str | None) -> int:
        if column is None:
            return 0
        row = self._connection.execute(f"SELECT count({column}) FROM lines l").fetchone()
        return int(row[0]) if row else 0

    def _write_trials(self, trials: list[Found], path: Path) -> None:
        rows: list[dict[str, object]] = []
        for found in trials:
            status, steps, parameters, extra, _ = found.metadata
            rows.append(
                {
                    "place": found.place,
                    "search": found.search,
                    "trial": found.trial,
                    "status": status,
                    "steps": steps,
                    "parameters": parameters,
                    "extra": extra,
                }
            )
        self.trials += len(trials)
        write_rows(self._connection, rows, TRIAL_COLUMNS, "place", path)


def _read_csv(path: Path, header: tuple[str, ...]) -> str:
    columns = {"place": "INTEGER", "step": "DOUBLE"}
    for name in header[1:]:
        columns[name] = "DOUBLE" if measurements.is_metric(name) else "VARCHAR"
    types = ", ".join(f"{quoted(name)}: {text(kind)}" for name, kind in columns.items())
    taken = ", ".join(quoted(name) for name, kind in columns.items() if kind != "VARCHAR")
    return (
        f"SELECT {taken} FROM read_csv({text(str(path))}, header = false, auto_detect = false, "
        f"delim = ',', quote = '', escape = '', columns = {{{types}}})"
    )


def _read_bounds(path: Path) -> list[tuple[int, str, float]]:
    try:
        content = path.read_text()
    except FileNotFoundError:
        return []
    rows = csv.reader(content.splitlines()[1:])
    return [(int(step), metric, float(value)) for step, metric, value, _ in rows]


def _copy(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    connection.execute(f"COPY ({query}) TO {text(str(path))} (FORMAT parquet, COMPRESSION zstd)")


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _errors() -> tuple[type[Exception], ...]:
    import duckdb

    return (duckdb.InvalidInputException, duckdb.ConversionException, ValueError)


def main(task: Path) -> None:
    """Do the share that a task file describes, and write the answer beside it."""
    content = json.loads(task.read_text())
    die_with_parent(content["parent"])
    with tempfile.TemporaryDirectory(prefix="shoal-import-") as temporary:
        share = Share(Path(content["out"]), Path(temporary))
        for search in content["searches"]:
            share.search(
                search["number"], Path(search["path"]), search["trials"], search["first_place"]
            )
        share.close()
    answer = {
        "problems": share.problems,
        "evaluations": share.evaluations,
        "values": share.values,
        "trials": share.trials,
    }
    task.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
