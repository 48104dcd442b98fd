"""Kills what a dead supervisor left: process groups, and so the workers' own children too.

Run by path with a pipe as standard input. The supervisor writes ``+PGID`` and ``-PGID`` lines; the
end of the pipe means that it is gone, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Follow the pipe to its end, then kill the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
