"""What the doctor looks at outside a run's configuration: versions, threads, ports, disk and clock.

:func:`look` touches the machine once; everything that judges works on what it returned.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONNECT_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a machine, and about a run directory on it.

    Args:
        python: version of the interpreter.
        system: ``sys.platform``.
        versions: of shoal, torch and torchft; None for what is not installed.
        torchft_error: why torchft cannot be imported; empty if it can.
        cores: processor cores this process may use.
        threads: threads that torch uses per process.
        bind_error: why no port on the loopback address can be listened on; empty if one can.
        free_bytes: free space where the run's checkpoints go (the present directory without one).
        writable: whether the run directory can be written.
        now: the clock, in seconds since 1970.
        newest: when the newest file of the run was written; None without one.
        pid_alive: whether the run's supervisor lives; None when the run has none on record.
        reachable: for each address on record, ``control`` and ``coordinator``, whether it answers.
    """

    python: str
    system: str
    versions: Mapping[str, str | None]
    torchft_error: str = ""
    cores: int
    threads: int
    bind_error: str = ""
    free_bytes: int
    writable: bool = True
    now: float
    newest: float | None = None
    pid_alive: bool | None = None
    reachable: Mapping[str, bool] = field(default_factory=dict)


def look(run: Path | None = None, control: Mapping[str, object] | None = None) -> Machine:
    """Gather the facts.

    Args:
        run: a run directory, or None for the machine alone.
        control: the run's ``control.json``, if it has one.
    """
    import torch

    from shoal.world.elastic.endpoint import versions

    place = run if run is not None else Path.cwd()
    control = control or {}
    return Machine(
        python=platform.python_version(),
        system=sys.platform,
        versions=versions(),
        torchft_error=_import_error(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        bind_error=bind_error(),
        free_bytes=shutil.disk_usage(place).free,
        writable=_writable(place),
        now=time.time(),
        newest=_newest(run) if run is not None else None,
        pid_alive=_alive(control.get("pid")),
        reachable=_reachable(control),
    )


def bind_error(port: int = 0) -> str:
    """Why ``port`` (0: any free one) of the loopback address cannot be listened on, or ``""``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def answers(host: str, port: int, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether something listens there; an address that means "all of them" is asked locally."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False


def _reachable(control: Mapping[str, object]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    host, port = control.get("host"), control.get("port")
    if isinstance(host, str) and isinstance(port, int):
        found["control"] = answers(host, port)
    address = control.get("coordinator")
    if isinstance(address, str):
        # With or without a scheme: http://host:port, host:port, [::1]:port.
        name, _, digits = address.rpartition("://")[2].rstrip("/").rpartition(":")
        if digits.isdigit():
            found["coordinator"] = answers(name.strip("[]"), int(digits))
    return found


def _import_error() -> str:
    try:
        importlib.import_module("shoal.world.elastic.quorum")  # the one module that imports it
    except Exception as error:  # whatever a broken extension raises is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _writable(place: Path) -> bool:
    read_only = False
    if hasattr(os, "statvfs"):
        read_only = bool(os.statvfs(place).f_flag & getattr(os, "ST_RDONLY", 0))
    return os.access(place, os.W_OK) and not read_only


def _newest(run: Path) -> float | None:
    times: list[float] = []
    for path in (run / "events.jsonl", run / "run.json", *run.glob("metrics/*.jsonl")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _alive(pid: object) -> bool | None:
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
