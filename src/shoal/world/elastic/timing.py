"""Every time constant of the elastic world, and the time limit that follows the measured steps."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, fields
from time import monotonic

from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_RECENT = 64
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time constants, in seconds.

    The lighthouse has its own two, which whoever starts it sets: its heartbeat timeout must be
    ``heartbeat_timeout_seconds``, and its join timeout must be longer than the longest time between
    two steps of a worker, or slow workers are put out of the fleet.

    Args:
        heartbeat_seconds: how often a worker shows the coordinator that it lives.
        heartbeat_timeout_seconds: after this silence the coordinator takes a worker for dead. It is
            the larger part of what a kill costs the others.
        probe_seconds: how often a worker looks whether the coordinator still answers.
        connect_seconds: limit for connecting to the coordinator.
        ask_seconds: limit for one quorum request; then it is made again.
        knock_seconds: a quorum request unanswered for this long is announced (again).
        regather_seconds: after the coordinator came back, workers gather heartbeats for this long
            before the first of them asks for a quorum, so that it holds all of them.
        form_seconds: limit for the members of a quorum to meet and connect.
        first_exchange_seconds: time limit of a reduction before any step time is known.
        heal_seconds: time limit of a reduction in the first exchange after a quorum in which somebody
            has to be given the state; the others wait for it there. A dead one is seen at once.
        exchange_floor_seconds: least time limit of a reduction. It is long, because a peer may be busy
            with something else than a step for once (a checkpoint, a first compilation), and because
            dead peers are noticed otherwise.
        exchange_factor: the limit is this times the longest recent time between two commits.
        silent_peer_seconds: in an exchange that lasts, a peer whose process does not answer for this
            long is given up (a lost host, a suspended process).
        shrink_doubt_seconds: for this long a quorum is asked for again if a member of the last one is
            not in it although its process answers.
        transfer_idle_seconds: a transfer of the state that stands still this long has failed.
        linger_seconds: a worker that ends in order waits for so long, at most, until its peers are done
            with the last exchange too.
        patience_seconds: how long to wait for the coordinator, or for enough workers, before the
            run stops in an orderly way.
        quorum_every: commits between two quorums that nobody asked for.
    """

    heartbeat_seconds: float = 0.05
    heartbeat_timeout_seconds: float = 0.3
    probe_seconds: float = 0.25
    connect_seconds: float = 2.0
    ask_seconds: float = 10.0
    knock_seconds: float = 1.0
    regather_seconds: float = 0.5
    form_seconds: float = 5.0
    first_exchange_seconds: float = 120.0
    heal_seconds: float = 300.0
    exchange_floor_seconds: float = 60.0
    exchange_factor: float = 20.0
    silent_peer_seconds: float = 10.0
    shrink_doubt_seconds: float = 2.0
    transfer_idle_seconds: float = 15.0
    linger_seconds: float = 2.0
    patience_seconds: float = 60.0
    quorum_every: int = 50

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                raise UsageError(
                    f"{item.name} = {value}; a time constant is above 0; leave it out for the "
                    f"default of {item.default:g}"
                )
        if self.heartbeat_timeout_seconds < 2 * self.heartbeat_seconds:
            raise UsageError(
                f"heartbeat_timeout_seconds = {self.heartbeat_timeout_seconds}; must be at least "
                f"twice heartbeat_seconds = {self.heartbeat_seconds}, or one late heartbeat is a "
                "death; raise it here and at the lighthouse"
            )


class Pace:
    """The time limit of a reduction, from the time between this worker's commits.

    Args:
        timing: the constants; the limit starts at ``first_exchange_seconds``.
    """

    def __init__(self, timing: Timing):
        self._timing = timing
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._last: float | None = None
        self.limit_seconds = timing.first_exchange_seconds

    def committed(self) -> None:
        """An exchange was committed now."""
        now = monotonic()
        if self._last is not None:
            self._recent.append(now - self._last)
            if len(self._recent) >= _FEW:
                longest = max(self._recent)
                wanted = max(
                    self._timing.exchange_floor_seconds, self._timing.exchange_factor * longest
                )
                # Small movements are not worth a line, and a limit may lag a little behind.
                if wanted > 1.25 * self.limit_seconds or wanted < 0.5 * self.limit_seconds:
                    self._set(wanted, f"the longest recent step took {longest:.3f} s")
        self._last = now

    def interrupted(self) -> None:
        """The time until the next commit says nothing of a step's length."""
        self._last = None

    def timed_out(self) -> None:
        """A peer was slower than the limit: without a longer one it would be so for ever."""
        self._recent.clear()
        self._set(2 * self.limit_seconds, "an exchange ran out of time")

    def _set(self, limit: float, why: str) -> None:
        _log.info(
            "time limit of an exchange: %.1f s, was %.1f s: %s", limit, self.limit_seconds, why
        )
        self.limit_seconds = limit
