"""Plays a script of events on a running fleet; each event once, when its mark is reached."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from shoal.fleet.supervisor.member import Member, number
from shoal.fleet.supervisor.processes import Process
from shoal.fleet.supervisor.roster import Roster
from shoal.fleet.supervisor.script import Event


class ScriptPlayer:
    """Fires a script's events.

    Args:
        events: the script.
        roster: who is there.
        processes: the workers' processes on this machine, by name.
        kill_coordinator: kills the lighthouse.
        record: writes an event row.
    """

    def __init__(
        self,
        events: Sequence[Event],
        roster: Roster,
        processes: Mapping[str, Process],
        kill_coordinator: Callable[[], None],
        record: Callable[..., None],
    ) -> None:
        self._pending = list(events)
        self._roster, self._processes = roster, processes
        self._kill_coordinator, self._record = kill_coordinator, record
        self._set_marks()

    def play(self) -> None:
        """Fire what is due now."""
        if not self._pending:
            return
        rows = [m.row for m in self._roster.alive()]
        step = max((number(row, "step", -1) for row in rows), default=-1)
        samples = max((number(row, "samples", -1) for row in rows), default=-1)
        due = [event for event in self._pending if event.is_due(step, samples)]
        if not due:
            return
        self._pending = [event for event in self._pending if event not in due]
        self._set_marks()
        for event in due:
            names = self._fire(event)
            self._record(
                "script",
                action=event.action,
                count=event.count,
                names=names,
                step=step,
                samples=samples,
            )

    def _fire(self, event: Event) -> list[str]:
        if event.action == "kill_coordinator":
            self._kill_coordinator()
            return []
        if event.action == "join":
            self._roster.grow(event.count)
            return []
        targets = self._targets(event)
        for member in targets:
            if event.action == "leave":
                self._roster.ask_to_leave(member.name)
            elif event.action == "kill":
                member.killed = "script"
                self._roster.grow(-1)
                self._processes[member.name].kill()
            else:
                self._processes[member.name].send(signal.SIGSTOP)
        return [member.name for member in targets]

    def _targets(self, event: Event) -> list[Member]:
        """The named worker, or the newest on this machine; those that take part come first."""
        local = [m for m in self._roster.staying() if m.name in self._processes]
        if event.name is not None:
            return [m for m in local if m.name == event.name]
        newest = sorted(local, key=lambda m: (m.commits > 0, m.index), reverse=True)
        return newest[: event.count]

    def _set_marks(self) -> None:
        steps = [event.at_step for event in self._pending if event.at_step is not None]
        samples = [event.at_samples for event in self._pending if event.at_samples is not None]
        self._roster.set_marks(min(steps, default=None), min(samples, default=None))
