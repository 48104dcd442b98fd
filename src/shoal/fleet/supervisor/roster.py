"""Who is in the fleet and what they said last: what the control endpoint and the loop share.

Every method may be called from any thread. Decisions that start or end processes are left to the
supervisor's loop, which reads :attr:`Roster.wanted_local` and the members' marks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.errors import UsageError
from shoal.fleet.supervisor.member import Member, number

# A worker on another machine whose reports stop this long is believed dead; a local one is
# watched as a process.
REMOTE_SILENCE_SECONDS = 5.0
NO_LIMIT = 1_000_000


class Roster:
    """The members, the wanted number of workers, the start barrier and the queue of events.

    Args:
        start: number of workers the run begins with; the barrier gathers so many.
        minimum: fewest workers, >= 1.
        maximum: most workers.
        gather_seconds: how long the barrier waits for the last of them.
        patience_seconds: how long workers wait below ``minimum``; passed on to them.
        coordinator: address of the lighthouse.
        wake: called whenever the supervisor's loop has something to look at.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        start: int,
        minimum: int = 1,
        maximum: int = NO_LIMIT,
        gather_seconds: float = 120.0,
        patience_seconds: float = 300.0,
        coordinator: str = "",
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.minimum, self.maximum = minimum, maximum
        self.patience_seconds = patience_seconds
        self.coordinator = coordinator
        self.wanted_local = start
        self.stopping = False
        self.finishing = False
        self.ever_committed = False
        self._gather_seconds = gather_seconds
        self._wake = wake
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._members: dict[str, Member] = {}
        self._next_index = 0
        self._version = 0
        self._events: list[tuple[str, dict[str, object]]] = []
        self._rows: list[tuple[str, dict[str, object]]] = []
        self._marks: tuple[float | None, float | None] = (None, None)
        self._lost = False
        self._ended_elsewhere: list[Member] = []
        self._gather = start
        self._gather_from: float | None = clock()

    # ---- members -------------------------------------------------------------------------------

    def reserve_names(self, taken: int) -> None:
        """Number the coming workers from ``taken`` on, so that a resumed run uses no name again."""
        with self._changed:
            self._next_index = max(self._next_index, taken)

    def add(self, host: str = "") -> Member:
        """A new worker under a name that was never used in this run.

        Workers here are called ``w0``, ``w1``, ..., those on other machines ``x2``, ``x3``, ...: ranks
        follow the names (:mod:`shoal.world.elastic.ranking`), so one of ours speaks for the fleet, and
        writes its checkpoints here, as long as there is one.
        """
        with self._changed:
            member = Member(
                name=f"{'x' if host else 'w'}{self._next_index}",
                index=self._next_index,
                host=host,
                started=self._clock(),
            )
            self._next_index += 1
            self._members[member.name] = member
            self._touch()
            return member

    def admit(self, count: int, host: str) -> list[Member]:
        """New workers on another machine.

        Raises:
            UsageError: they would be more than the maximum, or the run is ending.
        """
        with self._changed:
            self._refuse_if_ending()
            before = len(self.staying())
            if before + count > self.maximum:
                raise UsageError(
                    f"--workers {count}; the fleet has {before} workers and takes at most "
                    f"{self.maximum}; join with fewer or start the fleet with a larger --workers"
                )
            members = [self.add(host) for _ in range(count)]
            for member in members:
                self._events.append((member.name, {"kind": "worker_joined", "host": host}))
            return members

    def ended(self, name: str, code: int) -> Member | None:
        """Record a worker's end; None if it is unknown or was recorded before."""
        with self._changed:
            member = self._members.get(name)
            if member is None or not member.alive:
                return None
            member.ended, member.code = self._clock(), code
            if member.host:
                self._ended_elsewhere.append(member)
            alive = [m for m in self._members.values() if m.alive]
            trained = any(m.commits > 0 and m.killed is None for m in alive)
            if code != 0 and not trained and (member.commits > 0 or not alive):
                # The state is gone: the blank workers begin together, from a checkpoint.
                self._gather, self._gather_from = max(1, self.wanted_local), self._clock()
                self._lost = member.commits > 0
            self._touch()
            return member

    def take_ended_elsewhere(self) -> list[Member]:
        """Workers on other machines whose end became known since the last call."""
        with self._changed:
            ended, self._ended_elsewhere = self._ended_elsewhere, []
            return ended

    def lost_everybody(self) -> bool:
        """Whether the last worker that had trained ended, other than well, since the last call."""
        with self._changed:
            lost, self._lost = self._lost, False
            return lost

    def members(self) -> list[Member]:
        """All workers ever, oldest first."""
        with self._changed:
            return list(self._members.values())

    def alive(self) -> list[Member]:
        """Workers whose process is not known to have ended, oldest first."""
        return [m for m in self.members() if m.alive]

    def staying(self) -> list[Member]:
        """Workers that are alive and not on their way out, oldest first."""
        return [m for m in self.members() if m.staying]

    def get(self, name: str) -> Member | None:
        """The worker of that name."""
        with self._changed:
            return self._members.get(name)

    # ---- what workers say ----------------------------------------------------------------------

    def hello(self, name: str, pid: int, host: str) -> bool:
        """A worker's process introduces itself; False if the supervisor started no such worker."""
        with self._changed:
            member = self._members.get(name)
            if member is None or not member.alive:
                return False
            member.hello = self._clock()
            member.pid = pid if member.pid is None else member.pid
            member.host = member.host and (host or member.host)
            self._touch()
            return True

    def wait_ready(self, name: str, seconds: float) -> bool:
        """Stand at the start barrier for at most ``seconds``; whether this worker may pass it."""
        with self._changed:
            member = self._members.get(name)
            if member is not None and not member.at_barrier:
                member.at_barrier = True
                self._touch()
            end = self._clock() + seconds
            while not (self._is_open() or self.stopping or self._is_turned_back(member)):
                left = end - self._clock()
                if left <= 0:
                    break
                self._changed.wait(min(0.5, left))
            return self._is_open() and not self._is_turned_back(member)

    def turned_back(self, name: str) -> bool:
        """Whether a worker was asked to leave before it took part in a run that goes on."""
        with self._changed:
            return self._is_turned_back(self._members.get(name))

    def knock(self, name: str, knocks: int) -> None:
        """A worker knocked; ``knocks`` is how often by now."""
        with self._changed:
            member = self._members.get(name)
            if member is not None and knocks > member.knocks:
                member.knocks = knocks
                self._touch()

    def progress(self, name: str, row: dict[str, object], age_seconds: float) -> None:
        """A worker's newest report, ``age_seconds`` old."""
        with self._changed:
            member = self._members.get(name)
            if member is None:
                return
            now = self._clock()
            committed_before = member.commits > 0
            member.heard, member.row = now, row
            member.progressed = now - age_seconds - number(row, "phase_seconds", 0.0)
            if member.commits > 0:
                self.ever_committed = True
                if not committed_before:
                    self._touch()
            self._wake()

    def bye(self, name: str) -> None:
        """A worker closed its link: its silence means nothing from now on."""
        with self._changed:
            member = self._members.get(name)
            if member is not None:
                member.closed = True

    def take(self, name: str, first: int, rows: list[dict[str, object]]) -> None:
        """A worker's events from its ``first``-th on; those that came before are dropped."""
        with self._changed:
            member = self._members.get(name)
            if member is None:
                return
            for index, row in enumerate(rows, start=first):
                if index == member.events_seen:
                    self._events.append((name, row))
                    member.events_seen += 1
            self._wake()

    def take_events(self) -> list[tuple[str, dict[str, object]]]:
        """The events that came since the last call, with the workers' names."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def take_metrics(self, name: str, first: int, rows: list[dict[str, object]]) -> None:
        """Metrics of a worker on another machine from its ``first``-th row on.

        Raises:
            UsageError: it is a worker of this machine, which writes its metrics itself.
        """
        with self._changed:
            member = self._members.get(name)
            if member is None or not member.host:
                raise UsageError("only metrics of another machine's workers are taken")
            for index, row in enumerate(rows, start=first):
                if index == member.rows_seen:
                    self._rows.append((name, row))
                    member.rows_seen += 1
            self._wake()

    def metrics(self) -> list[tuple[str, dict[str, object]]]:
        """The rows of metrics that came since the last call, with the workers' names."""
        with self._changed:
            rows, self._rows = self._rows, []
            return rows

    # ---- what the supervisor and the command line ask ------------------------------------------

    def ask_to_leave(self, name: str) -> bool:
        """Ask one worker to leave in order; the fleet is then one smaller."""
        with self._changed:
            member = self._members.get(name)
            if member is None or not member.staying:
                return False
            member.leave = self._clock()
            if not member.host:
                self.wanted_local = max(0, self.wanted_local - 1)
            self._touch()
            return True

    def stop(self) -> None:
        """Ask everybody to leave, for the run is to stop; nobody is let in any more."""
        with self._changed:
            self.stopping = True
            for member in self._members.values():
                if member.alive and member.leave is None:
                    member.leave = self._clock()
            self._touch()

    def resize(self, workers: int) -> tuple[int, int]:
        """Make the fleet ``workers`` large; returns the numbers before and after.

        Raises:
            UsageError: outside what ``--workers`` allows, or the run is ending.
        """
        with self._changed:
            self._refuse_if_ending()
            if not self.minimum <= workers <= self.maximum:
                most = "any number" if self.maximum == NO_LIMIT else str(self.maximum)
                raise UsageError(
                    f"workers = {workers}; this run takes {self.minimum} to {most}; ask for a "
                    "number in that range or start the run with another --workers MIN:MAX"
                )
            staying = self.staying()
            remote = [m for m in staying if m.host]
            before = self.wanted_local + len(remote)
            if workers >= before:
                self.wanted_local += workers - before
            else:
                local = [m for m in staying if not m.host]
                # Workers still to be started count towards the wanted number: give those up first.
                surplus = before - workers
                self.wanted_local -= min(surplus, max(0, self.wanted_local - len(local)))
                surplus = len(remote) + self.wanted_local - workers
                for member in reversed(staying[len(staying) - surplus :] if surplus else []):
                    self.ask_to_leave(member.name)
            self._touch()
            return before, workers

    def grow(self, workers: int) -> None:
        """Want so many more (or, negative, fewer) workers on this machine."""
        with self._changed:
            self.wanted_local = max(0, self.wanted_local + workers)
            self._touch()

    def orders(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Which of these workers on another machine are to be killed there, and which to be ended."""
        with self._changed:
            known = [self._members.get(name) for name in names]
            members = [m for m in known if m is not None and m.alive]
            kill = [m.name for m in members if m.killed is not None]
            return kill, [m.name for m in members if m.is_unneeded and m.killed is None]

    def set_marks(self, step: float | None, samples: float | None) -> None:
        """The step and the number of samples at which workers should report without delay."""
        with self._changed:
            if (step, samples) != self._marks:
                self._marks = (step, samples)
                self._touch()

    def news(self, name: str) -> dict[str, object]:
        """What a worker's link wants to know."""
        with self._changed:
            member = self._members.get(name)
            others = [m for m in self._members.values() if m.name != name]
            return {
                "version": self._version,
                "joins": sum(m.knocks for m in others),
                "trained": any(self._is_trained(m) for m in others),
                "leave": member is None or member.leave is not None,
                "turned_back": self._is_turned_back(member),
                "mark_step": self._marks[0],
                "mark_samples": self._marks[1],
                "coordinator": self.coordinator,
                "min_workers": self.minimum,
                "patience_seconds": self.patience_seconds,
            }

    def wait_news(self, name: str, seen: int, seconds: float) -> dict[str, object]:
        """The same, once it may differ from version ``seen``, at the latest after ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != seen, seconds)
            return self.news(name)

    def touch(self) -> None:
        """Let everybody look again."""
        with self._changed:
            self._touch()

    # ---- inside --------------------------------------------------------------------------------

    def _touch(self) -> None:
        self._version += 1
        self._changed.notify_all()
        self._wake()

    def _refuse_if_ending(self) -> None:
        if self.stopping or self.finishing:
            raise UsageError("the run is ending; its number of workers cannot be changed any more")

    def _is_trained(self, member: Member) -> bool:
        if not member.alive or member.commits <= 0 or member.killed is not None:
            return False
        silent = self._clock() - (member.heard or 0.0)
        return not member.host or silent < REMOTE_SILENCE_SECONDS

    def _is_turned_back(self, member: Member | None) -> bool:
        if member is None or member.leave is None or self.stopping:
            return False
        return member.commits <= 0

    def _is_open(self) -> bool:
        """Once open, the barrier stays open until the whole fleet is lost."""
        if self._gather_from is None:
            return True
        staying = [m for m in self._members.values() if m.staying]
        waiting = sum(m.at_barrier for m in staying)
        # Fewer are wanted by now when some were asked to leave, or given up.
        wanted = self.wanted_local + sum(m.host != "" for m in staying)
        late = self._clock() - self._gather_from > self._gather_seconds
        if waiting >= max(1, min(self._gather, wanted)) or (late and waiting):
            self._gather_from = None
            self._changed.notify_all()
        return self._gather_from is None
