"""The SQL of the columnar store: columns of raw rows, and the reading rule as views over them.

One text serves both ways of reading: :mod:`shoal.ledger.store` runs it over parts and fresh journals,
``views.sql`` runs it over parts alone in any DuckDB, without shoal.
"""

from __future__ import annotations

KINDS = ("trial", "eval", "outcome", "search", "samples")

_SEARCH = {
    "search": "VARCHAR",
    "curve": "VARCHAR",
    "global_batch": "BIGINT",
    "repeat": "BIGINT",
}
_ATTEMPT = {
    "search": "VARCHAR",
    "trial": "BIGINT",
    "attempt": "VARCHAR",
    "segment": "BIGINT",
}
_TIME = {"time": "DOUBLE"}
_COLUMNS: dict[str, dict[str, str]] = {
    "trial": {
        **_SEARCH,
        "trial": "BIGINT",
        "address": "VARCHAR",
        "attempt": "VARCHAR",
        "segment": "BIGINT",
        "seed": "BIGINT",
        "engine": "VARCHAR",
        "unit": "DOUBLE[]",
        "parameters": "MAP(VARCHAR, DOUBLE)",
        **_TIME,
    },
    "eval": {
        **_ATTEMPT,
        "step": "BIGINT",
        "diverged": "BOOLEAN",
        "metrics": "MAP(VARCHAR, DOUBLE)",
        "kinds": "MAP(VARCHAR, VARCHAR)",
        **_TIME,
    },
    "outcome": {**_ATTEMPT, "outcome": "VARCHAR", "step": "BIGINT", **_TIME},
    "search": {
        **_SEARCH,
        "segment": "BIGINT",
        "state": "VARCHAR",
        "end": "BIGINT",
        "draws": "BIGINT",
        "goals": "JSON",
        **_TIME,
    },
    "samples": {
        **_ATTEMPT,
        "step": "BIGINT",
        "metric": "VARCHAR",
        "count": "BIGINT",
        "bits": "VARCHAR",
        **_TIME,
    },
}
_ONLY_IN_JOURNALS = {
    "kind": "VARCHAR",
    "bounds": "MAP(VARCHAR, VARCHAR)",
    "_nonfinite": "MAP(VARCHAR, VARCHAR)",
}

# A metric's kind is on file only where it is not "=". A value that is not finite is no bound.
_KINDS_OF_METRICS = """
map_from_entries(list_concat(
    [{{'key': replace(replace(e.key[9:], '~1', '/'), '~0', '~'), 'value': e.value}}
     for e in coalesce(map_entries({n}), []) if starts_with(e.key, 'metrics/')],
    [{{'key': e.key, 'value': e.value}}
     for e in coalesce(map_entries(bounds), [])
     if NOT list_contains(coalesce(map_keys({n}), []),
                          'metrics/' || replace(replace(e.key, '~', '~0'), '/', '~1'))]
))
""".strip().format(n="_nonfinite")


def table(kind: str) -> str:
    """Name of the relation that holds all raw rows of a kind."""
    return f"{kind}_rows"


def read_journals(paths: list[str]) -> str:
    """A SELECT of all rows of journals of whole lines, every column of every kind."""
    types = dict(_ONLY_IN_JOURNALS)
    for columns_of_kind in _COLUMNS.values():
        types.update(columns_of_kind)
    columns = ", ".join(f"{quoted(n)}: {text(t)}" for n, t in types.items() if n != "kinds")
    return (
        f"SELECT * FROM read_json({listed(paths)}, format = 'newline_delimited', "
        f"maximum_object_size = {1 << 28}, columns = {{{columns}}})"
    )


def rows_of_kind(kind: str, source: str) -> str:
    """A SELECT of the typed rows of one kind out of what :func:`read_journals` gave."""
    computed = {
        "kinds": f"{_KINDS_OF_METRICS} AS kinds",
        "diverged": "coalesce(diverged, false) AS diverged",
    }
    columns = ", ".join(computed.get(name, quoted(name)) for name in _COLUMNS[kind])
    return f"SELECT {columns} FROM {source} WHERE kind = {text(kind)}"


def read_parts(paths: list[str]) -> str:
    """A SELECT of the rows of parquet parts."""
    return f"SELECT * FROM read_parquet({listed(paths)}, union_by_name = true)"


def listed(values: list[str]) -> str:
    """A list of texts as SQL."""
    return "[" + ", ".join(text(value) for value in values) + "]"


def text(value: str) -> str:
    """A text as SQL."""
    return "'" + value.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A column's name as SQL."""
    return '"' + name.replace('"', '""') + '"'


RULES = """
-- The attempt that counts: of the trial's newest row. Attempts are never mixed.
CREATE OR REPLACE VIEW chosen_attempts AS
SELECT * FROM trial_rows
QUALIFY row_number() OVER (PARTITION BY search, trial ORDER BY segment DESC, time DESC, attempt) = 1;

-- One row per grid point of it: of the largest segment.
CREATE OR REPLACE VIEW grid_points AS
SELECT eval_rows.* FROM eval_rows SEMI JOIN chosen_attempts USING (search, trial, attempt)
QUALIFY row_number() OVER (PARTITION BY search, trial, step ORDER BY segment DESC, time DESC) = 1;

CREATE OR REPLACE VIEW newest_outcomes AS
SELECT outcome_rows.* FROM outcome_rows SEMI JOIN chosen_attempts USING (search, trial, attempt)
QUALIFY row_number() OVER (PARTITION BY search, trial ORDER BY segment DESC, time DESC) = 1;

CREATE OR REPLACE VIEW trials AS
SELECT c.search, c.curve, c.global_batch, c.repeat, c.trial, c.address, c.attempt, c.engine, c.seed,
       o.outcome, o.step AS end_step, c.unit, c.parameters
FROM chosen_attempts c LEFT JOIN newest_outcomes o USING (search, trial);

-- kind: '=' measured, '>=' the true value is no less, 'nan', 'inf', '-inf' (value is then NULL).
CREATE OR REPLACE VIEW evaluations AS
SELECT t.search, t.curve, t.global_batch, t.repeat, t.trial, t.attempt, g.step,
       m.key AS metric, m.value AS value, coalesce(g.kinds[m.key], '=') AS kind, g.diverged
FROM (SELECT *, unnest(map_entries(metrics)) AS m FROM grid_points) g
JOIN chosen_attempts t USING (search, trial);

CREATE OR REPLACE VIEW searches AS
SELECT * FROM search_rows
QUALIFY row_number() OVER (PARTITION BY search ORDER BY segment DESC, time DESC) = 1;

CREATE OR REPLACE VIEW samples AS
SELECT samples_rows.* FROM samples_rows SEMI JOIN chosen_attempts USING (search, trial, attempt)
QUALIFY row_number()
        OVER (PARTITION BY search, trial, step, metric ORDER BY segment DESC, time DESC) = 1;
"""


def no_rows(kind: str) -> str:
    """A SELECT of no rows with the columns of a kind."""
    columns = ", ".join(f"NULL::{type_} AS {quoted(n)}" for n, type_ in _COLUMNS[kind].items())
    return f"SELECT {columns} WHERE false"
