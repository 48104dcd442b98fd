"""The rows of a study on disk: journals, and the parquet parts that earlier rows were compacted into.

``tables/manifest.N.json`` says which parts hold rows and how many bytes of which journal they cover; the
largest N counts. A journal is known by its first line, whatever its file is called, so it may be renamed
or compressed. What lies beyond the covered bytes is read from the journal. Reading the same row twice
does no harm: the reading rule takes one row per thing.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from shoal.errors import ShoalError, UsageError
from shoal.ledger import statements
from shoal.ledger.journal import decode

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")

_TRIES = 10
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the parquet parts cover.

    Args:
        number: rises with every compaction; 0 before the first.
        covered: bytes by identity of the journal.
        parts: file names in ``tables/`` by kind of row.
    """

    number: int = 0
    covered: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Whole lines of a journal that are in no part yet: bytes ``start`` up to ``end``."""

    path: Path
    identity: str
    start: int
    end: int

    @property
    def is_compressed(self) -> bool:
        """Whether the file is an archived journal; offsets are those of its content."""
        return self.path.suffix == ".gz"


def newest_manifest(directory: Path) -> Manifest:
    """The manifest that counts now."""
    for _ in range(_TRIES):
        numbers = manifest_numbers(directory)
        if not numbers:
            return Manifest()
        with contextlib.suppress(FileNotFoundError):
            content = json.loads(manifest_path(directory, numbers[-1]).read_text())
            return Manifest(number=numbers[-1], covered=content["covered"], parts=content["parts"])
    raise ShoalError(f"{directory}: its tables change too fast to be read; try again")


def manifest_path(directory: Path, number: int) -> Path:
    """Where the manifest of a number lies."""
    return directory / "tables" / f"manifest.{number}.json"


def manifest_numbers(directory: Path) -> list[int]:
    """Numbers of the manifests on disk, rising."""
    names = (path.name.split(".") for path in (directory / "tables").glob("manifest.*.json"))
    return sorted(int(name[1]) for name in names if len(name) == 3 and name[1].isdecimal())


def stretches(directory: Path, covered: Mapping[str, int]) -> list[Stretch]:
    """Everything in journals that no part holds, by file name.

    Raises:
        FileNotFoundError: a journal was put away meanwhile; ask again.
    """
    found: dict[str, Stretch] = {}
    for path in sorted((directory / "rows").glob("*.jsonl")):
        with path.open("rb") as file:
            head = file.readline()
            if not head.endswith(b"\n"):
                continue
            identity = identity_of(head)
            end = _last_line_end(file, os.fstat(file.fileno()).st_size)
        found[identity] = Stretch(
            path=path, identity=identity, start=min(covered.get(identity, 0), end), end=end
        )
    for path in sorted((directory / "rows").glob("*.jsonl.gz")):
        _, identity, length, *_ = path.name.split(".")
        start = min(covered.get(identity, 0), int(length))
        fresh = Stretch(path=path, identity=identity, start=start, end=int(length))
        found.setdefault(identity, fresh)
    return [found[key] for key in sorted(found) if found[key].start < found[key].end]


def identity_of(first_line: bytes) -> str:
    """What a journal is known by."""
    return hashlib.sha256(first_line).hexdigest()[:16]


def _last_line_end(file: BinaryIO, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def connect(temporary: Path) -> duckdb.DuckDBPyConnection:
    """An empty database in memory, which spills into ``temporary``.

    Raises:
        UsageError: duckdb is not installed.
    """
    try:
        import duckdb
    except ImportError:
        raise UsageError(
            "duckdb is not installed; tables need it; run: pip install 'shoal[study]'"
        ) from None
    connection = duckdb.connect()
    connection.execute(f"SET temp_directory = {statements.text(str(temporary))}")
    connection.execute("SET enable_progress_bar = false")
    return connection


def with_rows(directory: Path, use: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    """Call ``use`` with a database that shows all rows of a study: raw ones as ``KIND_rows``, and the
    views of the reading rule.

    Writers and a compaction may be at work meanwhile.

    Raises:
        UsageError: a journal is damaged inside; the text names it and the line.
    """
    tries = 0
    while True:
        manifest = newest_manifest(directory)
        try:
            with fresh_rows(directory, manifest) as (connection, _):
                _show(connection, directory, manifest)
                return use(connection)
        except (OSError, _io_error()) as error:
            # A compaction removes the parts it replaced, and may put journals away.
            moved_on = newest_manifest(directory).number != manifest.number
            gone = isinstance(error, FileNotFoundError)
            tries += 1
            if not (moved_on or gone) or tries >= _TRIES:
                raise


def _io_error() -> type[Exception]:
    try:
        import duckdb
    except ImportError:
        return FileNotFoundError
    return duckdb.IOException


def _show(connection: duckdb.DuckDBPyConnection, directory: Path, manifest: Manifest) -> None:
    for kind in statements.KINDS:
        sources = [statements.no_rows(kind), f"SELECT * FROM fresh_{kind}"]
        parts = [str(directory / "tables" / name) for name in manifest.parts.get(kind, [])]
        if parts:
            sources.append(statements.read_parts(parts))
        body = " UNION ALL BY NAME ".join(sources)
        connection.execute(f"CREATE TEMP VIEW {statements.table(kind)} AS {body}")
    connection.execute(statements.RULES)


@contextlib.contextmanager
def fresh_rows(
    directory: Path, manifest: Manifest
) -> Iterator[tuple[duckdb.DuckDBPyConnection, list[Stretch]]]:
    """A database with what no part holds, as typed tables ``fresh_KIND``, and what it was read from.

    Raises:
        UsageError: a journal is damaged inside.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-rows-") as name:
        temporary = Path(name)
        fresh = stretches(directory, manifest.covered)
        copies = [temporary / f"{i}.jsonl" for i in range(len(fresh))]
        # A copy, because the file may grow under the reader's hands.
        for stretch, copy in zip(fresh, copies, strict=True):
            _copy(stretch, copy)
        connection = connect(temporary)
        try:
            _parse(connection, fresh, copies)
            for copy in copies:
                copy.unlink()
            yield connection, fresh
        finally:
            connection.close()


def _parse(connection: duckdb.DuckDBPyConnection, fresh: list[Stretch], copies: list[Path]) -> None:
    import duckdb

    if copies:
        query = statements.read_journals([str(copy) for copy in copies])
        try:
            connection.execute(f"CREATE TEMP TABLE fresh AS {query}")
        except duckdb.InvalidInputException as error:
            _name_damage(fresh, copies)
            raise UsageError(f"{fresh[0].path.parent}: rows cannot be read: {error}") from error
    for kind in statements.KINDS:
        body = statements.rows_of_kind(kind, "fresh") if copies else statements.no_rows(kind)
        connection.execute(f"CREATE TEMP TABLE fresh_{kind} AS {body}")
    connection.execute("DROP TABLE IF EXISTS fresh")


def _opened(stretch: Stretch) -> BinaryIO:
    if stretch.is_compressed:
        return cast(BinaryIO, gzip.open(stretch.path))
    return stretch.path.open("rb")


def _copy(stretch: Stretch, target: Path) -> None:
    with _opened(stretch) as source, target.open("wb") as file:
        source.seek(stretch.start)
        left = stretch.end - stretch.start
        while left > 0:
            block = source.read(min(left, _BLOCK))
            if not block:
                raise ShoalError(f"{stretch.path}: it became shorter while it was read")
            file.write(block)
            left -= len(block)


def _name_damage(fresh: list[Stretch], copies: list[Path]) -> None:
    for stretch, copy in zip(fresh, copies, strict=True):
        before = _lines_before(stretch)
        with copy.open("rb") as file:
            for number, line in enumerate(file, start=before + 1):
                try:
                    decode(line.decode())
                except ValueError as error:
                    raise UsageError(
                        f"{stretch.path}, line {number}: not a JSON object ({error}); the file was "
                        "damaged by something else than shoal; restore it, or remove that line to "
                        "read the rest"
                    ) from None


def _lines_before(stretch: Stretch) -> int:
    with _opened(stretch) as source:
        return source.read(stretch.start).count(b"\n")


def write_whole(path: Path, content: str) -> Path:
    """A file beside ``path``, on the disk, ready to be renamed or linked to it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with fresh.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    return fresh


def write_rows(
    connection: duckdb.DuckDBPyConnection,
    rows: Iterable[Mapping[str, object]],
    columns: Mapping[str, str],
    order: str,
    path: Path,
) -> None:
    """Rows as a parquet file with typed columns; for tables that fit into memory."""
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    types = ", ".join(
        f"{statements.text(name)}: {statements.text(kind)}" for name, kind in columns.items()
    )
    connection.execute(
        f"COPY (SELECT * FROM read_json({statements.text(str(lines))}, format = 'newline_delimited', "
        f"columns = {{{types}}}) ORDER BY {order}) TO {statements.text(str(path))} "
        "(FORMAT parquet, COMPRESSION zstd)"
    )
    lines.unlink()


def compress(source: Path, target: Path) -> None:
    """A gzip copy of a file, on the disk."""
    with source.open("rb") as plain, target.open("wb") as raw:
        with gzip.open(raw, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed, _BLOCK)
        raw.flush()
        os.fsync(raw.fileno())
