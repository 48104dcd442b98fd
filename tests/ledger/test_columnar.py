"""Compaction changes nothing that is read, whatever happens to it, and DuckDB alone can read the result."""

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from small_study import ERROR, KEY, OTHER, evaluation, shown, write_study, write_trial

from shoal.errors import UsageError
from shoal.ledger import columnar, statements, store
from shoal.ledger.columnar import compact
from shoal.ledger.study_rows import StudyWriter
from shoal.study.tables import read_study


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def test_nothing_that_is_read_changes(tmp_path):
    write_study(tmp_path)
    before = shown(read_study(tmp_path))
    assert len(before) == 2
    first = compact(tmp_path)
    assert first.rows == 24
    assert shown(read_study(tmp_path)) == before
    assert compact(tmp_path) == columnar.Compaction(number=first.number, rows=0)
    assert shown(read_study(tmp_path)) == before


def test_later_rows_are_added_and_parts_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "MOST_PARTS", 2)
    with StudyWriter(tmp_path / "rows" / "r.jsonl") as writer:
        for number in range(7):
            write_trial(writer, KEY, number, [0.5, 0.4], f"a{number}")
            before = shown(read_study(tmp_path))
            assert compact(tmp_path).rows == 3
            assert shown(read_study(tmp_path)) == before
            assert len(list((tmp_path / "tables").glob("eval-*.parquet"))) <= 2
    assert len(read_study(tmp_path)[KEY].trials) == 7
    assert [name for name in files(tmp_path / "tables") if "manifest" in name] == [
        "manifest.7.json"
    ]


def test_rows_read_twice_count_once(tmp_path):
    """A journal whose covered bytes were forgotten is read again beside the parts."""
    write_study(tmp_path)
    before = shown(read_study(tmp_path))
    compact(tmp_path)
    path = store.manifest_path(tmp_path, 1)
    content = json.loads(path.read_text())
    content["covered"] = {}
    path.write_text(json.dumps(content))
    assert shown(read_study(tmp_path)) == before
    compact(tmp_path)
    assert shown(read_study(tmp_path)) == before


def test_archived_journals_hold_every_row(tmp_path):
    write_study(tmp_path)
    before = shown(read_study(tmp_path))
    lines = {path.stem: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    with StudyWriter(tmp_path / "rows" / "runner-1.jsonl"):
        assert compact(tmp_path, archive=True).archived == 1
    assert compact(tmp_path, archive=True).archived == 1
    assert shown(read_study(tmp_path)) == before
    for path in (tmp_path / "rows").iterdir():
        assert path.suffix == ".gz"
        assert gzip.decompress(path.read_bytes()) == lines[path.name.split(".")[0]]
    # The tables can be made again from them.
    for path in (tmp_path / "tables").iterdir():
        path.unlink()
    assert shown(read_study(tmp_path)) == before
    compact(tmp_path)
    assert shown(read_study(tmp_path)) == before


def test_a_runner_goes_on_after_its_journal_was_archived(tmp_path):
    write_study(tmp_path)
    compact(tmp_path, archive=True)
    with StudyWriter(tmp_path / "rows" / "runner-1.jsonl") as writer:
        writer.evaluation(OTHER, 0, evaluation(3, 0.125), attempt="ee", segment=1)
    compact(tmp_path, archive=True)
    assert [e.step for e in read_study(tmp_path).curve(OTHER, 0).evaluations] == [0, 1, 2, 3]
    assert len(files(tmp_path / "rows")) == 3


def test_of_two_compactions_at_once_one_counts(tmp_path, monkeypatch):
    write_study(tmp_path)
    before = shown(read_study(tmp_path))
    real = columnar._write_parts

    def slow(connection, directory, manifest, fresh):
        monkeypatch.setattr(columnar, "_write_parts", real)
        assert not compact(directory).overtaken
        return real(connection, directory, manifest, fresh)

    monkeypatch.setattr(columnar, "_write_parts", slow)
    assert compact(tmp_path).overtaken
    assert shown(read_study(tmp_path)) == before
    assert len(list((tmp_path / "tables").glob("eval-*.parquet"))) == 1


class Killed(BaseException):
    """Stands for a kill: nothing may be tidied up after it that a kill would leave."""


def test_a_stop_anywhere_loses_nothing(tmp_path, monkeypatch):
    """Every file operation of a compaction in turn is the one that does not happen any more."""
    calls = 0
    last = 10**9

    def counted(real):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            # After a kill nothing else happens either.
            if calls >= last:
                raise Killed
            return real(*arguments, **options)

        return call

    for module, name in (
        (os, "link"),
        (os, "fsync"),
        (Path, "rename"),
        (Path, "unlink"),
        (Path, "open"),
        (Path, "mkdir"),
        (columnar, "write_parquet"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    write_study(tmp_path)
    expected = shown(read_study(tmp_path))
    stop = 0
    while True:
        stop += 1
        calls, last = 0, stop
        try:
            compact(tmp_path, archive=True)
        except Killed:
            last = 10**9
            assert shown(read_study(tmp_path)) == expected
            continue
        finally:
            last = 10**9
        break
    assert stop > 25
    assert shown(read_study(tmp_path)) == expected
    assert compact(tmp_path, archive=True).rows == 0
    left = {name.split("-")[0] for name in files(tmp_path / "tables")}
    assert left == {*statements.KINDS, "views.sql", "manifest.1.json"}
    assert len(files(tmp_path / "tables")) == len(left)
    assert len(files(tmp_path / "rows")) == 2


@pytest.mark.processes
def test_killed_compactions_lose_nothing(tmp_path):
    with StudyWriter(tmp_path / "rows" / "r.jsonl") as writer:
        for number in range(40):
            write_trial(writer, KEY, number, [0.5] * 50, f"a{number}")
    expected = shown(read_study(tmp_path))
    code = textwrap.dedent("""
        import sys
        from shoal.ledger import columnar, store
        store.connect(store.Path("."))  # so that the kill falls into the work, not into imports
        print("ready", flush=True)
        while True:
            print(columnar.compact(sys.argv[1]).number, flush=True)
            with open(sys.argv[1] + "/rows/s.jsonl", "a") as file:
                file.write('{"kind":"note"}\\n')
    """)
    for i in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            for _ in range(1 + i):
                assert process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        assert shown(read_study(tmp_path)) == expected


def test_duckdb_reads_the_tables_without_shoal(tmp_path):
    write_study(tmp_path)
    compact(tmp_path)
    code = textwrap.dedent(f"""
        import sys
        import duckdb
        connection = duckdb.connect()
        connection.execute(open("views.sql").read())
        print(connection.execute(
            "SELECT curve, global_batch, repeat, trial, attempt, step, value, kind, diverged "
            "FROM evaluations WHERE metric = '{ERROR}' ORDER BY ALL"
        ).fetchall())
        print(connection.execute(
            "SELECT search, trial, outcome, end_step, engine, parameters['lr'] FROM trials ORDER BY ALL"
        ).fetchall())
        print(connection.execute('SELECT search, state, "end", draws FROM searches').fetchall())
        print(connection.execute("SELECT count(*) FROM samples").fetchall())
        print("shoal" in sys.modules, "torch" in sys.modules)
    """)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "tables", capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    evaluations, trials, searches, samples, modules = ran.stdout.splitlines()
    sgd, nesterov = ("sgd", 8, 0), ("nesterov", 16, 1)
    assert evaluations == repr(
        [
            (*nesterov, 0, "ee", 0, 0.8, "=", False),
            (*nesterov, 0, "ee", 1, None, "inf", False),
            (*nesterov, 0, "ee", 2, None, "-inf", False),
            (*sgd, 0, "aa", 0, 0.9, "=", False),
            (*sgd, 0, "aa", 1, 0.5, "=", False),
            (*sgd, 0, "aa", 2, 0.3, "=", False),
            (*sgd, 0, "aa", 3, 0.4, ">=", False),
            (*sgd, 1, "dd", 0, 0.9, "=", False),
            (*sgd, 1, "dd", 1, 0.6, "=", False),
            (*sgd, 2, "cc", 0, 0.9, "=", False),
            (*sgd, 2, "cc", 1, None, "nan", False),
        ]
    )
    assert trials == repr(
        [
            ("nesterov-b16-r1", 0, None, None, "pool", 0.1),
            ("sgd-b8-r0", 0, "not_reached", 2, "pool", 0.1),
            ("sgd-b8-r0", 1, "not_reached", 1, "pool", 0.2),
            ("sgd-b8-r0", 2, "diverged", 1, "pool", 0.30000000000000004),
        ]
    )
    assert searches == repr([("sgd-b8-r0", "done", 3, 3)])
    assert samples == "[(1,)]"
    assert modules == "False False"


def test_views_of_a_study_with_no_rows_of_some_kinds(tmp_path):
    import duckdb

    with StudyWriter(tmp_path / "rows" / "r.jsonl") as writer:
        write_trial(writer, KEY, 0, [0.5], "aa")
    compact(tmp_path)
    with duckdb.connect() as connection:
        tables = str(tmp_path / "tables")
        connection.execute(f"SET file_search_path = '{tables}'")
        connection.execute((tmp_path / "tables" / "views.sql").read_text())
        assert connection.execute("SELECT count(*) FROM evaluations").fetchall() == [(2,)]
        assert connection.execute("SELECT count(*) FROM searches").fetchall() == [(0,)]


def test_a_damaged_journal_is_named_and_nothing_changed(tmp_path):
    write_study(tmp_path)
    compact(tmp_path)
    path = tmp_path / "rows" / "runner-0.jsonl"
    count = path.read_bytes().count(b"\n")
    with path.open("a") as file:
        file.write("garbage\n")
    before = files(tmp_path / "tables")
    with pytest.raises(UsageError, match=rf"runner-0\.jsonl, line {count + 1}"):
        compact(tmp_path)
    assert files(tmp_path / "tables") == before
