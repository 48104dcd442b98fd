"""Signals as a queue that a loop reads, and a way for other threads to wake that loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Installs handlers for the stop signals and the end of children. Main thread only.

    Handlers only note the signal's number; a byte in a pipe ends the loop's wait. No lock is taken,
    so a signal may come at any moment.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._taken: list[int] = []
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def wake(self) -> None:
        """End the loop's wait; from any thread."""
        # A full pipe wakes as well; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a signal, an ended child or a :meth:`wake`, at most ``seconds``."""
        select.select([self._read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def take(self) -> list[int]:
        """Stop signals since the last call, oldest first."""
        taken: list[int] = []
        while self._taken:
            taken.append(self._taken.pop(0))
        return taken

    def close(self) -> None:
        """Restore what was there before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        read, write, self._write = self._read, self._write, -1
        os.close(read)
        os.close(write)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._taken.append(number)
