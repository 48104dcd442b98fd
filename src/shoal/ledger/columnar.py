"""Journals into columns: :func:`compact` moves what was written since the last time into parquet parts.

Nothing is ever half done for a reader: parts count once a manifest names them, and the manifest appears
whole, by linking, which fails if another compaction was faster. A kill at any point leaves files that no
manifest names; the next compaction removes them. Journals stay where they are, or, when asked, those
without a writer are compressed in place.

``tables/views.sql`` shows it all in any DuckDB: ``cd STUDY/tables && duckdb -init views.sql``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.ledger import statements, store
from shoal.ledger.journal import without_writer
from shoal.ledger.store import Manifest, Stretch

if TYPE_CHECKING:
    import duckdb

MOST_PARTS = 8
"""More parts of one kind than this are merged into one."""

_ORDER = {
    "trial": "search, trial, segment",
    "eval": "search, trial, attempt, step, segment",
    "outcome": "search, trial, segment",
    "search": "search, segment",
    "samples": "search, trial, attempt, step, metric, segment",
}
_PART = re.compile(r"(?:trial|eval|outcome|search|samples)-(\d+)-[0-9a-f]+\.parquet")

_UNFINISHED = re.compile(r"\.(?:manifest\.(\d+)\.json|views\.sql)\.\d+\.[0-9a-f]+")


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """What :func:`compact` did.

    Args:
        number: of the manifest that counts now.
        rows: newly put into columns.
        archived: journals that were compressed.
        overtaken: another process compacted meanwhile, so this one changed nothing.
    """

    number: int
    rows: int
    archived: int = 0
    overtaken: bool = False


def compact(directory: str | os.PathLike[str], *, archive: bool = False) -> Compaction:
    """Put the rows of a study's journals into ``tables/*.parquet``. Safe at any moment, any number of times.

    Args:
        directory: the study's.
        archive: also compress journals that have no writer and are in columns wholly.

    Raises:
        UsageError: a journal is damaged inside, or duckdb is not installed.
        OSError: the disk is full or fails; nothing changed.
    """
    directory = Path(directory)
    before = store.newest_manifest(directory)
    with store.fresh_rows(directory, before) as (connection, fresh):
        if not fresh:
            archived = _tidy(directory, before, archive)
            return Compaction(number=before.number, rows=0, archived=archived)
        after, rows = _write_parts(connection, directory, before, fresh)
    if not _commit(directory, after):
        _remove_parts(directory, set(_names(after)) - set(_names(before)))
        newest = store.newest_manifest(directory)
        return Compaction(number=newest.number, rows=0, overtaken=True)
    archived = _tidy(directory, after, archive)
    return Compaction(number=after.number, rows=rows, archived=archived)


def _tidy(directory: Path, manifest: Manifest, archive: bool) -> int:
    """What follows a manifest that counts; also what an earlier compaction was killed before.

    Returns:
        How many journals were compressed.
    """
    if manifest.number == 0:
        return 0
    _write_views(directory)
    _remove_superseded(directory)
    return _archive(directory, manifest) if archive else 0


def _write_parts(
    connection: duckdb.DuckDBPyConnection,
    directory: Path,
    before: Manifest,
    fresh: list[Stretch],
) -> tuple[Manifest, int]:
    tables = directory / "tables"
    tables.mkdir(exist_ok=True)
    parts = {kind: list(before.parts.get(kind, [])) for kind in statements.KINDS}
    total = 0
    written: set[str] = set()
    try:
        for kind in statements.KINDS:
            found = connection.execute(f"SELECT count(*) FROM fresh_{kind}").fetchone()
            rows = int(found[0]) if found else 0
            if rows == 0:
                continue
            total += rows
            source = f"SELECT * FROM fresh_{kind}"
            if len(parts[kind]) >= MOST_PARTS:
                old = statements.read_parts([str(tables / name) for name in parts[kind]])
                source = f"{old} UNION ALL BY NAME {source}"
                parts[kind] = []
            name = f"{kind}-{before.number + 1}-{os.urandom(6).hex()}.parquet"
            written.add(name)
            write_parquet(connection, f"{source} ORDER BY {_ORDER[kind]}", tables / name)
            parts[kind].append(name)
    except BaseException:
        _remove_parts(directory, written)
        raise
    covered = {**before.covered, **{stretch.identity: stretch.end for stretch in fresh}}
    return Manifest(number=before.number + 1, covered=covered, parts=parts), total


def write_parquet(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    """The rows of a query as a parquet file, on the disk."""
    target = statements.text(str(path))
    connection.execute(f"COPY ({query}) TO {target} (FORMAT parquet, COMPRESSION zstd)")
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _commit(directory: Path, manifest: Manifest) -> bool:
    """Make a manifest count; False if its number is taken."""
    path = store.manifest_path(directory, manifest.number)
    content = {"covered": manifest.covered, "parts": manifest.parts}
    fresh = store.write_whole(path, json.dumps(content, indent=1))
    try:
        os.link(fresh, path)
    except (FileExistsError, FileNotFoundError):
        return False
    finally:
        fresh.unlink(missing_ok=True)
    # A slow process may have linked a number that was in use long ago and is gone by now.
    return store.newest_manifest(directory).number == manifest.number


def _write_views(directory: Path) -> None:
    """``views.sql`` for the newest manifest, also if it changes meanwhile."""
    while True:
        manifest = store.newest_manifest(directory)
        text = views(manifest)
        path = directory / "tables" / "views.sql"
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == text:
                return
        with contextlib.suppress(FileNotFoundError):  # tidied away by another compaction
            store.write_whole(path, text).rename(path)
        if store.newest_manifest(directory).number == manifest.number:
            return


def views(manifest: Manifest) -> str:
    """SQL that shows a study's tables in any DuckDB started in ``tables/``."""
    lines = [
        "-- The tables of a study. In its directory tables/: duckdb -init views.sql",
        "-- Rows written after the last compaction are in ../rows/*.jsonl.",
    ]
    for kind in statements.KINDS:
        parts = manifest.parts.get(kind, [])
        body = statements.read_parts(parts) if parts else statements.no_rows(kind)
        lines.append(f"CREATE OR REPLACE VIEW {statements.table(kind)} AS {body};")
    return "\n".join(lines) + "\n" + statements.RULES


def _remove_superseded(directory: Path) -> None:
    """Remove parts and manifests that do not count any more.

    A part of a number that has its manifest and is not named by the newest one is never going to be:
    whoever may still be writing it will find the number taken.
    """
    newest = store.newest_manifest(directory)
    kept = set(_names(newest))
    old: set[str] = set()
    for path in (directory / "tables").iterdir():
        match = _PART.fullmatch(path.name)
        if match and path.name not in kept and int(match[1]) <= newest.number:
            old.add(path.name)
        match = _UNFINISHED.fullmatch(path.name)
        if match and int(match[1] or 0) <= newest.number:
            old.add(path.name)
    _remove_parts(directory, old)
    for number in store.manifest_numbers(directory):
        if number < newest.number:
            store.manifest_path(directory, number).unlink(missing_ok=True)


def _names(manifest: Manifest) -> list[str]:
    return [name for names in manifest.parts.values() for name in names]


def _remove_parts(directory: Path, names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (directory / "tables" / name).unlink()


def _archive(directory: Path, manifest: Manifest) -> int:
    """Compress journals that have no writer and nothing beyond what the parts cover."""
    archived = 0
    for path in sorted((directory / "rows").glob("*.jsonl")):
        with contextlib.suppress(FileNotFoundError), without_writer(path) as free:
            if not free:
                continue
            with path.open("rb") as file:
                identity = store.identity_of(file.readline())
                size = os.fstat(file.fileno()).st_size
            if manifest.covered.get(identity) != size:
                continue
            for unfinished in path.parent.glob(f".{path.stem}.*.jsonl.gz.*"):
                unfinished.unlink(missing_ok=True)
            target = path.with_name(f"{path.stem}.{identity}.{size}.jsonl.gz")
            fresh = path.with_name(f".{target.name}.{os.getpid()}")
            try:
                store.compress(path, fresh)
                fresh.rename(target)
            finally:
                fresh.unlink(missing_ok=True)
            path.unlink()
            archived += 1
    return archived
