"""An append-only file of JSON lines that a kill at any byte cannot damage.

One process writes a journal, several may read it. Every row goes out as one ``write`` on a
descriptor opened for appending, so a reader sees whole rows and at most one torn line, the last. A
row counts once its line end is on the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.errors import UsageError

NON_FINITE_KEY = "_nonfinite"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TAIL_BYTES = 1 << 16


class Journal:
    """The writing side of one journal; its only writer.

    Opening cuts off a torn last line, which a killed writer left. A non-finite number is stored as
    ``null``, so that every column keeps one type for SQL, and its place and value under
    ``"_nonfinite"``: ``{"loss": null, "_nonfinite": {"loss": "nan"}}``; :func:`read` puts it back.

    Args:
        path: the file; it and its directory are made when missing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> with Journal(path) as journal:
        ...     journal.append({"step": 1, "loss": float("nan")})
        >>> path.read_text()
        '{"step":1,"loss":null,"_nonfinite":{"loss":"nan"}}\\n'
        >>> read(path)
        [{'step': 1, 'loss': nan}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open_for_writing(self.path)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._end = _whole_lines_end(self._fd)
        os.ftruncate(self._fd, self._end)

    def append(self, row: Mapping[str, object]) -> None:
        """Add one row, whole or not at all. May be called from several threads.

        Args:
            row: JSON-able values; text keys. The key ``_nonfinite`` is reserved.

        Raises:
            TypeError: a value is not JSON-able; nothing was written.
            ValueError: the key ``_nonfinite`` is used, or the journal is closed.
            RuntimeError: called in a forked child: a journal has one writer.
            OSError: the disk is full or fails; what was written of the row is taken back.
        """
        line = (encode(row) + "\n").encode()
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{self.path}: a journal has one writer; open another file in a child"
            )
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path}: the journal is closed")
            try:
                written = os.write(self._fd, line)
            except OSError:
                self._take_back()
                raise
            if written != len(line):
                self._take_back()
                raise OSError(
                    f"{self.path}: {written} of {len(line)} bytes written; is the disk full?"
                )
            self._end += written

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _take_back(self) -> None:
        # If even this fails, the torn line is the last one: readers drop it, opening repairs it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)


class Tail:
    """The reading side of a journal that is being written: each call gives the rows added since.

    Args:
        path: the file; it need not exist yet.
        start: bytes to skip, the end of some line.
    """

    def __init__(self, path: str | os.PathLike[str], start: int = 0) -> None:
        self.path = Path(path)
        self.end = start

    def rows(self) -> list[dict[str, object]]:
        """What was added since the last call, oldest first, without a torn last line.

        Raises:
            UsageError: a whole line is no row.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.end)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        rows = _rows(whole, f"{self.path}, after byte {self.end}")
        self.end += len(whole)
        return rows


def read(path: str | os.PathLike[str]) -> list[dict[str, object]]:
    """All rows of a journal, oldest first; a torn last line is left out.

    May be called while the journal is being written.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: a line other than a torn last one is no row; nothing is skipped silently.
    """
    return _rows(Path(path).read_bytes(), str(path))


def _rows(content: bytes, source: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            rows.append(decode(line.decode()))
        except ValueError as error:
            raise UsageError(
                f"{source}, line {number}: not a JSON object ({error}); the file was damaged by "
                "something else than shoal; restore it, or remove that line to read the rest"
            ) from None
    return rows


def encode(row: Mapping[str, object]) -> str:
    """One row as compact JSON without a line end; see :class:`Journal` for non-finite numbers.

    Raises:
        TypeError: a value is not JSON-able.
        ValueError: the key ``_nonfinite`` is used.
    """
    if NON_FINITE_KEY in row:
        raise ValueError(
            f"row key {NON_FINITE_KEY!r}; it is reserved for non-finite numbers; rename it"
        )
    with contextlib.suppress(ValueError):
        return json.dumps(row, allow_nan=False, separators=(",", ":"))
    places: dict[str, str] = {}
    finite = _split(row, (), places)
    assert isinstance(finite, dict)
    finite[NON_FINITE_KEY] = places
    return json.dumps(finite, allow_nan=False, separators=(",", ":"))


def decode(line: str) -> dict[str, object]:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: the line is not a JSON object.
    """
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"found a {type(row).__name__}")
    for place, value in row.pop(NON_FINITE_KEY, {}).items():
        *parents, last = place.split("/")
        node = row
        for key in parents:
            node = node[int(key) if isinstance(node, list) else _unescape(key)]
        node[int(last) if isinstance(node, list) else _unescape(last)] = _NON_FINITE[value]
    return row


def _split(value: object, place: tuple[str, ...], places: dict[str, str]) -> object:
    """``value`` with None for non-finite numbers; ``places`` gets where ("a/0/b") and what."""
    if isinstance(value, float) and not math.isfinite(value):
        places["/".join(place)] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {k: _split(v, (*place, _escape(str(k))), places) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_split(v, (*place, str(i)), places) for i, v in enumerate(value)]
    return value


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescape(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def _open_for_writing(path: Path) -> int:
    """A descriptor of the file that is at ``path`` now, with the mark that it has a writer."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    while True:
        fd = os.open(path, flags, 0o644)
        with contextlib.suppress(OSError):
            _lock(fd, exclusive=False)
        # Who puts a journal away does so under an exclusive lock; it may have been this one just now.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


@contextlib.contextmanager
def without_writer(path: Path) -> Iterator[bool]:
    """Hold off writers of a journal meanwhile; False, and nothing is held, if it has one.

    False too where the file system cannot tell.

    Raises:
        FileNotFoundError: there is no such file.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        try:
            _lock(fd, exclusive=True)
        except OSError:
            yield False
            return
        yield os.path.samestat(os.fstat(fd), os.stat(path))
    finally:
        os.close(fd)


def _lock(fd: int, *, exclusive: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: nobody can tell whether a journal has a writer
        if exclusive:
            raise OSError("no file locks here") from None
        return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)


def _whole_lines_end(fd: int) -> int:
    """Offset just after the last line end."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
