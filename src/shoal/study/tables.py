"""What a study measured, as values in memory: the only thing the analysis reads.

:func:`read_study` merges all journals and the compacted tables of a study by one rule and hands out a
:class:`SearchData` per search. Nothing here writes, and writers are not disturbed.

The rule: an attempt is one trajectory from step 0; a trial counts with the attempt of its newest row
(largest segment, then latest time), and with no other; at each step the row of the largest segment
counts. Rows of other attempts stay stored and are never mixed in.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.errors import UsageError
from shoal.ledger import store
from shoal.study.records import Curve, Goal, Outcome, SearchKey, Trial
from shoal.study.table_arrays import MetricColumn, SampleOutcomes, StudyArrays


@dataclass(frozen=True, kw_only=True)
class SearchData:
    """One search as the analysis sees it; the four sequences run side by side.

    Args:
        key: which search.
        trials: in rising id.
        curves: what was measured; empty for a trial of which nothing is on file yet.
        outcomes: None while a trial is under way.
        engines: what trained each trial; empty where unknown.
        attempts: the attempt each curve is of; empty where unknown.
        end: h, the step to which the analysis looks; None while the search is not finished, or if its
            last row does not say.
        state: "done", "short", "preempted"; None without a row about it.
        draws: trials drawn, as the search's last row says; the number of trials without one.
    """

    key: SearchKey
    trials: Sequence[Trial]
    curves: Sequence[Curve]
    outcomes: Sequence[Outcome | None]
    engines: Sequence[str] = ()
    attempts: Sequence[str] = ()
    end: int | None = None
    state: str | None = None
    draws: int = 0

    def __post_init__(self) -> None:
        if not len(self.trials) == len(self.curves) == len(self.outcomes):
            raise UsageError(
                f"{self.key}: {len(self.trials)} trials, {len(self.curves)} curves and "
                f"{len(self.outcomes)} outcomes; there must be one of each per trial"
            )
        if any(a.id >= b.id for a, b in zip(self.trials, self.trials[1:], strict=False)):
            raise UsageError(f"{self.key}: trials must come in rising id; sort them")

    def crossings(self, goal: Goal) -> list[int | None]:
        """C_i(g) of every trial, in order."""
        return [curve.crossing(goal) for curve in self.curves]


@dataclass(kw_only=True)
class StudyTables:
    """All searches of a study, each read when it is asked for first.

    Args:
        spec: the content of ``study.json``; empty if there is none.
        searches: those with at least one trial, sorted.
        load: gives one of them.
        load_metric: gives one metric of one of them.
        load_samples: gives the per-sample outcomes of one of them.
    """

    spec: Mapping[str, object]
    searches: Sequence[SearchKey]
    load: Callable[[SearchKey], SearchData]
    load_metric: Callable[[SearchKey, str], MetricColumn]
    load_samples: Callable[[SearchKey], list[SampleOutcomes]] = lambda key: []
    _read: dict[SearchKey, SearchData] = field(default_factory=dict)

    @classmethod
    def of(
        cls, searches: Iterable[SearchData], spec: Mapping[str, object] | None = None
    ) -> StudyTables:
        """Tables of searches that are in memory already."""
        by_key = {data.key: data for data in searches}
        return cls(
            spec=spec or {},
            searches=sorted(by_key),
            load=by_key.__getitem__,
            load_metric=lambda key, metric: metric_column(by_key[key], metric),
        )

    def __getitem__(self, key: SearchKey) -> SearchData:
        """One search.

        Raises:
            KeyError: it has no trials.
        """
        if key not in self._read:
            if key not in self.searches:
                raise KeyError(str(key))
            self._read[key] = self.load(key)
        return self._read[key]

    def __iter__(self) -> Iterator[SearchData]:
        return (self[key] for key in self.searches)

    def __len__(self) -> int:
        return len(self.searches)

    def curves(self) -> list[str]:
        """Names of the curves that have searches, sorted."""
        return sorted({key.curve for key in self.searches})

    def batches(self, curve: str) -> list[int]:
        """Global batches of a curve that have searches, rising."""
        return sorted({key.global_batch for key in self.searches if key.curve == curve})

    def repeats(self, curve: str, global_batch: int) -> list[SearchData]:
        """The repeated searches of one curve at one batch, by number."""
        return [
            self[key]
            for key in self.searches
            if key.curve == curve and key.global_batch == global_batch
        ]

    def curve(self, key: SearchKey, trial: int) -> Curve:
        """The curve of one trial, by its id.

        Raises:
            KeyError: there is no such search or trial.
        """
        data = self[key]
        for found, curve in zip(data.trials, data.curves, strict=True):
            if found.id == trial:
                return curve
        raise KeyError(f"{key}, trial {trial}")

    def metric(self, key: SearchKey, metric: str) -> MetricColumn:
        """One metric of one search as arrays; empty ones if it was never measured.

        Raises:
            KeyError: the search has no trials.
        """
        if key not in self.searches:
            raise KeyError(str(key))
        return self.load_metric(key, metric)

    def samples(self, key: SearchKey) -> list[SampleOutcomes]:
        """Per-sample outcomes on file for one search, by trial, step and metric.

        Raises:
            KeyError: the search has no trials.
        """
        if key not in self.searches:
            raise KeyError(str(key))
        return self.load_samples(key)


def read_study(directory: str | os.PathLike[str]) -> StudyTables:
    """Everything a study has measured so far. Writers may be at work meanwhile.

    Args:
        directory: the study's.

    Returns:
        Tables over arrays that are in memory; objects are made per search when asked for.

    Raises:
        UsageError: it is no directory, a journal is damaged inside (named, with the line), or duckdb is
            not installed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(
            f"study = {directory}; there is no such directory; give a study's directory"
        )
    arrays = store.with_rows(directory, StudyArrays.fetch)

    def search(key: SearchKey) -> SearchData:
        places = arrays.keys[key]
        rows = [arrays.rows[place] for place in places]
        ending = arrays.endings.get(str(key))
        return SearchData(
            key=key,
            trials=[row.trial for row in rows],
            curves=[arrays.curve(place) for place in places],
            outcomes=[row.outcome for row in rows],
            engines=[row.engine for row in rows],
            attempts=[row.attempt for row in rows],
            end=ending.end if ending else None,
            state=ending.state if ending else None,
            draws=ending.draws if ending else len(rows),
        )

    spec: dict[str, object] = {}
    with contextlib.suppress(FileNotFoundError):
        spec = json.loads((directory / "study.json").read_text())
    return StudyTables(
        spec=spec,
        searches=sorted(arrays.keys),
        load=search,
        load_metric=arrays.metric,
        load_samples=arrays.samples,
    )


def metric_column(data: SearchData, metric: str) -> MetricColumn:
    """One metric of a search that is in memory."""
    rows = [
        (trial.id, evaluation.step, *evaluation.metrics[metric])
        for trial, curve in zip(data.trials, data.curves, strict=True)
        for evaluation in curve.evaluations
        if metric in evaluation.metrics
    ]
    return MetricColumn(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.array([row[3] == "=" for row in rows], dtype=bool),
    )
