"""When a round begins, and how many steps each worker has done by then: pure functions of step times.

*fixed*: a worker stops after ``sync_every`` of its own steps, and the round begins when the last one has.
*total-count*: the fleet's steps are counted together; when they reach their target, each worker finishes
the batch that is running and no more, so nobody is waited for longer than one batch.

Source: Teng et al. 2019, Algorithm 1: the round of a fleet of p workers falls due whenever p times the
period divides the total count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.errors import UsageError
from shoal.world.virtual.clock import Floats, WorkerClock

TriggerName = Literal["fixed", "total-count", "background"]
TRIGGERS: tuple[TriggerName, ...] = ("fixed", "total-count", "background")

_FIRST_GUESS_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Running:
    """A worker between two rounds.

    Args:
        clock: of the worker.
        start: when its first step of the period begins.
        done: steps it has done in its life.
        until: when it is killed; infinite if it is not. Steps that end later do not happen.
    """

    clock: WorkerClock
    start: float
    done: int
    until: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What a worker did between two rounds.

    Args:
        steps: it ended, >= 0.
        stop: when the last of them ended; its start if there is none. A killed worker stops when it is.
        killed: whether it was killed before its last step of the period ended.
    """

    steps: int
    stop: float
    killed: bool = False


def fixed(workers: Mapping[int, Running], sync_every: int) -> dict[int, Stretch]:
    """Each worker after ``sync_every`` of its own steps.

    Args:
        workers: by number.
        sync_every: steps, >= 1.
    """
    found: dict[int, Stretch] = {}
    for number, worker in workers.items():
        ends = worker.clock.ends(worker.start, first=worker.done, steps=sync_every)
        found[number] = _stretch(worker, ends)
    return found


def total_count(workers: Mapping[int, Running], target: int) -> dict[int, Stretch]:
    """All workers together after ``target`` steps, and whatever batch is then running.

    What a killed worker had ended before stays counted. If the rest are to reach a target that is no
    longer theirs, the period is so much longer.

    Args:
        workers: by number.
        target: steps of all of them, >= 1.

    Returns:
        For each worker the steps it ended by the moment at which the total was reached, and one more if
        one was running at that moment.

    Raises:
        UsageError: every worker is killed before the target is reached.
    """
    ends, due = _until_total(workers, target)
    found: dict[int, Stretch] = {}
    for number, worker in workers.items():
        by_then = int(np.searchsorted(ends[number], due, side="right"))
        at_rest = by_then > 0 and ends[number][by_then - 1] == due
        wanted = by_then if at_rest else by_then + 1
        if wanted > len(ends[number]):
            ends[number] = worker.clock.ends(worker.start, first=worker.done, steps=wanted)
        found[number] = _stretch(worker, ends[number][:wanted])
    return found


def _until_total(workers: Mapping[int, Running], target: int) -> tuple[dict[int, Floats], float]:
    """Step ends of each worker at least as far as the ``target``-th of all, and when that one is."""
    steps = {n: max(_FIRST_GUESS_STEPS, 2 * target // len(workers) // 3) for n in workers}
    while True:
        ends = {
            n: worker.clock.ends(worker.start, first=worker.done, steps=steps[n])
            for n, worker in workers.items()
        }
        # All steps that end by ``known`` are among these; a killed worker has no more to come.
        growing = {n: float(e[-1]) for n, e in ends.items() if e[-1] <= workers[n].until}
        known = min(growing.values(), default=math.inf)
        counted = np.sort(
            np.concatenate([e[e <= min(known, workers[n].until)] for n, e in ends.items()])
        )
        if len(counted) >= target:
            return ends, float(counted[target - 1])
        if not growing:
            raise UsageError(
                f"total-count target = {target} steps; every worker was killed after {len(counted)}; "
                "let some of them live, or shorten sync_every"
            )
        for n, last in growing.items():
            if last <= known:
                steps[n] *= 2


def _stretch(worker: Running, ends: Floats) -> Stretch:
    stop = float(ends[-1]) if len(ends) else worker.start
    if stop <= worker.until:
        return Stretch(steps=len(ends), stop=stop)
    lived = int(np.searchsorted(ends, worker.until, side="right"))
    return Stretch(steps=lived, stop=worker.until, killed=True)
