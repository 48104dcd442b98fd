"""A lighthouse in a process of its own, so that a test can kill and restart it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from shoal.testing import processes
from shoal.testing.processes import Child, Herd


def serve(port: int, join_timeout_ms: int) -> None:
    """The body of the process."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=300,
    )
    processes.tell(server.address())
    threading.Event().wait()


class Lighthouse:
    """Starts, kills and restarts a lighthouse on one port."""

    def __init__(self, herd: Herd, join_timeout_ms: int = 3000):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._herd = herd
        self._join_timeout_ms = join_timeout_ms
        self._starts = 0
        self.child = self.start()

    def start(self) -> Child:
        """Start it, or start it again."""
        self._starts += 1
        self.child = self._herd.start(
            serve, self.port, self._join_timeout_ms, name=f"lighthouse{self._starts}"
        )
        self.child.message(60)
        return self.child

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()


def journal_names(directory: Path) -> list[str]:
    """Workers that wrote something."""
    return sorted(path.stem for path in directory.glob("*.steps"))
