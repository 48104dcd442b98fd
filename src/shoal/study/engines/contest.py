"""Which engine trains a curve at a batch size: the quickest of those that were accepted, by measurement.

The contest may take 2 seconds, or 2 % of the search it is for where that is more. The plain loop always
takes part, and only a clear gain replaces it: timings on a busy machine are good to some ten per cent, and
a stack loses a little where trials end. The result is stored with the study and kept when it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shoal.study.engines.build import Candidate, build_engine
from shoal.study.engines.contract import Engine
from shoal.study.engines.equality import STEPS, Refused, accepted, sizes_of, trials_of
from shoal.study.engines.task import Task

LEAST_SECONDS = 2.0
SHARE = 0.02
CLEAR_GAIN = 1.15
"""Times faster than the plain loop that an engine must be."""

_ROUNDS = 3
_ROUND_SECONDS = 0.05
_CALL_STEPS = 8
_POOL = Candidate(engine="pool")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a contest came to.

    Args:
        candidate: the engine chosen.
        speedup: plain loop's time for a step of one trial over the chosen engine's, all slots filled.
        step_seconds: time for a step of one trial, of everything that was timed.
        refusals: why the others were not.
        seconds: that the contest took, the processor's where that trains.
    """

    candidate: Candidate
    speedup: float
    step_seconds: Mapping[str, float]
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` takes them."""
        return {
            "candidate": {**asdict(self.candidate), "sizes": list(self.candidate.sizes)},
            "speedup": self.speedup,
            "step_seconds": dict(self.step_seconds),
            "refusals": dict(self.refusals),
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Choice:
        """What :meth:`as_json` gave.

        Raises:
            UsageError: an engine that this version does not have.
        """
        return cls(
            candidate=Candidate(**values["candidate"]),
            speedup=values["speedup"],
            step_seconds=values["step_seconds"],
            refusals=values["refusals"],
            seconds=values["seconds"],
        )

    def __str__(self) -> str:
        return f"{self.candidate}, {self.speedup:.1f} times the plain loop's speed"


def contest(task: Task, *, search_seconds: float = 0.0, trials: int = 64) -> Choice:
    """Find the engine for a task.

    Args:
        task: the workload, curve and batch size.
        search_seconds: what one of its searches is expected to take with the plain loop.
        trials: that a search holds at a time; no stack is made larger.

    Returns:
        The choice; ``pool`` where nothing else is accepted or clearly faster.
    """
    plain = _Timed(task, _POOL)
    plain.round(
        first=True
    )  # with what torch loads on its first step, which is no part of the contest
    began = _clock(task.device)
    limit = began + max(LEAST_SECONDS, SHARE * search_seconds)
    timed = {str(_POOL): plain}
    refusals: dict[str, str] = {}
    settled: set[str] = set()
    for candidate in _candidates(task, trials):
        if candidate.engine in settled or _has_larger(candidate, timed):
            continue
        cost = _cost(candidate) * plain.seconds
        if _clock(task.device) + cost > limit - _ROUNDS * _ROUND_SECONDS * (len(timed) + 1):
            refusals[str(candidate)] = (
                f"not tried: a step takes {plain.seconds:.2g} s, and trying it the rest of the time"
            )
            continue
        verdict = accepted(task, candidate)
        if isinstance(verdict, Refused):
            # Another size of stack would be refused for the same reason.
            refusals[candidate.engine] = verdict.reason
            settled.add(candidate.engine)
            continue
        entry = _Timed(task, verdict)
        entry.round(first=True)
        timed[str(candidate)] = entry
        if candidate.engine == "layers":
            settled.add("vmap")  # the same products with more around them
        if _is_slower_than_smaller(entry, timed):
            settled.add(candidate.engine)
    for _ in range(_ROUNDS):
        for entry in timed.values():
            if _clock(task.device) < limit or entry.rounds < 2:
                entry.round()
    return _choose(timed, refusals, _clock(task.device) - began)


def _choose(timed: Mapping[str, _Timed], refusals: dict[str, str], seconds: float) -> Choice:
    plain = timed[str(_POOL)]
    best = min(timed.values(), key=lambda entry: entry.seconds)
    if plain.seconds < CLEAR_GAIN * best.seconds:
        best = plain
    return Choice(
        candidate=best.candidate,
        speedup=plain.seconds / best.seconds,
        step_seconds={name: entry.seconds for name, entry in timed.items()},
        refusals=refusals,
        seconds=seconds,
    )


def _candidates(task: Task, trials: int) -> list[Candidate]:
    """In the order in which they are tried; smaller stacks than the first only where that took too long."""
    ladder = (8, 16, 32, 4, 2) if task.device.type == "cpu" else (64, 256, 8)
    return [
        Candidate(engine=engine, slots=slots)
        for engine in ("layers", "vmap")
        for slots in ladder
        if slots <= max(trials, ladder[0])
    ]


def _has_larger(candidate: Candidate, timed: Mapping[str, _Timed]) -> bool:
    return any(
        other.candidate.engine == candidate.engine and other.candidate.slots > candidate.slots
        for other in timed.values()
    )


def _cost(candidate: Candidate) -> int:
    """Steps of one trial that trying a candidate takes, if it were as slow as the plain loop."""
    return STEPS * (sum(sizes_of(candidate.slots)) + candidate.slots) + 3 * candidate.slots


def _is_slower_than_smaller(entry: _Timed, timed: Mapping[str, _Timed]) -> bool:
    """Whether a smaller stack of the same engine was quicker: then larger ones are not tried."""
    return any(
        other.candidate.engine == entry.candidate.engine
        and other.candidate.slots < entry.candidate.slots
        and other.seconds < 0.95 * entry.seconds
        for other in timed.values()
    )


class _Timed:
    """An engine with all its slots filled, timed in short rounds.

    Args:
        task: what it trains.
        candidate: the engine.
    """

    def __init__(self, task: Task, candidate: Candidate) -> None:
        self.candidate = candidate
        self._device = task.device
        self._engine: Engine = build_engine(task, candidate)
        self._trials = trials_of(task, candidate.slots, reach=0.5)
        for trial in self._trials:
            self._engine.admit(trial)
        self._step = 0
        self._calls = 1
        self.seconds = float("inf")
        self.rounds = 0

    def round(self, *, first: bool = False) -> None:
        """Train for some hundredths of a second; the quickest round counts."""
        if first:
            self._advance(1)  # what is made on first use
            taken = self._time(1, steps=1)
            if taken < _ROUND_SECONDS / 4:
                taken = self._time(1, steps=_CALL_STEPS) * _CALL_STEPS
            self._calls = max(1, int(_ROUND_SECONDS / max(taken, 1e-6)))
            return
        self._time(self._calls, steps=_CALL_STEPS if self._calls > 1 else 1)

    def _time(self, calls: int, *, steps: int) -> float:
        """Seconds that a step of all trials took."""
        began = _clock(self._device)
        for _ in range(calls):
            self._advance(steps)
        taken = (_clock(self._device) - began) / (calls * steps)
        self.seconds = min(self.seconds, taken / len(self._trials))
        self.rounds += 1
        return taken

    def _advance(self, steps: int) -> None:
        self._step += steps
        self._engine.advance({trial.id: self._step for trial in self._trials})


def _clock(device: torch.device) -> float:
    """Seconds of this process on a processor, which its neighbours do not lengthen; of the wall elsewhere."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
