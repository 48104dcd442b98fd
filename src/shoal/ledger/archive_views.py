"""The SQL of an imported archive: the same views as a study's, over wide tables.

``evaluations-*.parquet`` has one row per evaluation, ordered by place (a trial's number in the archive)
and step, and two columns per metric: ``split/name`` and ``split/name kind``. The kind is NULL for a
measured value and where nothing was measured; else ``>=``, or ``nan``, ``inf``, ``-inf`` with a value of
NULL.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.ledger.statements import listed, quoted, text
from shoal.ledger.store import connect

if TYPE_CHECKING:
    import duckdb

SEARCH_COLUMNS = {
    "search": "INTEGER",
    "study": "VARCHAR",
    "curve": "VARCHAR",
    "global_batch": "BIGINT",
    "repeat": "BIGINT",
    "group": "VARCHAR",
    "dataset": "VARCHAR",
    "model": "VARCHAR",
    "optimizer": "VARCHAR",
    "train_steps": "BIGINT",
    "early_stopping": "BOOLEAN",
    "parameter_configs": "VARCHAR",
    "extra": "VARCHAR",
}
TRIAL_COLUMNS = {
    "place": "INTEGER",
    "search": "INTEGER",
    "trial": "BIGINT",
    "status": "VARCHAR",
    "steps": "BIGINT",
    "parameters": "MAP(VARCHAR, DOUBLE)",
    "extra": "VARCHAR",
}
KIND = " kind"

_KEYS = "s.study, s.curve, s.global_batch, s.repeat, t.trial"


def parts(tables: Path) -> list[str]:
    """Names of the parts of evaluations, in the order of places."""
    return sorted(path.name for path in tables.glob("evaluations-*.parquet"))


def metrics(tables: Path) -> list[str]:
    """Every metric that some part has, sorted."""
    files = [str(tables / name) for name in parts(tables)]
    if not files:
        return []
    with tempfile.TemporaryDirectory() as name, connect(Path(name)) as connection:
        found = connection.execute(
            f"DESCRIBE SELECT * FROM read_parquet({listed(files)}, union_by_name = true)"
        ).fetchall()
    names = (str(row[0]) for row in found)
    return sorted(n for n in names if "/" in n and not n.endswith(KIND))


def check(directory: str | os.PathLike[str]) -> None:
    """Make sure that an archive was imported here.

    Raises:
        UsageError: none was.
    """
    if not (Path(directory) / "tables" / "searches.parquet").exists():
        raise UsageError(
            f"archive = {directory}; it holds no tables/searches.parquet; import one there with "
            "`shoal study import`"
        )


@contextlib.contextmanager
def shown(directory: str | os.PathLike[str]) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the views of an imported archive.

    Raises:
        UsageError: there is none.
    """
    check(directory)
    tables = Path(directory) / "tables"
    with tempfile.TemporaryDirectory() as name, connect(Path(name)) as connection:
        connection.execute(views(tables, prefix=f"{tables}/"))
        yield connection


def views(tables: Path, prefix: str = "") -> str:
    """SQL that shows an archive's tables in any DuckDB started in ``tables/``.

    Args:
        tables: where they lie.
        prefix: goes in front of the files' names, for a DuckDB that was started elsewhere.
    """
    names = metrics(tables)
    long = "\nUNION ALL\n".join(
        f"SELECT {_KEYS}, e.step, {text(metric)} AS metric, e.{quoted(metric)} AS value, "
        f"coalesce(e.{quoted(metric + KIND)}, '=') AS kind, {_DIVERGED} AS diverged "
        f"FROM evaluation_rows e {_JOINS} "
        f"WHERE e.{quoted(metric)} IS NOT NULL OR e.{quoted(metric + KIND)} IS NOT NULL"
        for metric in names
    )
    return _VIEWS.format(
        searches=text(f"{prefix}searches.parquet"),
        trials=text(f"{prefix}trials.parquet"),
        parts=listed([prefix + name for name in parts(tables)]),
        keys=_KEYS,
        joins=_JOINS,
        long=long or _NOTHING,
    )


_JOINS = "JOIN trial_rows t USING (place) JOIN searches s USING (search)"
_DIVERGED = (
    "coalesce(list_contains(CAST(json_extract(nullif(t.extra, ''), '$.diverged_at') AS BIGINT[]), "
    "e.step), false)"
)
_NOTHING = (
    "SELECT NULL AS study, NULL AS curve, NULL AS global_batch, NULL AS repeat, NULL AS trial, "
    "NULL AS step, NULL AS metric, NULL AS value, NULL AS kind, NULL AS diverged WHERE false"
)
_VIEWS = """\
-- The tables of an imported archive. In its directory tables/: duckdb -init views.sql
CREATE OR REPLACE VIEW searches AS SELECT * FROM read_parquet({searches});
CREATE OR REPLACE VIEW trial_rows AS SELECT * FROM read_parquet({trials});
CREATE OR REPLACE VIEW evaluation_rows AS
SELECT * FROM read_parquet({parts}, union_by_name = true);

-- COMPLETE trials have no outcome of their own: whether they reached a goal depends on the goal.
CREATE OR REPLACE VIEW trials AS
SELECT {keys}, t.status,
       coalesce(json_extract_string(nullif(t.extra, ''), '$.outcome'),
                CASE t.status WHEN 'INFEASIBLE' THEN 'diverged' WHEN 'INCOMPLETE' THEN 'preempted' END)
           AS outcome,
       t.steps AS end_step, t.parameters, t.place
FROM trial_rows t JOIN searches s USING (search);

CREATE OR REPLACE VIEW evaluations_wide AS
SELECT {keys}, e.* EXCLUDE (place) FROM evaluation_rows e {joins};

CREATE OR REPLACE VIEW evaluations AS
{long};

-- Steps to a goal of every search that reached it: first strict crossing over all COMPLETE trials, or the
-- first so many of them by id; of equal steps the lowest id.
CREATE OR REPLACE MACRO steps_to_result(of_metric, goal, first_complete := NULL) AS TABLE
WITH feasible AS (
    SELECT study, curve, global_batch, repeat, trial,
           row_number() OVER (PARTITION BY study, curve, global_batch, repeat ORDER BY trial) AS n
    FROM trials WHERE status = 'COMPLETE'
)
SELECT study, curve, global_batch, repeat, min(step) AS steps,
       arg_min(trial, (step, trial)) AS trial
FROM evaluations JOIN feasible USING (study, curve, global_batch, repeat, trial)
WHERE metric = of_metric AND kind = '=' AND value < goal
  AND (first_complete IS NULL OR n <= first_complete)
GROUP BY ALL;
"""
