"""How far a study is, read from what its runners leave behind, without touching it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.study.claims import Claims
from shoal.study.directory import StudyDirectory
from shoal.study.records import CONFIRM, SearchKey


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """One curve at one global batch.

    Args:
        curve: the optimizer's entry.
        global_batch: samples per step.
        searches: how many there are to be, confirmations not counted.
        done: how many of them are finished.
        running: how many somebody works on now, confirmations included.
        reached: finished searches that met the hardest goal.
        short: finished searches that found too few feasible trials.
        diverged: trials that diverged, in all of them so far.
        trials: trials drawn so far.
        steps: geometric mean of the steps to the hardest goal over those that reached it.
        confirmed: S_conf of the hardest goal, once there is one.
        engine: that trains here; empty before it was chosen.
        step: how far the running ones are.
        seconds_left: from the finished ones of the same kind; None while there are none.
    """

    curve: str
    global_batch: int
    searches: int
    done: int
    running: int
    reached: int
    short: int
    diverged: int
    trials: int
    steps: float | None
    confirmed: float | None
    engine: str
    step: int
    seconds_left: float | None

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        return dict(vars(self))


def status_of(
    directory: StudyDirectory, keys: Sequence[SearchKey], *, processes: int = 1
) -> list[BatchStatus]:
    """How every curve and global batch stands.

    Args:
        directory: the study's.
        keys: all searches of the study, without confirmations.
        processes: runners among which the time left is shared.
    """
    claims = Claims(directory.claims, runner="status") if directory.claims.is_dir() else None
    groups: dict[tuple[str, int], list[SearchKey]] = {}
    for key in keys:
        groups.setdefault((key.curve, key.global_batch), []).append(key)
    return [_status(directory, claims, group, processes) for group in groups.values()]


def seconds_left(rows: Iterable[BatchStatus]) -> float | None:
    """Of all together; None while some batch has no finished search to go by."""
    parts = [row.seconds_left for row in rows]
    return None if any(part is None for part in parts) else math.fsum(p for p in parts if p)


def _status(
    directory: StudyDirectory, claims: Claims | None, keys: list[SearchKey], processes: int
) -> BatchStatus:
    curve, batch = keys[0].curve, keys[0].global_batch
    confirm = SearchKey(curve=curve, global_batch=batch, repeat=CONFIRM)
    ends: list[Any] = [directory.end_of(key) for key in keys]
    done = [end for end in ends if end is not None]
    # While a search is finished its progress file says the same; newest word first.
    heard: list[Any] = [
        end or directory.progress_of(key) or {} for key, end in zip(keys, ends, strict=True)
    ]
    open_keys = [key for key, end in zip(keys, ends, strict=True) if end is None]
    if directory.end_of(confirm) is None:
        open_keys.append(confirm)
    running = 0
    if claims is not None:
        running = sum(claims.holder(str(key)).alive for key in open_keys)
    steps = [steps_to_hardest(end) for end in done]
    reached = [step for step in steps if step]
    confirmed: Any = directory.end_of(confirm)
    note: Any = directory.engine_of(curve, batch) or {}
    return BatchStatus(
        curve=curve,
        global_batch=batch,
        searches=len(keys),
        done=len(done),
        running=running,
        reached=sum(step is not None for step in steps),
        short=sum(end.get("state") == "short" for end in done),
        diverged=sum(int(word.get("diverged", 0)) for word in heard),
        trials=sum(int(word.get("trials", 0)) for word in heard),
        steps=statistics.geometric_mean(reached) if reached else None,
        confirmed=confirmed["goals"][-1]["steps_confirmed"] if confirmed else None,
        engine=str(note.get("engine", "")),
        step=max(
            (int(w.get("step", 0)) for w, e in zip(heard, ends, strict=True) if e is None),
            default=0,
        ),
        seconds_left=_time_left(done, len(keys), processes),
    )


def steps_to_hardest(end: Any) -> int | None:
    """The steps to the hardest goal of a finished search; None if it was not reached."""
    goals = end.get("goals") or []
    steps = goals[-1].get("steps") if goals else None
    return None if steps is None else int(steps)


def _time_left(done: list[Any], searches: int, processes: int) -> float | None:
    if len(done) == searches:
        return 0.0
    if not done:
        return None
    mean = statistics.fmean(float(end["seconds"]) for end in done)
    return mean * (searches - len(done)) / processes
