"""What runners of a study write: one journal per runner process, one row per thing that happened.

Row kinds (flat JSON, each with ``kind`` and ``time``, seconds since 1970): ``journal`` once at the top of a
file, so that no two journals are alike; ``trial`` when an attempt at a trial begins; ``eval`` per grid
point; ``outcome`` when a trial ended; ``search`` when a search did; ``samples`` per-sample outcomes near
a crossing. ``segment`` is the number of the claim under which the row was written: of two rows about
the same thing, the one of the larger segment counts.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.errors import UsageError
from shoal.ledger.journal import Journal

RUNNER_NAME = re.compile(r"[A-Za-z0-9_-]+")


class SearchName(Protocol):
    """Names a search; ``shoal.study.records.SearchKey`` is one. ``str`` of it is its name in rows."""

    @property
    def curve(self) -> str: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def repeat(self) -> int: ...


class TrialValues(Protocol):
    """A trial; ``shoal.study.records.Trial`` is one."""

    @property
    def search(self) -> SearchName: ...
    @property
    def id(self) -> int: ...
    @property
    def unit(self) -> Sequence[float]: ...
    @property
    def parameters(self) -> Mapping[str, float]: ...
    @property
    def seed(self) -> int: ...
    @property
    def address(self) -> str: ...


class EvaluationValues(Protocol):
    """What was measured at a grid point; ``shoal.study.records.Evaluation`` is one."""

    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, tuple[float, str]]: ...
    @property
    def diverged(self) -> bool: ...


class StudyWriter:
    """The journal of one runner process; its only writer. Rows may come from several threads.

    A runner that comes back under its old name goes on in the same file.

    Args:
        path: ``rows/RUNNER.jsonl`` in the study's directory; RUNNER of letters, digits, ``_`` and ``-``.

    Raises:
        UsageError: a runner's name with other characters.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        if path.suffix != ".jsonl" or not RUNNER_NAME.fullmatch(path.stem):
            raise UsageError(
                f"journal = {path.name!r}; it is a runner's name of letters, digits, _ and -, and "
                ".jsonl; rename the runner"
            )
        self._journal = Journal(path)
        if path.stat().st_size == 0:
            self._append("journal", {"id": secrets.token_hex(8), "runner": path.stem})

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    def trial(self, trial: TrialValues, *, attempt: str, engine: str, segment: int = 0) -> None:
        """An attempt at a trial begins, from step 0; from now on it is the one that counts."""
        search = trial.search
        row: dict[str, object] = {
            "search": str(search),
            "curve": search.curve,
            "global_batch": search.global_batch,
            "repeat": search.repeat,
            "trial": trial.id,
            "address": trial.address,
            "attempt": attempt,
            "segment": segment,
            "seed": trial.seed,
            "engine": engine,
            "unit": [float(u) for u in trial.unit],
            "parameters": {name: float(value) for name, value in trial.parameters.items()},
        }
        self._append("trial", row)

    def evaluation(
        self,
        search: SearchName | str,
        trial: int,
        evaluation: EvaluationValues,
        *,
        attempt: str,
        segment: int = 0,
    ) -> None:
        """A grid point was measured. Non-finite values and bounds may be among its metrics."""
        metrics: dict[str, float] = {}
        bounds: dict[str, str] = {}
        for name, (value, bound) in evaluation.metrics.items():
            metrics[name] = float(value)
            if bound != "=":
                bounds[name] = bound
        row = _of(search, trial, attempt, segment)
        row["step"] = int(evaluation.step)
        row["diverged"] = bool(evaluation.diverged)
        row["metrics"] = metrics
        if bounds:
            row["bounds"] = bounds
        self._append("eval", row)

    def outcome(
        self,
        search: SearchName | str,
        trial: int,
        outcome: str,
        step: int,
        *,
        attempt: str,
        segment: int = 0,
    ) -> None:
        """A trial ended, at ``step``, in one of the outcomes."""
        row = _of(search, trial, attempt, segment)
        self._append("outcome", {**row, "outcome": str(outcome), "step": int(step)})

    def search(
        self,
        search: SearchName,
        state: str,
        *,
        end: int | None,
        draws: int,
        goals: Sequence[Mapping[str, object]] = (),
        segment: int = 0,
    ) -> None:
        """A search ended or was put aside.

        Args:
            search: which.
            state: ``done``, ``short`` or ``preempted``.
            end: h, the step to which its analysis looks; None if that is not known yet.
            draws: trials drawn.
            goals: what was found per goal, for convenience; the analysis derives it again.
            segment: number of the claim.
        """
        row: dict[str, object] = {
            "search": str(search),
            "curve": search.curve,
            "global_batch": search.global_batch,
            "repeat": search.repeat,
            "segment": segment,
            "state": state,
            "end": end,
            "draws": draws,
            "goals": [dict(goal) for goal in goals],
        }
        self._append("search", row)

    def samples(
        self,
        search: SearchName | str,
        trial: int,
        step: int,
        metric: str,
        outcomes: np.ndarray,
        *,
        attempt: str,
        segment: int = 0,
    ) -> None:
        """Per-sample outcomes of one metric at one grid point, 1 = wrong, in the data's order."""
        row = _of(search, trial, attempt, segment)
        wrong = np.asarray(outcomes).astype(bool).ravel()
        row.update(step=int(step), metric=metric, count=wrong.size, bits=packed(wrong))
        self._append("samples", row)

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        self._journal.close()

    def __enter__(self) -> StudyWriter:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _append(self, kind: str, row: Mapping[str, object]) -> None:
        self._journal.append({"kind": kind, "time": time.time(), **row})


def packed(outcomes: np.ndarray) -> str:
    """0/1 outcomes as base64 of packed bits."""
    return base64.b64encode(np.packbits(outcomes).tobytes()).decode("ascii")


def unpacked(bits: str, count: int) -> np.ndarray:
    """The inverse of :func:`packed`.

    Returns:
        ``count`` booleans.
    """
    raw = np.frombuffer(base64.b64decode(bits), dtype=np.uint8)
    return np.unpackbits(raw, count=count).astype(bool)


def _of(search: SearchName | str, trial: int, attempt: str, segment: int) -> dict[str, object]:
    return {"search": str(search), "trial": trial, "attempt": attempt, "segment": segment}
