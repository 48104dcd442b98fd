"""A study's rows as arrays, fetched once; searches are made out of slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.ledger.statements import text
from shoal.ledger.study_rows import unpacked
from shoal.study.records import Curve, Evaluation, Measured, Outcome, SearchKey, Trial

if TYPE_CHECKING:
    import duckdb

ABSENT, EXACT, AT_LEAST = -1, 0, 1
_NON_FINITE = {2: np.nan, 3: np.inf, 4: -np.inf}


class MetricColumn(NamedTuple):
    """One metric of one search, a row per measurement, by trial then step.

    Args:
        trial: ids.
        step: optimizer steps.
        value: float64; NaN and infinities as measured.
        exact: False where ``value`` is a lower bound.
    """

    trial: np.ndarray
    step: np.ndarray
    value: np.ndarray
    exact: np.ndarray


class SampleOutcomes(NamedTuple):
    """Per-sample outcomes of one metric of one trial at one step; True = wrong, in the data's order."""

    trial: int
    step: int
    metric: str
    wrong: np.ndarray


class Ending(NamedTuple):
    """What the last row about a search says."""

    state: str
    end: int | None
    draws: int


class TrialRow(NamedTuple):
    """What is on file about a trial besides its curve."""

    trial: Trial
    attempt: str
    engine: str
    outcome: Outcome | None


@dataclass(kw_only=True)
class StudyArrays:
    """Trials by search, and their evaluations as columns.

    Args:
        rows: trials, by search then id.
        keys: the range of ``rows`` that each search has.
        endings: what the last row about each search says.
        first: evaluations ``first[i]`` up to ``first[i + 1]`` are those of ``rows[i]``.
        step: of every evaluation.
        diverged: of every evaluation.
        value: by metric, of every evaluation; NaN where it was not measured.
        kind: by metric: -1 not measured, 0 exact, 1 a lower bound, more: not finite.
        sample_rows: (trial, step, metric, count, bits) by search.
    """

    rows: list[TrialRow] = field(default_factory=list)
    keys: dict[SearchKey, range] = field(default_factory=dict)
    endings: dict[str, Ending] = field(default_factory=dict)
    first: np.ndarray
    step: np.ndarray
    diverged: np.ndarray
    value: dict[str, np.ndarray]
    kind: dict[str, np.ndarray]
    sample_rows: dict[str, list[tuple[int, int, str, int, str]]] = field(default_factory=dict)

    @classmethod
    def fetch(cls, connection: duckdb.DuckDBPyConnection) -> StudyArrays:
        """Everything that the views of a study show."""
        rows = _trials(connection)
        keys: dict[SearchKey, range] = {}
        for i, row in enumerate(rows):
            key = row.trial.search
            keys[key] = range(keys[key].start if key in keys else i, i + 1)
        connection.execute(
            "CREATE TEMP TABLE places AS SELECT search, trial, "
            "row_number() OVER (ORDER BY curve, global_batch, repeat, trial) - 1 AS place FROM trials"
        )
        connection.execute(
            "CREATE TEMP TABLE grid AS SELECT place, step, diverged, metrics, kinds "
            "FROM grid_points JOIN places USING (search, trial) ORDER BY place, step"
        )
        names = connection.execute(
            "SELECT DISTINCT unnest(map_keys(metrics)) AS name FROM grid ORDER BY name"
        ).fetchall()
        columns = connection.execute(_wide([name for (name,) in names])).fetchnumpy()
        value, kind = {}, {}
        for i, (name,) in enumerate(names):
            kind[name] = filled(columns[f"k{i}"], ABSENT).astype(np.int8)
            value[name] = with_non_finite(filled(columns[f"v{i}"], np.nan), kind[name])
        place = filled(columns["place"], 0)
        return cls(
            rows=rows,
            keys=keys,
            endings=_endings(connection),
            first=np.searchsorted(place, np.arange(len(rows) + 1)),
            step=filled(columns["step"], 0),
            diverged=filled(columns["diverged"], False).astype(bool),
            value=value,
            kind=kind,
            sample_rows=_samples(connection),
        )

    def curve(self, place: int) -> Curve:
        """The curve of ``rows[place]``."""
        part = slice(int(self.first[place]), int(self.first[place + 1]))
        steps, flags = self.step[part].tolist(), self.diverged[part].tolist()
        measured: list[dict[str, Measured]] = [{} for _ in steps]
        for name, kinds in self.kind.items():
            values = self.value[name][part].tolist()
            for i, code in enumerate(kinds[part].tolist()):
                if code != ABSENT:
                    measured[i][name] = Measured(values[i], ">=" if code == AT_LEAST else "=")
        return Curve(
            evaluations=[
                Evaluation(step=step, metrics=metrics, diverged=flag)
                for step, metrics, flag in zip(steps, measured, flags, strict=True)
            ]
        )

    def metric(self, key: SearchKey, metric: str) -> MetricColumn:
        """One metric of one search."""
        places = self.keys[key]
        part = slice(int(self.first[places.start]), int(self.first[places.stop]))
        lengths = np.diff(self.first[places.start : places.stop + 1])
        ids = np.array([self.rows[place].trial.id for place in places], dtype=np.int64)
        if metric not in self.kind:
            return MetricColumn(*(np.zeros(0, t) for t in (np.int64, np.int64, float, bool)))
        kind = self.kind[metric][part]
        there = kind != ABSENT
        return MetricColumn(
            np.repeat(ids, lengths)[there],
            self.step[part][there],
            self.value[metric][part][there],
            (kind != AT_LEAST)[there],
        )

    def samples(self, key: SearchKey) -> list[SampleOutcomes]:
        """Per-sample outcomes on file for one search, by trial, step and metric."""
        return [
            SampleOutcomes(trial, step, metric, unpacked(bits, count))
            for trial, step, metric, count, bits in self.sample_rows.get(str(key), [])
        ]


def _trials(connection: duckdb.DuckDBPyConnection) -> list[TrialRow]:
    query = (
        "SELECT curve, global_batch, repeat, trial, unit, map_keys(parameters), "
        "map_values(parameters), seed, address, attempt, engine, outcome FROM trials "
        "ORDER BY curve, global_batch, repeat, trial"
    )
    rows: list[TrialRow] = []
    keys: dict[tuple[str, int, int], SearchKey] = {}
    for curve, batch, repeat, number, unit, names, values, *rest in connection.execute(
        query
    ).fetchall():
        seed, address, attempt, engine, outcome = rest
        name = (curve, batch, repeat)
        if name not in keys:
            keys[name] = SearchKey(curve=curve, global_batch=batch, repeat=repeat)
        trial = Trial(
            search=keys[name],
            id=number,
            unit=tuple(unit or ()),
            parameters=dict(zip(names or (), values or (), strict=True)),
            seed=seed,
            address=address,
        )
        ended = None if outcome is None else Outcome(outcome)
        rows.append(TrialRow(trial, attempt, engine, ended))
    return rows


def _endings(connection: duckdb.DuckDBPyConnection) -> dict[str, Ending]:
    found = connection.execute('SELECT search, state, "end", draws FROM searches').fetchall()
    return {search: Ending(state, end, draws or 0) for search, state, end, draws in found}


def _samples(
    connection: duckdb.DuckDBPyConnection,
) -> dict[str, list[tuple[int, int, str, int, str]]]:
    by_search: dict[str, list[tuple[int, int, str, int, str]]] = {}
    for search, *rest in connection.execute(
        'SELECT search, trial, step, metric, "count", bits FROM samples '
        "ORDER BY search, trial, step, metric"
    ).fetchall():
        by_search.setdefault(search, []).append(tuple(rest))
    return by_search


def _wide(metrics: Sequence[str]) -> str:
    """A SELECT with a column of values and one of kinds per metric."""
    columns = ["place", "step", "diverged"]
    for i, name in enumerate(metrics):
        key = text(name)
        code = code_of_kind(f"kinds[{key}]")
        columns.append(f"metrics[{key}] AS v{i}")
        columns.append(f"CASE WHEN map_contains(metrics, {key}) THEN {code} END AS k{i}")
    return f"SELECT {', '.join(columns)} FROM grid ORDER BY place, step"


def code_of_kind(kind: str) -> str:
    """SQL for the code of a kind of value, of one that was measured."""
    cases = "WHEN '>=' THEN 1 WHEN 'nan' THEN 2 WHEN 'inf' THEN 3 WHEN '-inf' THEN 4 ELSE 0"
    return f"CASE {kind} {cases} END"


def with_non_finite(values: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Values with NaN and infinities where their kinds say so."""
    for code, number in _NON_FINITE.items():
        values[kinds == code] = number
    return values


def filled(column: np.ndarray, missing: float) -> np.ndarray:
    """A column that DuckDB gave, without NULLs, as an array of its own."""
    if isinstance(column, np.ma.MaskedArray):
        return column.filled(missing)
    return np.array(column)
