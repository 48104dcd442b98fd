"""The coordinator (torchft's lighthouse) as the supervisor's child: started and restarted."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from shoal.errors import ShoalError, UsageError
from shoal.fleet.supervisor.processes import Nursery, Process, last_line
from shoal.fleet.supervisor.settings import Settings, bracketed

QUORUM_TICK_MS = 20
START_SECONDS = 20.0
RETRY_SECONDS = 0.2


def check_port(bind: str, port: int) -> None:
    """Refuse a port in use before anything is written or started.

    Raises:
        UsageError: it is in use, or the address is not this machine's.
    """
    with socket.socket(_family(bind), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise UsageError(
                f"--bind {bind} --coordinator-port {port}: cannot listen there "
                f"({error.strerror or error}); choose another port, or leave it out for any free one"
            ) from None


class Coordinator:
    """One lighthouse on one port for the whole run.

    Args:
        settings: address, port and timeouts.
        nursery: starts the process.
        log: where its output goes.

    Raises:
        UsageError: the port is in use, or torchft is not installed.
    """

    def __init__(self, settings: Settings, nursery: Nursery, log: Path) -> None:
        self._settings, self._nursery, self._log = settings, nursery, log
        self._port = settings.coordinator_port or _free_port(settings.bind)
        self._retry_at = 0.0
        self._process = self._start()
        self._wait_until_up()

    @property
    def address(self) -> str:
        """What workers connect to."""
        return f"http://{bracketed(self._settings.reachable)}:{self._port}"

    def kill(self) -> None:
        """SIGKILL, as a script asks; :meth:`restart_if_dead` starts it again."""
        self._process.kill()

    def restart_if_dead(self) -> bool:
        """Start it again on the same port when it has ended; whether that was needed.

        Raises:
            OSError: it cannot be started now; the next call tries again.
        """
        if time.monotonic() < self._retry_at or self._process.poll() is None:
            return False
        self._nursery.forget(self._process)
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._process = self._start()
        return True

    def _start(self) -> Process:
        settings = self._settings
        arguments = [
            f"--bind={bracketed(settings.bind)}:{self._port}",
            "--min_replicas=1",
            f"--join_timeout_ms={round(1000 * settings.join_timeout_seconds)}",
            f"--quorum_tick_ms={QUORUM_TICK_MS}",
            f"--heartbeat_timeout_ms={round(1000 * settings.heartbeat_seconds)}",
        ]
        environment = {"RUST_LOG": "warn", **os.environ}
        return self._nursery.start("coordinator_main.py", arguments, environment, self._log)

    def _wait_until_up(self) -> None:
        host = self._settings.bind
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            ended = self._process.poll()
            if ended is not None:
                line = last_line(self._log)
                if "in use" in line or "os error 98" in line:
                    raise UsageError(
                        f"--coordinator-port {self._port}: in use on {self._settings.bind}; choose "
                        "another port, or leave the option out to take any free one"
                    )
                if "No module named 'torchft" in line:
                    raise UsageError(
                        "torchft is not installed, and `shoal run` needs it (Linux, Python 3.11 to "
                        "3.13); start a fixed number of workers with torchrun instead"
                    )
                raise ShoalError(f"the coordinator did not start (status {ended}): {line}")
            try:
                socket.create_connection((host, self._port), 1.0).close()
                return
            except OSError:
                time.sleep(0.01)
        raise ShoalError(f"the coordinator did not answer on port {self._port}; see {self._log}")


def _free_port(bind: str) -> int:
    with socket.socket(_family(bind), socket.SOCK_STREAM) as probe:
        probe.bind((bind, 0))
        return probe.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
