"""A journal that outlives its disk: what cannot be written waits in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.ledger.journal import Journal

MOST_ROWS = 10_000


class KeptJournal:
    """Appends rows in order and raises for no disk that is full or gone.

    Every further row is a new attempt at those that wait, so that nothing is missing once there is room
    again.

    Args:
        path: the file; made by the first row.
        say: shows a line: once when writing fails, and once more if rows are lost in the end.
        most: how many rows may wait; later ones are lost.
    """

    def __init__(self, path: Path, say: Callable[[str], None], most: int = MOST_ROWS) -> None:
        self.path = path
        self.unwritten: list[Mapping[str, object]] = []
        self._say, self._most = say, most
        self._journal: Journal | None = None
        self._lost = 0
        self._has_failed = False

    def open(self) -> None:
        """Open the file now.

        Raises:
            OSError: that cannot be done.
        """
        self._journal = self._journal or Journal(self.path)

    def append(self, row: Mapping[str, object]) -> None:
        """Add a row, now or as soon as possible."""
        if len(self.unwritten) < self._most:
            self.unwritten.append(row)
        else:
            self._lost += 1
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"{self.path.name}: not recorded any more ({error.strerror or error}); training "
                    "goes on, and what is missing is written if there is room again"
                )

    def close(self) -> None:
        """Try once more, then close the file."""
        with contextlib.suppress(OSError):
            self._write()
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.close()
        missing = len(self.unwritten) + self._lost
        if missing:
            self._say(f"{missing} rows of {self.path.name} could not be written")

    def _write(self) -> None:
        while self.unwritten:
            self.open()
            assert self._journal is not None
            self._journal.append(self.unwritten[0])
            del self.unwritten[0]
