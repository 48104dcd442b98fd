"""A notice that this machine goes away: a file that a cloud's agent, or a person, puts there."""

from __future__ import annotations

from pathlib import Path


class NoticeFile:
    """Watches for one file.

    An empty file concerns all workers of this machine; one that holds names (``w1 w2``) those alone. A
    file is read once; written anew, it is a new notice.

    Args:
        path: the file; None watches nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def take(self) -> list[str] | None:
        """The names in a new notice (an empty list: all workers here), or None."""
        if self._path is None:
            return None
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._seen:
                return None
            names = self._path.read_text(errors="replace").split()
        except OSError:
            return None
        self._seen = stamp
        return names
