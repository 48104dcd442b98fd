"""Which workers hang: a pure decision over what the roster knows.

A hung worker keeps its heartbeat towards the coordinator (a native thread sends it), so the others
wait for it without an error. It is told from its victims by the phase it reports: victims wait in
``exchange`` or ``quorum``, and are never killed. A worker that is stopped, or holds the
interpreter's lock, does not report at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.fleet.supervisor.member import Member, number

WAITING_PHASES = frozenset({"exchange", "quorum"})
# Code of the user's outside of the loop over the batches (a plot, an evaluation of its own) may take
# long, and so may whatever a worker does for the first time (compilation, a cold cache, the first
# evaluation): that gets so many times the limit.
LENIENCY = 10.0
# A step, or a chunk of an evaluation, may take up to so many times the longest one seen.
SLOWDOWN = 5.0


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A worker that hangs: its name, the phase it reported last, and for how long."""

    name: str
    phase: str
    seconds: float


class Watchdog:
    """Finds hung workers; remembers how long a worker's own phases took before.

    Args:
        hang_seconds: a worker without progress in its own phase, or without any report, for so long
            hangs.
        start_seconds: a worker that has not introduced itself so long after its start hangs.
    """

    def __init__(self, hang_seconds: float, start_seconds: float) -> None:
        self.hang_seconds, self.start_seconds = hang_seconds, start_seconds
        self._longest: dict[tuple[str, str], float] = {}
        self._current: dict[str, tuple[tuple[str, float], float]] = {}
        self._stepped: set[str] = set()
        self._last_look: float | None = None
        self._asleep_until = 0.0

    def look(self, members: Iterable[Member], now: float) -> list[Hang]:
        """The workers that hang at ``now`` (monotonic seconds).

        A supervisor that was itself stopped, or a machine that slept, has heard of nobody: nobody
        is judged until everybody had time to speak again.
        """
        if self._last_look is not None and now - self._last_look > self.hang_seconds / 2:
            self._asleep_until = now + self.hang_seconds
        self._last_look = now
        hangs = [self._judge(member, now) for member in members if member.alive]
        return [hang for hang in hangs if hang is not None] if now >= self._asleep_until else []

    def _judge(self, member: Member, now: float) -> Hang | None:
        if member.killed is not None or member.closed:
            return None
        if member.heard is None:
            # Before its first report a worker imports, loads data or stands at the start barrier.
            waited = now - member.started
            if member.hello is None and not member.host and waited > self.start_seconds:
                return Hang(name=member.name, phase="start", seconds=waited)
            return None
        silent = now - member.heard
        if silent > self.hang_seconds:
            return Hang(name=member.name, phase="silent", seconds=silent)
        phase = str(member.row.get("phase", ""))
        seconds = member.heard - member.progressed
        self._remember(member, phase, seconds)
        if not phase or phase in WAITING_PHASES or seconds <= self._limit(member.name, phase):
            return None
        return Hang(name=member.name, phase=phase, seconds=seconds)

    def _remember(self, member: Member, phase: str, seconds: float) -> None:
        """Note how long a phase took once it is over; one that goes on proves nothing."""
        step = number(member.row, "step", 0)
        if step > 0:
            self._stepped.add(member.name)
        moment = (phase, step)
        before, took = self._current.get(member.name, (moment, 0.0))
        if before != moment:
            known = (member.name, before[0])
            self._longest[known] = max(took, self._longest.get(known, 0.0))
        self._current[member.name] = (moment, seconds)

    def _limit(self, name: str, phase: str) -> float:
        longest = self._longest.get((name, phase))
        if longest is None and phase == "compute" and name in self._stepped:
            longest = 0.0
        if phase == "user" or longest is None:
            return LENIENCY * self.hang_seconds
        return max(self.hang_seconds, SLOWDOWN * longest)
