"""A synthetic archive straight into the tables an import would make, and what both sides are asked of it."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np

from benchmarks.ledger_pandas import BUDGETS
from shoal.ledger import archive_views
from shoal.ledger.archive import ArchiveReport, finish
from shoal.ledger.statements import quoted, text
from shoal.ledger.store import connect, write_rows
from shoal.study.records import Goal
from shoal.workloads.synthetic_archive import SyntheticArchive
from shoal.workloads.synthetic_trials import PlantedSearch, PlantedWorkload

PART_ROWS = 1_000_000


def write_tables(archive: SyntheticArchive, out: Path) -> int:
    """What importing the archive's files gives, without the files.

    Returns:
        How many values it holds.
    """
    tables = out / "tables"
    tables.mkdir(parents=True)
    searches: list[dict[str, object]] = []
    trials: list[dict[str, object]] = []
    evaluations = values = 0
    with connect(out) as connection:
        waiting: list[tuple[int, PlantedSearch]] = []
        for search in archive.searches():
            study, optimizer = key(search.workload)
            number, place = len(searches), len(trials)
            searches.append(
                {
                    "search": number,
                    "study": study,
                    "curve": optimizer,
                    "global_batch": search.global_batch,
                    "repeat": 0,
                    "optimizer": optimizer,
                    "train_steps": search.train_steps,
                    "parameter_configs": "{}",
                    "extra": "",
                }
            )
            for i, trial in enumerate(search.ids.tolist()):
                trials.append(
                    {
                        "place": place + i,
                        "search": number,
                        "trial": trial,
                        "status": str(search.status[i]),
                        "parameters": {n: v[i].item() for n, v in search.parameters.items()},
                        "extra": "",
                    }
                )
            waiting.append((place, search))
            evaluations += search.step.size
            values += search.step.size * len(search.values)
            if sum(s.step.size for _, s in waiting) > PART_ROWS:
                _write_part(connection, waiting, tables)
                waiting = []
        if waiting:
            _write_part(connection, waiting, tables)
        write_rows(
            connection,
            searches,
            archive_views.SEARCH_COLUMNS,
            "search",
            tables / "searches.parquet",
        )
        write_rows(
            connection, trials, archive_views.TRIAL_COLUMNS, "place", tables / "trials.parquet"
        )
    report = ArchiveReport(
        searches=len(searches),
        trials=len(trials),
        evaluations=evaluations,
        values=values,
        problems=[],
    )
    finish(tables, report)
    return values


def _write_part(
    connection: duckdb.DuckDBPyConnection, waiting: list[tuple[int, PlantedSearch]], tables: Path
) -> None:
    names = sorted({name for _, search in waiting for name in search.values})
    columns: dict[str, np.ndarray] = {
        "place": np.concatenate(
            [np.repeat(place + np.arange(s.rows.size), s.rows) for place, s in waiting]
        ).astype(np.int32),
        "step": np.concatenate([s.step for _, s in waiting]),
    }
    for i, name in enumerate(names):
        parts = [s.values.get(name) for _, s in waiting]
        filled = [
            np.full(s.step.size, -1.0) if part is None else part
            for part, (_, s) in zip(parts, waiting, strict=True)
        ]
        there = [
            np.full(s.step.size, p is not None) for p, (_, s) in zip(parts, waiting, strict=True)
        ]
        columns[f"v{i}"], columns[f"t{i}"] = np.concatenate(filled), np.concatenate(there)
    taken = ["place", "step"]
    for i, name in enumerate(names):
        # An array's NaN arrives as NULL.
        taken.append(f"CASE WHEN t{i} AND isfinite(v{i}) THEN v{i} END AS {quoted(name)}")
        taken.append(
            f"CASE WHEN NOT t{i} OR isfinite(v{i}) THEN NULL WHEN v{i} IS NULL THEN 'nan' "
            f"ELSE CAST(v{i} AS VARCHAR) END AS {quoted(name + archive_views.KIND)}"
        )
    connection.register("part", columns)
    target = text(str(tables / f"evaluations-{waiting[0][0]:09d}.parquet"))
    connection.execute(
        f"COPY (SELECT {', '.join(taken)} FROM part) TO {target} (FORMAT parquet, COMPRESSION zstd)"
    )
    connection.unregister("part")


def key(workload: PlantedWorkload) -> tuple[str, str]:
    """(study, curve) of a workload."""
    study, _, optimizer = workload.path.rpartition("/")
    return study, optimizer


def goals(archive: SyntheticArchive) -> dict[tuple[str, str], Goal]:
    """The goal of each workload."""
    return {
        key(workload): Goal(
            metric=f"val/{workload.metric}",
            value=workload.goal,
            larger_is_better=workload.larger_is_better,
        )
        for workload in archive.workloads
    }


def trials_asked(archive: SyntheticArchive) -> dict[tuple[str, str], int]:
    """How many COMPLETE trials each workload's searches are analysed with: 100, or 50 where there are less."""
    return {
        key(workload): 100 if min(c for c, _, _ in workload.counts.values()) >= 100 else 50
        for workload in archive.workloads
    }


def budgets(archive: SyntheticArchive) -> tuple[dict, dict]:
    """Budgets of steps and of samples of each workload's figures."""
    steps, samples = {}, {}
    for workload in archive.workloads:
        middle = sorted(workload.counts)[len(workload.counts) // 2]
        unit = workload.steps(middle)
        steps[key(workload)] = [int(unit * factor) for factor in BUDGETS]
        samples[key(workload)] = [int(unit * middle * factor) for factor in BUDGETS]
    return steps, samples
