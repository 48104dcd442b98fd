"""Notices that the training script changes on disk while workers that run its old text go on."""

from __future__ import annotations

import hashlib
from pathlib import Path

LOOK_SECONDS = 1.0
_Stamp = tuple[int, int, int]


class ScriptWatch:
    """Remembers the script at the start of the run; a worker started later reads it from disk anew.

    Args:
        path: the training script.

    Attributes:
        sha256: of the script at the start; None if it could not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self.sha256 = self._hash()
        self._known = self.sha256
        self._due = 0.0

    def change(self, now: float, *, at_once: bool = False) -> dict[str, object] | None:
        """A row that says what has changed since the last call, None if nothing has.

        Args:
            now: monotonic seconds; the file is looked at once a second.
            at_once: look now, for a worker is about to start.
        """
        if now < self._due and not at_once:
            return None
        self._due = now + LOOK_SECONDS
        stamp = self._look()
        if stamp == self._stamp:
            return None
        self._stamp, found = stamp, self._hash()
        if found == self._known:
            return None
        self._known = found
        if found == self.sha256:
            text = "is again what the run was started with"
        elif found is None:
            text = "cannot be read any more: workers that start from now on will fail; put it back"
        else:
            text = (
                "has changed since the start: workers that start from now on run other code than the "
                "others; put it back, or stop the run and resume it"
            )
        return {
            "text": f"{self._path.name} {text}",
            "sha256_at_start": _short(self.sha256),
            "sha256": _short(found),
        }

    def _look(self) -> _Stamp | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _hash(self) -> str | None:
        try:
            return hashlib.sha256(self._path.read_bytes()).hexdigest()
        except OSError:
            return None


def _short(digest: str | None) -> str | None:
    return digest and digest[:16]
