"""What a supervisor is asked to do, checked before anything is written or started."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from shoal.errors import UsageError
from shoal.fleet.supervisor.roster import NO_LIMIT
from shoal.fleet.supervisor.script import Event

LEAST_HANG_SECONDS = 2.0
LAST_PORT = 65535
# The option of the command line behind each time.
_TIMES = {
    "join_timeout_seconds": "--join-timeout",
    "heartbeat_seconds": "heartbeat_seconds",
    "gather_seconds": "--gather-seconds",
    "patience_seconds": "--patience",
    "hang_seconds": "--hang-seconds",
    "drain_seconds": "--drain-seconds",
    "checkpoint_seconds": "--checkpoint-every",
}


def parse_workers(text: str) -> tuple[int, int, int]:
    """``--workers`` as (number to start with, minimum, maximum).

    ``N`` starts N, goes on with 1 or more and can be resized to any number; ``MIN:MAX`` starts MAX
    and stays in that range.

    Raises:
        UsageError: neither form, fewer than 1, or MIN above MAX.

    Example:
        >>> parse_workers("1:4")
        (4, 1, 4)
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"--workers {text}; it is N or MIN:MAX; e.g. --workers 4 or --workers 1:4")
    first = int(match[1])
    if first < 1:
        raise UsageError(f"--workers {text}; a fleet has at least 1 worker; e.g. --workers 1:4")
    if match[2] is None:
        return first, 1, NO_LIMIT
    last = int(match[2])
    if first > last:
        raise UsageError(
            f"--workers {text}; MIN must not be above MAX; did you mean --workers {last}:{first}?"
        )
    return last, first, last


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One call of ``shoal run``.

    Args:
        train_script: the user's Python file.
        arguments: what is passed on to it.
        run_dir: directory of the run; made when missing.
        start: number of workers to start with, in [minimum, maximum].
        minimum: fewest workers the run goes on with, >= 1.
        maximum: most workers.
        resume: go on from the directory's checkpoints.
        events: the script of events.
        bind: address that the control endpoint and the coordinator listen on.
        advertise: address under which other machines reach this one.
        port: port of the control endpoint, 0 for any.
        coordinator_port: port of the coordinator, 0 for any.
        join_timeout_seconds: how long the coordinator waits for workers that are alive but busy.
        heartbeat_seconds: a worker without heartbeat for so long is lost to the others.
        gather_seconds: how long the start waits for all workers.
        patience_seconds: how long workers wait below ``minimum`` before they stop in order.
        hang_seconds: a worker without progress of its own for so long is killed.
        drain_seconds: how long workers have to leave in order before they are killed.
        max_restarts: replacements within ``restart_window_seconds`` before giving up.
        restart_window_seconds: see there.
        checkpoint_seconds: how often the workers write a checkpoint.
        notice_file: a file whose appearance says that this machine goes away.
        report: write ``report.html`` at the end.
        python: the interpreter that runs the workers.
    """

    train_script: Path
    arguments: tuple[str, ...] = ()
    run_dir: Path
    start: int = 1
    minimum: int = 1
    maximum: int = NO_LIMIT
    resume: bool = False
    events: tuple[Event, ...] = ()
    bind: str = "127.0.0.1"
    advertise: str = ""
    port: int = 0
    coordinator_port: int = 0
    join_timeout_seconds: float = 30.0
    heartbeat_seconds: float = 0.3
    gather_seconds: float = 120.0
    patience_seconds: float = 300.0
    hang_seconds: float = 60.0
    drain_seconds: float = 60.0
    max_restarts: int = 10
    restart_window_seconds: float = 300.0
    checkpoint_seconds: float = 60.0
    notice_file: Path | None = None
    report: bool = True
    python: str = sys.executable

    def __post_init__(self) -> None:
        if not os.path.isfile(self.train_script):
            raise UsageError(f"{self.train_script}: no such file; give the training script's path")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _TIMES and not value > 0:
                raise UsageError(
                    f"{_TIMES[item.name]} {value:g}; it is a time in seconds above 0; leave it out for "
                    f"the default of {item.default:g}"
                )
        for option, port in (("--port", self.port), ("--coordinator-port", self.coordinator_port)):
            if not 0 <= port <= LAST_PORT:
                raise UsageError(
                    f"{option} {port}; a port is 1 to {LAST_PORT}, or 0 for any free one; leave it out "
                    "for that"
                )
        if self.hang_seconds < LEAST_HANG_SECONDS:
            raise UsageError(
                f"--hang-seconds {self.hang_seconds:g}; workers are heard of every half second, so less "
                f"than {LEAST_HANG_SECONDS:g} would kill healthy ones; give more"
            )
        if self.max_restarts < 0:
            raise UsageError(
                f"--max-restarts {self.max_restarts}; it is 0 (never replace) or more; leave it out for "
                "the default of 10"
            )

    @property
    def reachable(self) -> str:
        """The address that workers are given: the advertised one, or where the endpoint listens.

        Raises:
            UsageError: it listens on all addresses and none is advertised.
        """
        if self.advertise:
            return self.advertise
        if self.bind in ("0.0.0.0", "::"):
            raise UsageError(
                f"--bind {self.bind} listens on all addresses; say under which one other machines "
                "reach this one with --advertise ADDRESS"
            )
        return self.bind

    @property
    def workers_text(self) -> str:
        """The range of workers as ``--workers`` takes it."""
        if self.maximum == NO_LIMIT:
            return str(self.start)
        return f"{self.minimum}:{self.maximum}"


def bracketed(host: str) -> str:
    """A host as it is written before ``:PORT``: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
