"""Archives in the released layout with planted truth, from a few hundred files up to the released size.

The recipe of the curves is in :mod:`shoal.workloads.synthetic_trials`.

Source: the counts of trials of the released database of Shallue et al. 2019, section 4.4 of the notes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from shoal.workloads.synthetic_trials import (
    COMPLETE,
    INCOMPLETE,
    INFEASIBLE,
    PlantedSearch,
    PlantedWorkload,
    planted,
    search_space,
)

RELEASED_VALUES = 71_638_836
RELEASED_SEARCHES = 454


@dataclass(frozen=True, kw_only=True)
class SyntheticArchive:
    """Workloads, each of whose searches is made on its own from the seed.

    Args:
        workloads: what is in it.
        seed: of everything random.
        values: total number of values to come out at; None takes the workloads' ``rows`` as they are.
            Must be a multiple of 6.
    """

    workloads: Sequence[PlantedWorkload]
    seed: int = 0
    values: int | None = None

    @cached_property
    def _plan(self) -> list[tuple[PlantedWorkload, int, np.ndarray, np.ndarray]]:
        """Per search its trials' statuses and numbers of rows."""
        plan: list[tuple[PlantedWorkload, int, np.ndarray, np.ndarray]] = []
        for workload in self.workloads:
            for batch in sorted(workload.counts):
                rng = np.random.default_rng([self.seed, len(plan), 0])
                complete, incomplete, infeasible = workload.counts[batch]
                status = np.repeat(
                    [COMPLETE, INCOMPLETE, INFEASIBLE], [complete, incomplete, infeasible]
                )
                rng.shuffle(status)
                rows = np.full(status.size, workload.rows)
                cut = status == INCOMPLETE
                rows[cut] = np.maximum(
                    3, (rows[cut] * rng.uniform(0.3, 0.9, cut.sum())).astype(int)
                )
                bad = status == INFEASIBLE
                rows[bad] = rng.integers(3, 9, bad.sum())
                plan.append((workload, batch, status, rows))
        if self.values is not None:
            _fit_rows(plan, self.values)
        return plan

    def __len__(self) -> int:
        return len(self._plan)

    def searches(self) -> Iterator[PlantedSearch]:
        """Every search, made as it is asked for."""
        for number, (workload, batch, status, rows) in enumerate(self._plan):
            rng = np.random.default_rng([self.seed, number, 1])
            yield planted(workload, batch, status, rows, rng)

    def write(self, directory: Path) -> int:
        """Write the released layout.

        Args:
            directory: which must not exist.

        Returns:
            How many values were written.
        """
        directory.mkdir(parents=True)
        written = 0
        for search in self.searches():
            _write(search, directory / search.path)
            written += search.step.size * len(search.values)
        return written


def small_archive(*, seed: int = 0, trials: int = 60, rows: int = 60) -> SyntheticArchive:
    """Eight workloads at eight batch sizes with every special case; 230,000 rows as it stands."""
    batches = [2**i for i in range(1, 16, 2)]

    def counts(infeasible: float) -> dict[int, tuple[int, int, int]]:
        bad, cut = int(trials * infeasible), trials // 10
        return dict.fromkeys(batches, (trials - bad - cut, cut, bad))

    def workload(path: str, steps_min: float, critical: float, **options: Any) -> PlantedWorkload:
        given = {"counts": counts(0.2), "rows": rows, **options}
        return PlantedWorkload(
            path=path, steps_min=steps_min, samples_min=steps_min * critical, **given
        )

    language: dict[str, Any] = {"metric": "cross_entropy_error", "goal": 3.9}
    return SyntheticArchive(
        seed=seed,
        workloads=[
            workload("mnist/simple_cnn_base/sgd", 400, 64, goal=0.03, counts=counts(0)),
            workload("mnist/simple_cnn_base/momentum", 300, 256, goal=0.03, tie=512),
            workload("mnist/simple_cnn_base/nesterov_momentum", 300, 256, goal=0.01, at_edge=2),
            workload("mnist_subsets/mnist_6875/fc_1024/sgd", 350, 128, time_budget=True),
            workload("imagenet/resnet_50/nesterov_momentum", 900, 2048, goal=0.25, samples=50_000),
            workload(
                "open_images_v4/resnet_50/sgd", 500, 512, metric="average_precision", goal=0.31
            ),
            workload("lm1b/lstm/nesterov_momentum", 600, 128, never_reaches=2**15, **language),
            workload("lm1b/transformer_base/sgd", 500, 1024, tie=8, **language),
        ],
    )


def released_archive(*, seed: int = 0, values: int = RELEASED_VALUES) -> SyntheticArchive:
    """The released workloads with the released counts of trials, and as many values."""
    workloads: list[PlantedWorkload] = []
    text = files("shoal.workloads").joinpath("released_counts.txt").read_text()
    for line in text.splitlines():
        path, *entries = line.split()
        counts: dict[int, tuple[int, int, int]] = {}
        for entry in entries:
            batch, numbers = entry.split(":")
            complete, incomplete, infeasible = (int(number) for number in numbers.split("/"))
            counts[int(batch)] = (complete, incomplete, infeasible)
        metric, goal, samples = _kind(path)
        critical = math.sqrt(min(counts) * max(counts))
        workloads.append(
            PlantedWorkload(
                path=path,
                counts=counts,
                steps_min=500,
                samples_min=500 * critical,
                metric=metric,
                goal=goal,
                samples=samples,
                time_budget=path.startswith("mnist_subsets"),
            )
        )
    return SyntheticArchive(workloads=workloads, seed=seed, values=values)


def _kind(path: str) -> tuple[str, float, int]:
    """Metric, goal and size of the validation set by data set."""
    if "open_images" in path:
        return "average_precision", 0.31, 41_620
    if "lm1b" in path or "common_crawl" in path:
        return "cross_entropy_error", 3.9, 10_000
    if "imagenet" in path:
        return "classification_error", 0.35 if "vgg" in path else 0.25, 50_000
    goal = 0.3 if "cifar" in path else 0.1 if "fashion" in path else 0.01
    return "classification_error", goal, 5_000


def _fit_rows(plan: list[tuple[PlantedWorkload, int, np.ndarray, np.ndarray]], values: int) -> None:
    """Change the rows of trials that are not INFEASIBLE so that the values add up to ``values``."""
    if values % 6:
        raise ValueError(f"values = {values}; must be a multiple of 6")
    width = [len(workload.columns) for workload, *_ in plan]
    fixed = free = 0
    for w, (*_, status, rows) in zip(width, plan, strict=True):
        bad = int(rows[status == INFEASIBLE].sum())
        fixed += w * bad
        free += w * (int(rows.sum()) - bad)
    factor = (values - fixed) / free
    left = values
    for w, (_, _, status, rows) in zip(width, plan, strict=True):
        long = status != INFEASIBLE
        rows[long] = np.maximum(3, (rows[long] * factor).astype(int))
        left -= w * int(rows.sum())
    # Narrow rows first, where the rest is not a multiple of a wide one.
    for w, (_, _, status, rows) in zip(width, plan, strict=True):
        for i in np.flatnonzero(status == COMPLETE):
            if left >= w and (w == 6 or left % 6):
                rows[i] += 1
                left -= w
    if left:
        raise ValueError(f"values = {values}; cannot be met, {left} are left over")


def _write(search: PlantedSearch, directory: Path) -> None:
    directory.mkdir(parents=True)
    dataset, model, optimizer = search.workload.path.split("/")[-3:]
    facts = {
        "batch_size": search.global_batch,
        "dataset": dataset,
        "model": model,
        "optimizer": optimizer,
        "early_stopping": bool((search.status == INCOMPLETE).any()),
        "train_steps": search.train_steps,
        "parameter_configs": search_space(search),
    }
    (directory / "study.json").write_text(json.dumps(facts, indent=2))
    header = ",".join(["step", *search.values]).encode() + b"\n"
    lines = _lines(search, directory / "lines.csv")
    ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")) + 1
    cuts = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(search.rows)])].tolist()
    starts = np.cumsum(search.rows)
    last = search.step[starts - 1].tolist()
    for i, trial in enumerate(search.ids.tolist()):
        place = directory / str(trial)
        place.mkdir()
        metadata = {
            "trial_id": trial,
            "status": str(search.status[i]),
            "steps": last[i],
            "parameters": {name: values[i].item() for name, values in search.parameters.items()},
            "_internal_study_name": search.path,
            "_internal_trial_id": trial,
        }
        (place / "metadata.json").write_text(json.dumps(metadata))
        (place / "measurements.csv").write_bytes(header + lines[cuts[i] : cuts[i + 1]])


def _lines(search: PlantedSearch, path: Path) -> bytes:
    """All evaluations as lines of CSV; DuckDB prints numbers far faster than Python."""
    import duckdb

    evaluations = {"step": search.step, **search.values}
    with duckdb.connect() as connection:
        connection.register("evaluations", evaluations)
        target = str(path).replace("'", "''")
        # An array's NaN arrives as NULL.
        columns = ", ".join(f"""coalesce("{name}", 'nan'::DOUBLE)""" for name in search.values)
        query = f"SELECT step, {columns} FROM evaluations"
        connection.execute(f"COPY ({query}) TO '{target}' (FORMAT csv, HEADER false)")
    content = path.read_bytes()
    path.unlink()
    return content
