"""How the elastic benchmarks start processes, and what the loopback can carry."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_SEND = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
block = bytes(1 << 20)
for _ in range(int(sys.argv[2])):
    link.sendall(block)
"""


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """One thread per process on both sides."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn", **(variables or {})}


def shoal_run(
    *arguments: str, directory: Path, workers: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``shoal run`` on a benchmark's worker."""
    command = [sys.executable, "-m", "shoal", "run", "--workers", str(workers)]
    command += ["--run-dir", str(directory), *arguments]
    return subprocess.Popen(
        command, env=environment(variables), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def set_pause(place: Path, paused: bool) -> None:
    """Let the workers that look into ``place`` stand still, or go on."""
    mark = place / "pause"
    if paused:
        mark.touch()
    else:
        mark.unlink(missing_ok=True)


def loopback_bytes_per_second(mebibytes: int = 64, times: int = 3) -> float:
    """What one connection between two processes carries over the loopback; the median of some tries."""
    speeds = []
    for _ in range(times):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            command = [sys.executable, "-c", _SEND, str(port), str(mebibytes)]
            with subprocess.Popen(command) as sender:
                link, _ = server.accept()
                buffer, got = bytearray(1 << 20), 0
                begun = time.perf_counter()
                with link:
                    while count := link.recv_into(buffer):
                        got += count
                speeds.append(got / (time.perf_counter() - begun))
                sender.wait(30)
    return statistics.median(speeds)
