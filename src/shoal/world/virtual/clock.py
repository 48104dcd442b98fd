"""Virtual time: when each step of each virtual worker ends. Nothing here reads the wall clock.

The seconds of step t of worker i are a function of (seed, worker, t) alone:

    seconds(i, t) = step_seconds * slowdown_i * max(0.2, N(1, jitter))

so two rules, or two triggers, that are compared with the same seed meet the same hardware: the worker's
100th step takes as long in both. A stall freezes a worker for a while; a step that runs through it ends
that much later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.errors import UsageError

Floats = npt.NDArray[np.float64]
T = TypeVar("T")

LEAST_FACTOR = 0.2
"""No step takes less than this share of its mean, however wide the jitter."""

_AHEAD = 1024


class EventQueue(Generic[T]):
    """Events in the order of their virtual time; those of one time in the order in which they were put.

    Example:
        >>> queue = EventQueue()
        >>> queue.put(2.0, "late"), queue.put(1.0, "first"), queue.put(1.0, "second")
        (None, None, None)
        >>> [queue.take() for _ in range(len(queue))]
        [(1.0, 'first'), (1.0, 'second'), (2.0, 'late')]
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._put = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, time: float, event: T) -> None:
        """Let ``event`` happen at ``time``."""
        heapq.heappush(self._heap, (time, self._put, event))
        self._put += 1

    def take(self) -> tuple[float, T]:
        """The next event and its time; it is no longer in the queue.

        Raises:
            IndexError: the queue is empty.
        """
        time, _, event = heapq.heappop(self._heap)
        return time, event


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A worker that stands still for a while.

    Args:
        at_seconds: virtual time at which it begins, >= 0.
        seconds: how long, > 0.

    Raises:
        UsageError: a number outside its range.
    """

    at_seconds: float
    seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.at_seconds < math.inf and 0 < self.seconds < math.inf):
            raise UsageError(
                f"stall at_seconds = {self.at_seconds:g}, seconds = {self.seconds:g}; it begins at 0 or later "
                "and lasts for more than nothing; give both in virtual seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a step of an ordinary worker takes.

    Args:
        step_seconds: mean of an ordinary worker's step, > 0.
        jitter: standard deviation of a step, as a share of its mean, >= 0.
        seed: of the jitter, 0 <= seed < 2**63.

    Raises:
        UsageError: a number outside its range.

    Source: Teng et al. 2019 as simulated in section 6.3 of the notes: base * speed * max(.2, N(1, .1)).
    """

    step_seconds: float = 0.05
    jitter: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.step_seconds < math.inf:
            raise UsageError(
                f"step_seconds = {self.step_seconds:g}; a step takes time; give virtual seconds above 0"
            )
        if not 0 <= self.jitter < math.inf:
            raise UsageError(
                f"jitter = {self.jitter:g}; it is a standard deviation relative to the mean; use 0 or more"
            )
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed = {self.seed}; use 0 to 2**63 - 1")


class WorkerClock:
    """One worker's steps in time.

    Args:
        pace: of the fleet.
        worker: number of the worker in the run, >= 0; never given to another one.
        slowdown: its steps take this many times as long, > 0.
        stalls: in any order.

    Raises:
        UsageError: ``slowdown`` not above 0.

    Example:
        >>> clock = WorkerClock(Pace(step_seconds=0.5, jitter=0.0), worker=3, slowdown=2.0)
        >>> clock.ends(10.0, first=7, steps=3).tolist()
        [11.0, 12.0, 13.0]
    """

    def __init__(
        self, pace: Pace, *, worker: int, slowdown: float = 1.0, stalls: Sequence[Stall] = ()
    ) -> None:
        if not 0 < slowdown < math.inf:
            raise UsageError(
                f"slowdown = {slowdown:g}; a step takes slowdown times as long; use a number above 0"
            )
        self._scale = pace.step_seconds * slowdown
        self._jitter = pace.jitter
        self._stalls = sorted(stalls, key=lambda stall: stall.at_seconds)
        self._normals = np.random.Generator(np.random.Philox(key=[pace.seed, worker]))
        self._known: Floats = np.empty(0)

    def durations(self, first: int, steps: int) -> Floats:
        """Seconds of the worker's own steps ``first ... first + steps - 1``, without stalls."""
        while len(self._known) < first + steps:
            more = max(_AHEAD, first + steps - len(self._known))
            factors = np.ones(more)
            if self._jitter:
                drawn = 1 + self._jitter * self._normals.standard_normal(more)
                factors = np.maximum(LEAST_FACTOR, drawn)
            self._known = np.concatenate([self._known, self._scale * factors])
        return self._known[first : first + steps]

    def ends(self, start: float, *, first: int, steps: int) -> Floats:
        """When the steps ``first ... first + steps - 1`` end that are begun at ``start`` without a pause.

        Args:
            start: virtual time.
            first: number of the step, counted over the worker's life from 0.
            steps: how many, >= 0.

        Returns:
            Rising times, shape (steps,).
        """
        ends = start + np.cumsum(self.durations(first, steps))
        for stall in self._stalls:
            over = stall.at_seconds + stall.seconds
            if over <= start:
                continue
            if stall.at_seconds <= start:
                ends += over - start
            else:
                ends[ends > stall.at_seconds] += stall.seconds
        return ends
