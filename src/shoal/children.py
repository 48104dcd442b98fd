"""What a child process does first: die with its parent, and let go of what it inherited.

On the standard library alone. (The processes that ``shoal run`` starts by path, without importing this
package, have their own few lines in :mod:`shoal.fleet.supervisor.worker_main`.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
INTERNET = (socket.AF_INET, socket.AF_INET6)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux; else nothing).

    Args:
        parent: the parent's process id, known from before the start; this process ends at once if that
            parent is gone already. None leaves this moment uncovered.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def let_go_of(descriptors: Iterable[int]) -> None:
    """Put the null device in the place of inherited descriptors.

    A connection ends for its peer only when the last copy is closed. The numbers stay taken, so whatever
    object still owns one closes a harmless file.
    """
    doomed = list(descriptors)
    if doomed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in doomed:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


def internet_sockets() -> list[int]:
    """All descriptors of this process, above standard error, that are internet sockets."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    numbers = [int(name) for name in os.listdir(folder)]
    return [number for number in numbers if number > 2 and _is_internet_socket(number)]


def _is_internet_socket(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:  # the listing's own descriptor, closed by now
        return False
    with socket.socket(fileno=os.dup(descriptor)) as view:
        return view.family in INTERNET
