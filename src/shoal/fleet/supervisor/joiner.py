"""``shoal run --join``: workers on this machine for a fleet whose supervisor runs on another."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from shoal.errors import UsageError
from shoal.fleet.supervisor import rundir
from shoal.fleet.supervisor.crew import Crew
from shoal.fleet.supervisor.endings import FAILURE, INTERRUPTED, RESUMABLE, SUCCESS, USER_ERROR
from shoal.fleet.supervisor.forwarding import MetricsForwarder
from shoal.fleet.supervisor.notice import NoticeFile
from shoal.fleet.supervisor.processes import Nursery, last_line, last_traceback
from shoal.fleet.supervisor.screen import event_line
from shoal.fleet.supervisor.script_watch import ScriptWatch
from shoal.fleet.supervisor.settings import Settings
from shoal.fleet.supervisor.signals import Signals
from shoal.fleet.supervisor.worker_main import DIVERGED
from shoal.world.elastic.endpoint import ControlClient, Refused, versions

TICK_SECONDS = 0.2
ORDERS_SECONDS = 1.0
# A supervisor that does not answer for so long is gone; so is the coordinator beside it.
LOST_SECONDS = 60.0


def read_token(path: Path | None) -> str:
    """The run's token: from a file (bare, or the run's ``control.json``), else from SHOAL_TOKEN.

    Raises:
        UsageError: neither is there, or the file cannot be used.
    """
    if path is None:
        token = os.environ.get("SHOAL_TOKEN", "")
        if not token:
            raise UsageError(
                "--join: no token; set SHOAL_TOKEN, or copy the run's control.json here and give it "
                "as --token-file"
            )
        return token
    try:
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: cannot be read: {error.strerror}") from None
    if text.startswith("{"):
        try:
            text = str(json.loads(text)["token"])
        except (ValueError, KeyError):
            raise UsageError(f"--token-file {path}: holds no token; give the run's") from None
    if not text:
        raise UsageError(f"--token-file {path}: is empty; give the run's token")
    return text


class Joiner:
    """Registers with a running supervisor and keeps ``settings.start`` workers here.

    A dead worker is replaced under a new name, ``settings.max_restarts`` times. Workers here leave in
    order on a stop signal or notice; a second interrupt kills them.

    Their logs stay in this machine's run directory; their metrics are sent on as well. Checkpoints are
    written by a worker of the first machine as long as it has one, and else here: then they, and what
    the script saves, are to be fetched from here before a resume there. A directory that both machines
    share, given to both as ``--run-dir``, holds everything in one place.

    Args:
        settings: of the workers; ports and scripts are the supervisor's own.
        address: ``HOST:PORT`` of its control endpoint.
        token: the run's secret.
        stream: where lines go.

    Raises:
        UsageError: no supervisor there, a wrong token, other versions, no room in the fleet, or a
            directory with checkpoints of another run.
    """

    def __init__(self, settings: Settings, address: str, token: str, stream: TextIO) -> None:
        self._address, self._token, self._stream = address, token, stream
        self._client = ControlClient(address, token)
        is_shared = rundir.is_shared(settings.run_dir, token)
        if not is_shared:
            rundir.check_joined(settings.run_dir)
        self._forwarder = None if is_shared else MetricsForwarder(self._client, settings.run_dir)
        rundir.check_writable(settings.run_dir)
        # Nothing is written before the fleet has said yes.
        self._names, reply = self._register(settings.start)
        seconds = reply.get("checkpoint_seconds")
        self._settings = replace(
            settings,
            resume=bool(reply.get("resume")),
            checkpoint_seconds=float(seconds) if isinstance(seconds, int | float) else 60.0,
        )
        self._signals = Signals()
        self._nursery = Nursery(settings.python)
        self._nursery.say = self._say
        self._crew = Crew(self._settings, self._nursery, address, token)
        self._processes = self._crew.processes
        self._unneeded: set[str] = set()  # ended before they had begun
        self._notice = NoticeFile(settings.notice_file)
        self._script = ScriptWatch(settings.train_script)
        self._restarts_left = settings.max_restarts
        self._kill_at: float | None = None
        self._stopping = False
        self._asked_at = self._answered_at = time.monotonic()
        self._code = SUCCESS
        self._message = ""

    def run(self) -> int:
        """Keep the workers until all have ended; the exit status."""
        try:
            for name in self._names:
                self._start(name)
            while self._processes:
                self._obey_signals()
                self._obey_orders(time.monotonic())
                self._watch_script()
                self._reap()
                self._signals.wait(TICK_SECONDS)
        finally:
            self._nursery.close()
            self._client.close()
            self._signals.close()
        if self._message:
            self._say(self._message)
        return self._code

    def _register(self, workers: int) -> tuple[list[str], dict[str, object]]:
        body = {"workers": workers, "host": platform.node(), "versions": versions()}
        try:
            reply = self._client.call("join", body)
        except Refused as error:
            raise UsageError(f"--join {self._address}: refused: {error}") from None
        except OSError as error:
            raise UsageError(
                f"--join {self._address}: no supervisor answers there ({error}); it is the address "
                "in the run's control.json, and must be reachable from here (--bind, --advertise)"
            ) from None
        names = reply.get("names")
        return [str(name) for name in names] if isinstance(names, list) else [], reply

    def _start(self, name: str) -> None:
        try:
            pid = self._crew.start(name)
        except OSError as error:
            self._code = FAILURE
            self._message = f"{name} could not be started: {error.strerror or error}"
            self._report_end(name, FAILURE)
        else:
            self._say(f"[worker_started] worker {name} · pid {pid}")

    def _obey_signals(self) -> None:
        now = time.monotonic()
        names = self._notice.take()
        stops = self._signals.take()
        if (stops or names == []) and not self._stopping:
            self._stopping = True
            self._kill_at = now + self._settings.drain_seconds
            self._ask_to_leave(list(self._processes))
        elif signal.SIGINT in stops:
            self._kill_at, self._code = now, INTERRUPTED
        elif names:
            self._ask_to_leave([name for name in names if name in self._processes])
        if self._kill_at is not None and now >= self._kill_at:
            for process in self._processes.values():
                process.kill()

    def _ask_to_leave(self, names: list[str]) -> None:
        for name in names:
            try:
                self._client.call("leave", {"name": name})
            except (OSError, Refused):
                # Without the supervisor the worker's own signal handler does the same.
                self._crew.terminate(name)

    def _obey_orders(self, now: float) -> None:
        """Kill workers that the supervisor found hung; notice when it is gone."""
        if now - self._asked_at < ORDERS_SECONDS:
            return
        self._asked_at = now
        try:
            reply = self._client.call("orders", {"names": list(self._processes)})
        except (OSError, Refused):
            if now - self._answered_at > LOST_SECONDS:
                self._message = (
                    f"the supervisor at {self._address} is gone; workers here were ended"
                )
                self._code, self._stopping, self._kill_at = RESUMABLE, True, now
            return
        self._answered_at = now
        self._stopping = self._stopping or reply.get("stopping") is True
        for name in self._named(reply, "kill"):
            self._crew.kill(name)
        for name in self._named(reply, "end"):
            self._unneeded.add(name)
            self._crew.terminate(name)
        for name in self._processes:
            self._forward(name)

    def _watch_script(self) -> None:
        change = self._script.change(time.monotonic())
        if change is not None:
            self._say(event_line({"kind": "script_changed", **change}))

    def _named(self, reply: Mapping[str, object], key: str) -> list[str]:
        """The workers of this machine that an order names."""
        names = reply.get(key)
        return (
            [name for name in names if name in self._processes] if isinstance(names, list) else []
        )

    def _reap(self) -> None:
        for name, code in self._crew.take_ended():
            self._say(f"[worker_exited] worker {name} · code {code}")
            self._forward(name)
            self._report_end(name, code)
            if name not in self._unneeded:
                self._after_end(name, code)

    def _report_end(self, name: str, code: int) -> None:
        try:
            self._client.call("exited", {"name": name, "code": code})
        except (OSError, Refused):
            self._say(f"{name}: its end could not be reported")

    def _forward(self, name: str) -> None:
        if self._forwarder is not None:
            with contextlib.suppress(OSError, Refused):
                self._forwarder.forward(name)

    def _after_end(self, name: str, code: int) -> None:
        log = rundir.log_file(self._settings.run_dir, name)
        if code in (SUCCESS, RESUMABLE) or self._stopping:
            self._code = max(self._code, RESUMABLE if code == RESUMABLE else SUCCESS)
        elif code in (USER_ERROR, DIVERGED):
            self._code = USER_ERROR if code == USER_ERROR else FAILURE
            self._message, self._restarts_left = last_line(log), 0
        elif self._restarts_left > 0:
            self._restarts_left -= 1
            self._rejoin()
        else:
            self._code, self._message = FAILURE, last_traceback(log)

    def _rejoin(self) -> None:
        try:
            names, _ = self._register(1)
        except UsageError as error:
            self._say(f"not replaced: {error}")
            return
        for name in names:
            self._start(name)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it
            print(text, file=self._stream, flush=True)
