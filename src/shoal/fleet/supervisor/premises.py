"""What a run holds while it lasts: its directory, its endpoint, its coordinator and its children."""

from __future__ import annotations

import contextlib
import secrets
import shutil

from shoal.fleet.supervisor import rundir
from shoal.fleet.supervisor.control import ControlServer, Verbs
from shoal.fleet.supervisor.coordinator import Coordinator, check_port
from shoal.fleet.supervisor.processes import Nursery
from shoal.fleet.supervisor.settings import Settings, bracketed


class Premises:
    """Taken as a whole or not at all: when one thing cannot be had, the rest is given back.

    Args:
        settings: of the run.
        verbs: what the control endpoint answers with.

    Raises:
        UsageError: a port in use, another supervisor in the directory, a directory that does not
            fit; nothing was written then.
    """

    def __init__(self, settings: Settings, verbs: Verbs) -> None:
        run_dir = settings.run_dir
        with contextlib.ExitStack() as undo:
            # Whatever can be refused comes before the directory is made.
            rundir.check_writable(run_dir)
            lock = rundir.RunLock(run_dir) if run_dir.exists() else None
            if lock is not None:
                undo.callback(lock.release)
            self.names_used = rundir.check_fresh(run_dir, settings.resume)
            check_port(settings.bind, settings.coordinator_port)
            self._token = secrets.token_urlsafe(24)
            self._control = ControlServer(settings.bind, settings.port, self._token, verbs)
            undo.callback(self._control.close)
            self.is_new_dir = lock is None
            if lock is None:
                lock = rundir.RunLock(run_dir)
                undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
                undo.callback(lock.release)
            self._lock = lock
            self.nursery = Nursery(settings.python)
            undo.callback(self.nursery.close)
            log = rundir.log_file(run_dir, "coordinator")
            self.coordinator = Coordinator(settings, self.nursery, log)
            rundir.write_control(run_dir, settings.reachable, self._control.port, self._token)
            undo.pop_all()
        self._run_dir = run_dir
        self.address = f"{bracketed(settings.reachable)}:{self._control.port}"

    @property
    def token(self) -> str:
        """The run's secret."""
        return self._token

    def abandon(self) -> None:
        """Give everything back, and the directory as it was, for the run does not begin."""
        self.end_processes()
        self.release()
        if self.is_new_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def end_processes(self) -> None:
        """End every process and the endpoint; the directory is still held."""
        rundir.remove_control(self._run_dir)
        self.nursery.close()
        self._control.close()

    def release(self) -> None:
        """Let the directory go, last of all."""
        self._lock.release()
