"""Imported archives as studies: what :func:`shoal.ledger.archive.import_archive` made, for the analysis."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import UsageError
from shoal.ledger.archive_layout import COMPLETE, INCOMPLETE, INFEASIBLE, space_facts
from shoal.ledger.archive_views import KIND, metrics, shown
from shoal.ledger.statements import quoted, text
from shoal.study.records import Goal, Outcome, SearchKey, Trial
from shoal.study.space import SCALES
from shoal.study.table_arrays import (
    ABSENT,
    Ending,
    StudyArrays,
    TrialRow,
    code_of_kind,
    filled,
    with_non_finite,
)
from shoal.study.tables import SearchData, StudyTables

if TYPE_CHECKING:
    import duckdb


def archived_studies(directory: str | os.PathLike[str]) -> list[str]:
    """Names of the studies (``[group/]dataset/model``) in an imported archive, sorted."""
    with shown(directory) as connection:
        found = connection.execute("SELECT DISTINCT study FROM searches ORDER BY study").fetchall()
    return [name for (name,) in found]


def read_archive(
    directory: str | os.PathLike[str],
    study: str | None = None,
    *,
    goal: Goal | None = None,
    first_n_complete: int | None = None,
) -> StudyTables:
    """One study of an imported archive.

    Args:
        directory: the one given to ``import_archive`` as ``out``.
        study: which, as :func:`archived_studies` names it; None where there is only one.
        goal: decides for COMPLETE trials of released archives whether they reached it, and for all
            curves: None leaves them without an outcome.
        first_n_complete: take per search only trials up to the so many-th COMPLETE one by id, and of those
            only COMPLETE ones; None takes all.

    Returns:
        Its tables. An INFEASIBLE trial counts as diverged at its last evaluation, where the archive does
        not say when. Trials have the unit coordinates that the archive's search space gives their
        parameters.

    Raises:
        UsageError: no imported archive, or no such study in it.
    """
    with shown(directory) as connection:
        found = connection.execute("SELECT DISTINCT study FROM searches ORDER BY study").fetchall()
        names = [name for (name,) in found]
        if study is None and len(names) == 1:
            study = names[0]
        if study is None or study not in names:
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise UsageError(f"study = {study!r}; the archive has {some}; name one of them")
        facts, endings = _searches(connection, study)
        rows, places, diverged_at = _trials(connection, study, facts, first_n_complete)
        names = metrics(Path(directory) / "tables")
        arrays = _arrays(connection, names, rows, places, diverged_at)
    arrays.endings.update(endings)

    def search(key: SearchKey) -> SearchData:
        places = arrays.keys[key]
        rows = [arrays.rows[place] for place in places]
        curves = [arrays.curve(place) for place in places]
        ended: list[Outcome | None] = []
        for row, curve in zip(rows, curves, strict=True):
            if row.outcome is None and goal is not None:
                reached = curve.crossing(goal) is not None
                ended.append(Outcome.REACHED if reached else Outcome.NOT_REACHED)
            else:
                ended.append(row.outcome)
        ending = arrays.endings[str(key)]
        return SearchData(
            key=key,
            trials=[row.trial for row in rows],
            curves=curves,
            outcomes=ended,
            engines=[row.engine for row in rows],
            attempts=[row.attempt for row in rows],
            end=ending.end,
            state=ending.state,
            draws=ending.draws,
        )

    return StudyTables(
        spec={"name": study, "curves": facts},
        searches=sorted(arrays.keys),
        load=search,
        load_metric=arrays.metric,
    )


Facts = dict[str, dict[str, object]]


def _searches(connection: duckdb.DuckDBPyConnection, study: str) -> tuple[Facts, dict[str, Ending]]:
    """Curves with their spaces, in the form ``study.json`` has, and how each search ended."""
    facts: Facts = {}
    endings: dict[str, Ending] = {}
    for curve, batch, repeat, optimizer, steps, configs, extra, draws in connection.execute(
        "SELECT curve, global_batch, repeat, optimizer, train_steps, parameter_configs, extra, "
        "(SELECT count(*) FROM trial_rows t WHERE t.search = s.search) FROM searches s "
        f"WHERE study = {text(study)} ORDER BY curve, global_batch, repeat"
    ).fetchall():
        entry = facts.setdefault(curve, {"optimizer": optimizer, "space_at": {}})
        at = entry["space_at"]
        assert isinstance(at, dict)
        at[str(batch)] = space_facts(configs)
        ours = json.loads(extra) if extra else {"end": steps or None, "state": "done"}
        key = SearchKey(curve=curve, global_batch=batch, repeat=repeat)
        endings[str(key)] = Ending(ours["state"], ours["end"], ours.get("draws", draws))
    return facts, endings


def _trials(
    connection: duckdb.DuckDBPyConnection, study: str, facts: Facts, first_n_complete: int | None
) -> tuple[list[TrialRow], list[int], dict[int, list[int] | None]]:
    """Trials, their places in the archive, and where each diverged: None if it is not known where."""
    rows: list[TrialRow] = []
    places: list[int] = []
    diverged_at: dict[int, list[int] | None] = {}
    complete: Counter[SearchKey] = Counter()
    for curve, batch, repeat, number, status, names, values, extra, place in connection.execute(
        "SELECT s.curve, s.global_batch, s.repeat, t.trial, t.status, map_keys(t.parameters), "
        "map_values(t.parameters), t.extra, t.place FROM trial_rows t JOIN searches s USING (search) "
        f"WHERE s.study = {text(study)} ORDER BY s.curve, s.global_batch, s.repeat, t.trial"
    ).fetchall():
        key = SearchKey(curve=curve, global_batch=batch, repeat=repeat)
        if first_n_complete is not None:
            if status != COMPLETE or complete[key] >= first_n_complete:
                continue
            complete[key] += 1
        ours = json.loads(extra) if extra else {}
        parameters = dict(zip(names, values, strict=True))
        space = facts[curve]["space_at"]
        assert isinstance(space, dict)
        trial = Trial(
            search=key,
            id=number,
            unit=tuple(ours["unit"]) if ours else _unit(space[str(batch)], parameters),
            parameters=parameters,
            seed=ours.get("seed", 0),
            address=ours.get("address", ""),
        )
        outcome = ours["outcome"] if ours else _OUTCOMES.get(status)
        rows.append(
            TrialRow(
                trial,
                ours.get("attempt", ""),
                ours.get("engine", ""),
                None if outcome is None else Outcome(outcome),
            )
        )
        places.append(place)
        diverged_at[place] = ours["diverged_at"] if ours else None if status == INFEASIBLE else []
    return rows, places, diverged_at


_OUTCOMES = {INFEASIBLE: "diverged", INCOMPLETE: "preempted"}


def _unit(
    space: Mapping[str, Mapping[str, object]], parameters: Mapping[str, float]
) -> tuple[float, ...]:
    """The coordinates that give a trial's parameters; NaN where the space does not say."""
    unit: list[float] = []
    for name, facts in space.items():
        given = {key: value for key, value in facts.items() if key != "scale"}
        coordinate = math.nan
        with contextlib.suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            coordinate = SCALES[str(facts["scale"])](**given).unit(parameters[name])
        unit.append(coordinate)
    return tuple(unit)


def _arrays(
    connection: duckdb.DuckDBPyConnection,
    names: list[str],
    rows: list[TrialRow],
    places: list[int],
    diverged_at: Mapping[int, list[int] | None],
) -> StudyArrays:
    keys: dict[SearchKey, range] = {}
    for i, row in enumerate(rows):
        key = row.trial.search
        keys[key] = range(keys[key].start if key in keys else i, i + 1)
    order = {place: i for i, place in enumerate(places)}
    columns = ["place", "step"]
    for i, name in enumerate(names):
        kind = quoted(name + KIND)
        columns.append(f"{quoted(name)} AS v{i}")
        code = code_of_kind(kind)
        columns.append(
            f"CASE WHEN {quoted(name)} IS NULL AND {kind} IS NULL THEN -1 ELSE {code} END AS k{i}"
        )
    found = connection.execute(
        f"SELECT {', '.join(columns)} FROM evaluation_rows "
        f"WHERE place BETWEEN {min(places, default=0)} AND {max(places, default=-1)}"
    ).fetchnumpy()
    mine = np.array([order.get(place, -1) for place in found["place"].tolist()], dtype=np.int64)
    by_trial = np.lexsort((filled(found["step"], 0), mine))
    by_trial = by_trial[mine[by_trial] >= 0]
    taken = {name: np.ma.asarray(column)[by_trial] for name, column in found.items()}
    step = filled(taken["step"], 0)
    first = np.searchsorted(mine[by_trial], np.arange(len(rows) + 1))
    diverged = np.zeros(step.size, dtype=bool)
    for i, place in enumerate(places):
        part = slice(int(first[i]), int(first[i + 1]))
        flagged = diverged_at[place]
        if flagged is None:
            diverged[part.stop - 1 : part.stop] = part.stop > part.start
        elif flagged:
            diverged[part] = np.isin(step[part], flagged)
    value, kind = {}, {}
    for i, name in enumerate(names):
        kind[name] = filled(taken[f"k{i}"], ABSENT).astype(np.int8)
        value[name] = with_non_finite(filled(taken[f"v{i}"], np.nan), kind[name])
    return StudyArrays(
        rows=rows, keys=keys, first=first, step=step, diverged=diverged, value=value, kind=kind
    )
