"""Shows what the fleet's first worker prints, so that a user's own lines appear where they ran it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"


class LogFollower:
    """Passes on complete new lines of one log at a time.

    A traceback and what follows it is left out: one is shown at the end of a failed run, not several.

    Args:
        line: shows a line.
    """

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._log: Path | None = None
        self._offset = 0
        self._muted = False

    def follow(self, log: Path) -> None:
        """Pass on what is new in ``log``; of another log than before only what comes from now on."""
        if log != self._log:
            first = self._log is None
            self._log, self._muted = log, False
            self._offset = 0 if first else _size(log)
        if _size(log) <= self._offset:
            return
        try:
            with log.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return  # removed, or on a disk that fails
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            self._muted = self._muted or text.startswith(TRACEBACK)
            if not self._muted:
                self._line(text)

    def finish(self, log: Path) -> None:
        """Pass on the rest of a log that grows no more, if it is the one that was followed."""
        if log == self._log:
            self.follow(log)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
