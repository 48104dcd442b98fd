"""A study's directory: where everything lies, and which of its files says what.

``study.json`` is written by whoever starts the study, or lets it grow; ``searches/SEARCH/done.N.json``
by the owner of claim N when the search is finished; ``engines/CURVE-bB.json`` by the first who
measured. All of them appear whole, by renaming or linking, and none is written by two processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import UsageError
from shoal.study.records import SearchKey

FORMAT = 1


class StudyDirectory:
    """Paths and small files of one study.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def claims(self) -> Path:
        """Where the claims lie."""
        return self.path / "claims"

    @property
    def engines(self) -> Path:
        """Where the chosen engines are noted."""
        return self.path / "engines"

    def rows(self, runner: str) -> Path:
        """The journal of one runner process."""
        return self.path / "rows" / f"{runner}.jsonl"

    def search(self, key: SearchKey) -> Path:
        """The directory of one search: what was put aside, its progress, its end."""
        return self.path / "searches" / str(key)

    # -- the spec ---------------------------------------------------------------------------------

    def spec(self) -> dict[str, object]:
        """What ``study.json`` holds.

        Raises:
            UsageError: there is none, or it cannot be read.
        """
        try:
            content = json.loads((self.path / "study.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"study = {self.path}; it holds no study.json, so no study was begun there; give the "
                "directory that `shoal study run` wrote"
            ) from None
        except ValueError as error:
            raise UsageError(
                f"study = {self.path}; its study.json cannot be read: {error}"
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UsageError(
                f"study = {self.path}; its study.json is not of format {FORMAT}; use the version of "
                "shoal that wrote it"
            )
        if not isinstance(content.get("spec"), dict) or "hash" not in content:
            raise UsageError(
                f"study = {self.path}; its study.json holds no spec, so something else than shoal wrote it; "
                "restore it"
            )
        return content

    def begin(self, content: Mapping[str, object]) -> bool:
        """Write ``study.json``, if it is not there.

        Returns:
            Whether this call wrote it.

        Raises:
            UsageError: the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return _link_fresh(self.path / "study.json", {"format": FORMAT, **content})
        except OSError as error:
            raise UsageError(
                f"out = {self.path}; it cannot be written ({error.strerror}); give another directory"
            ) from error

    def replace_spec(self, content: Mapping[str, object]) -> None:
        """Put a grown study in the place of the one it began as."""
        _replace(self.path / "study.json", {"format": FORMAT, **content})

    # -- searches ---------------------------------------------------------------------------------

    def end_of(self, key: SearchKey) -> dict[str, object] | None:
        """What was found out by a finished search; None while it is not finished."""
        end = _newest(self.search(key), "done")
        # One that says nothing about goals is damaged, and the search is carried out again.
        return end if end is not None and "goals" in end else None

    def write_end(self, key: SearchKey, segment: int, content: Mapping[str, object]) -> None:
        """Say that a search is finished."""
        _replace(self.search(key) / f"done.{segment}.json", content)

    def progress_of(self, key: SearchKey) -> dict[str, object] | None:
        """What the search's owner last said about it; None before the first word."""
        return _newest(self.search(key), "progress")

    def write_progress(self, key: SearchKey, segment: int, content: Mapping[str, object]) -> None:
        """Tell those who look on how far the search is. A full disk is not this file's business."""
        with contextlib.suppress(OSError):
            _replace(self.search(key) / f"progress.{segment}.json", content)

    # -- engines ----------------------------------------------------------------------------------

    def engine_of(self, curve: str, global_batch: int) -> dict[str, object] | None:
        """The engine chosen for a curve and global batch; None before it was."""
        return _read(self.engines / f"{curve}-b{global_batch}.json")

    def write_engine(
        self, curve: str, global_batch: int, content: Mapping[str, object]
    ) -> dict[str, object]:
        """Note the chosen engine, unless somebody was faster.

        Returns:
            What stands there now.
        """
        self.engines.mkdir(parents=True, exist_ok=True)
        _link_fresh(self.engines / f"{curve}-b{global_batch}.json", content)
        noted = self.engine_of(curve, global_batch)
        assert noted is not None
        return noted


def _newest(directory: Path, stem: str) -> dict[str, object] | None:
    found = []
    for path in directory.glob(f"{stem}.*.json"):
        number = path.name.split(".")[1]
        if number.isdecimal():
            found.append((int(number), path))
    for _, path in sorted(found, reverse=True):
        content = _read(path)
        if content is not None:
            return content
    return None


def _read(path: Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _written(path: Path, content: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    return fresh


def _replace(path: Path, content: Mapping[str, object]) -> None:
    _written(path, content).rename(path)


def _link_fresh(path: Path, content: Mapping[str, object]) -> bool:
    """Make ``path`` appear with its content, unless it exists; two who try do not mix."""
    if path.exists():
        return False
    fresh = _written(path, content)
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True
