"""The workers' processes on this machine, each in a place of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.fleet.supervisor.environment import lowest_free, worker_environment
from shoal.fleet.supervisor.member import Member
from shoal.fleet.supervisor.premises import Premises
from shoal.fleet.supervisor.processes import Process
from shoal.fleet.supervisor.settings import Settings


class Crew:
    """Starts workers and learns of their ends.

    Args:
        settings: of the run.
        premises: start the processes, and have the address and the token that they are given.
        log: the log file of a worker by its name.

    Attributes:
        processes: those that are there, by the workers' names.
    """

    def __init__(self, settings: Settings, premises: Premises, log: Callable[[str], Path]) -> None:
        self._settings, self._premises, self._log = settings, premises, log
        self.processes: dict[str, Process] = {}
        self._slots: dict[str, int] = {}  # places on this machine

    def __contains__(self, name: str) -> bool:
        return name in self.processes

    def start(self, member: Member) -> None:
        """Start the process of a new member."""
        settings, premises = self._settings, self._premises
        slot = lowest_free(self._slots.values())
        process = premises.nursery.start(
            "worker_main.py",
            [str(settings.train_script), *settings.arguments],
            worker_environment(settings, member.name, slot, premises.address, premises.token),
            self._log(member.name),
        )
        member.pid = process.pid
        self.processes[member.name], self._slots[member.name] = process, slot

    def take_ended(self) -> Iterator[tuple[str, int]]:
        """Names and exit statuses of those that have ended since the last call."""
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is not None:
                self._premises.nursery.forget(process)
                del self.processes[name], self._slots[name]
                yield name, code

    def terminate(self, name: str) -> None:
        """SIGTERM for a worker, if it is one of this machine."""
        if name in self.processes:
            self.processes[name].send(signal.SIGTERM)

    def kill(self, name: str) -> bool:
        """SIGKILL for a worker and its children; False if it is none of this machine."""
        if name in self.processes:
            self.processes[name].kill()
            return True
        return False
