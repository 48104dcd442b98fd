"""The released layout in: an archive of measurements becomes parquet tables that any DuckDB can query.

Everything is read as it is: directories named by integers and sorted as such, columns that some files
lack, trials that are INCOMPLETE, ``train_steps`` 0. What is broken is named and the rest imported.
:mod:`shoal.ledger.archive_export` writes the layout, :mod:`shoal.ledger.queries` analyses the tables,
``shoal.study.tables.read_archive`` gives them to the study's analysis.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, UsageError
from shoal.ledger import archive_views
from shoal.ledger.archive_layout import Problem, SearchFolder, find_searches
from shoal.ledger.statements import text
from shoal.ledger.store import connect, write_rows, write_whole

_SHARES_PER_PROCESS = 4
_LEAST_SHARE = 5000  # trials; a process takes longer to start than to read fewer


@dataclass(frozen=True, kw_only=True)
class ArchiveReport:
    """What an import found.

    Args:
        searches, trials, evaluations, values: how many were imported.
        problems: files that were broken or odd, each with what was done about it.
    """

    searches: int
    trials: int
    evaluations: int
    values: int
    problems: Sequence[Problem]


def import_archive(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    processes: int = 2,
) -> ArchiveReport:
    """Read an archive in the released layout into ``out/tables``.

    Memory stays below 1 GiB per process whatever the archive's size.

    Args:
        directory: of the archive; everything below it is looked at.
        out: where ``tables/`` is made; it appears whole, at the end.
        processes: that read files side by side.

    Returns:
        Counts, and what was broken.

    Raises:
        UsageError: nothing to import, ``out`` holds tables already, or no processes.
    """
    directory, out = Path(directory), Path(out)
    if processes < 1:
        raise UsageError(f"processes = {processes}; at least 1 reads the files; correct it")
    if not directory.is_dir():
        raise UsageError(
            f"archive = {directory}; there is no such directory; give the unpacked one"
        )
    folders, problems = find_searches(directory)
    with fresh_tables(out) as tables, tempfile.TemporaryDirectory() as name:
        answers = _read_all(folders, tables, Path(name), processes)
        for answer in answers:
            problems += [Problem(*problem) for problem in answer["problems"]]
        report = ArchiveReport(
            searches=len(folders),
            trials=sum(answer["trials"] for answer in answers),
            evaluations=sum(answer["evaluations"] for answer in answers),
            values=sum(answer["values"] for answer in answers),
            problems=sorted(problems),
        )
        _write_searches(folders, tables, Path(name))
        _write_trials(tables, Path(name))
        finish(tables, report)
    return report


def finish(tables: Path, report: ArchiveReport) -> None:
    """Add what is derived from the parts: ``views.sql`` and ``import.json``."""
    (tables / "views.sql").write_text(archive_views.views(tables))
    facts = {
        "searches": report.searches,
        "trials": report.trials,
        "evaluations": report.evaluations,
        "values": report.values,
        "problems": [problem._asdict() for problem in report.problems],
    }
    write_whole(tables / "import.json", json.dumps(facts, indent=1)).rename(tables / "import.json")


@contextlib.contextmanager
def fresh_tables(out: Path) -> Iterator[Path]:
    """A directory that becomes ``out/tables`` when all went well."""
    target, partial = out / "tables", out / "tables.partial"
    if target.exists():
        raise UsageError(f"out = {target}; it exists; give another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir()
    except FileExistsError:
        raise UsageError(
            f"out = {partial}; an import is under way there or was cut off; if none is, remove it"
        ) from None
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_all(
    folders: Sequence[SearchFolder], tables: Path, temporary: Path, processes: int
) -> list[dict]:
    """Deal the searches to processes, in shares of about equally many trials."""
    total = sum(len(folder.trials) for folder in folders)
    target = max(
        total // (processes * _SHARES_PER_PROCESS), min(total // processes, _LEAST_SHARE), 1
    )
    shares: list[list[dict[str, object]]] = [[]]
    place = taken = 0
    for number, folder in enumerate(folders):
        if taken >= target:
            shares.append([])
            taken = 0
        search = {
            "number": number,
            "path": str(folder.path),
            "trials": folder.trials,
            "first_place": place,
        }
        shares[-1].append(search)
        place += len(folder.trials)
        taken += len(folder.trials)
    tasks: list[Path] = []
    for i, share in enumerate(shares):
        task = temporary / f"{i}.json"
        task.write_text(json.dumps({"parent": os.getpid(), "out": str(tables), "searches": share}))
        tasks.append(task)
    _run(tasks, processes)
    return [json.loads(task.with_suffix(".answer").read_text()) for task in tasks]


def _run(tasks: list[Path], processes: int) -> None:
    """Have every task done, ``processes`` at a time."""
    waiting, running = list(reversed(tasks)), []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                command = [sys.executable, "-m", "shoal.ledger.archive_part", str(waiting.pop())]
                running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            first = running.pop(0)
            _, said = first.communicate()
            if first.returncode != 0:
                last = said.strip().splitlines()[-1] if said.strip() else f"exit {first.returncode}"
                raise ShoalError(f"an import process failed: {last}")
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _write_searches(folders: Sequence[SearchFolder], tables: Path, temporary: Path) -> None:
    rows: list[dict[str, object]] = []
    for number, folder in enumerate(folders):
        facts = {
            name: getattr(folder, name) for name in archive_views.SEARCH_COLUMNS if name != "search"
        }
        rows.append({"search": number, **facts})
    with connect(temporary) as connection:
        write_rows(
            connection, rows, archive_views.SEARCH_COLUMNS, "search", tables / "searches.parquet"
        )


def _write_trials(tables: Path, temporary: Path) -> None:
    parts = sorted(tables.glob("trials-*.parquet"))
    if not parts:
        raise UsageError(
            "archive = no trial of it can be read; the problems: give the directory of the archive"
        )
    listed = ", ".join(text(str(part)) for part in parts)
    target = text(str(tables / "trials.parquet"))
    with connect(temporary) as connection:
        connection.execute(
            f"COPY (SELECT * FROM read_parquet([{listed}]) ORDER BY place) TO {target} "
            "(FORMAT parquet, COMPRESSION zstd)"
        )
    for part in parts:
        part.unlink()
