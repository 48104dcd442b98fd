"""A line that says how far a reproduction is and how long it still takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


def duration(seconds: float) -> str:
    """Seconds in words, e.g. ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Counts work and estimates the time left from what the work done so far has taken.

    On a terminal one line is rewritten; elsewhere a plain line is printed when a piece is finished.

    Args:
        total: work to do, in any one unit (optimizer steps here), > 0.
        stream: where the line goes; standard error by default, so that standard output stays clean.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        total: float,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.done = 0.0
        self._skipped = 0.0
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start = clock()
        self._shown = float("-inf")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end, or None before any work was done."""
        worked = self.done - self._skipped
        if worked <= 0:
            return None
        return self.seconds / worked * max(self.total - self.done, 0.0)

    def skip(self, work: float) -> None:
        """Count ``work`` as done that took no time, e.g. a cell of an earlier call."""
        self.done += work
        self._skipped += work

    def advance(self, work: float, what: str) -> None:
        """Count ``work`` as done; ``what`` names the piece under way."""
        self.done += work
        if self._stream.isatty() and self._clock() - self._shown > 0.5:
            self._shown = self._clock()
            self._stream.write(f"\r\x1b[2K{self.line(what)}")
            self._stream.flush()

    def finish_piece(self, what: str) -> None:
        """Say that the piece ``what`` is finished."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[2K")
        self._stream.write(self.line(what) + "\n")
        self._stream.flush()

    def line(self, what: str) -> str:
        """The line as it is shown."""
        left = self.seconds_left
        rest = f"about {duration(left)} left" if left is not None else "time left not known yet"
        share = min(self.done / self.total, 1.0)
        return f"{share:4.0%}  {what}  ({duration(self.seconds)} so far, {rest})"
