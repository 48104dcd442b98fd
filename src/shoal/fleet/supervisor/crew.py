"""The workers' processes on this machine, each in a place of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from shoal.fleet.supervisor.environment import lowest_free, worker_environment
from shoal.fleet.supervisor.processes import Nursery, Process
from shoal.fleet.supervisor.rundir import log_file
from shoal.fleet.supervisor.settings import Settings


class Crew:
    """Starts workers and learns of their ends.

    Args:
        settings: of the run.
        nursery: starts the processes.
        control: ``HOST:PORT`` of the control endpoint, for the workers.
        token: the run's secret.

    Attributes:
        processes: those that are there, by the workers' names.
    """

    def __init__(self, settings: Settings, nursery: Nursery, control: str, token: str) -> None:
        self._settings, self._nursery = settings, nursery
        self._control, self._token = control, token
        self.processes: dict[str, Process] = {}
        self._slots: dict[str, int] = {}  # places on this machine

    def __contains__(self, name: str) -> bool:
        return name in self.processes

    def start(self, name: str) -> int:
        """Start a worker's process; its id.

        Raises:
            OSError: no process can be started.
        """
        settings, slot = self._settings, lowest_free(self._slots.values())
        process = self._nursery.start(
            "worker_main.py",
            [str(settings.train_script), *settings.arguments],
            worker_environment(settings, name, slot, self._control, self._token),
            log_file(settings.run_dir, name),
        )
        self.processes[name], self._slots[name] = process, slot
        return process.pid

    def take_ended(self) -> Iterator[tuple[str, int]]:
        """Names and exit statuses of those that have ended since the last call."""
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is not None:
                self._nursery.forget(process)
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
