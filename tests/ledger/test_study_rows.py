"""Runners' rows: every byte of a journal may be the last, writers may be killed, none loses a row."""

import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_study import KEY, evaluation, shown, trial, write_study

from shoal.errors import UsageError
from shoal.ledger import journal
from shoal.ledger.study_rows import StudyWriter, packed, unpacked
from shoal.study.tables import read_study

EVALUATIONS = 500

# Writes rows of its own search and says each number once it is on file.
WRITER = """
import sys
from shoal.ledger.study_rows import StudyWriter
from shoal.study.records import Evaluation, Measured, SearchKey, Trial
path, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
key = SearchKey(curve="sgd", global_batch=2**number, repeat=0)
with StudyWriter(path) as writer:
    writer.trial(
        Trial(search=key, id=0, unit=(0.5,), parameters={"lr": 0.1}, seed=1, address="a"),
        attempt="a", engine="pool",
    )
    for step in range(count):
        metrics = {"val/classification_error": Measured(1 / (1 + step))}
        writer.evaluation(key, 0, Evaluation(step=step, metrics=metrics), attempt="a")
        print(step, flush=True)
"""


def start(directory, number, count):
    path = directory / "rows" / f"runner-{number}.jsonl"
    command = [sys.executable, "-c", WRITER, str(path), str(number), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_runner_goes_on_in_its_own_file(tmp_path):
    path = tmp_path / "rows" / "runner-0.jsonl"
    for step in (0, 1):
        with StudyWriter(path) as writer:
            writer.evaluation(KEY, 0, evaluation(step, 0.5), attempt="aa")
    assert [row["kind"] for row in journal.read(path)] == ["journal", "eval", "eval"]


def test_rows_say_what_the_study_says(tmp_path):
    path = tmp_path / "rows" / "runner-0.jsonl"
    with StudyWriter(path) as writer:
        writer.trial(trial(KEY, 3), attempt="aa", engine="vmap", segment=2)
        writer.evaluation(KEY, 3, evaluation(7, 0.5, ">=", True), attempt="aa", segment=2)
        writer.search(KEY, "short", end=None, draws=9, segment=2)
    rows = journal.read(path)
    for row in rows:
        assert isinstance(row.pop("time"), float)
    assert rows[1:] == [
        {
            "kind": "trial",
            "search": "sgd-b8-r0",
            "curve": "sgd",
            "global_batch": 8,
            "repeat": 0,
            "trial": 3,
            "address": "0003",
            "attempt": "aa",
            "segment": 2,
            "seed": 2**62 + 3,
            "engine": "vmap",
            "unit": [0.25, 0.5],
            "parameters": {"lr": 0.4, "momentum": 0.9},
        },
        {
            "kind": "eval",
            "search": "sgd-b8-r0",
            "trial": 3,
            "attempt": "aa",
            "segment": 2,
            "step": 7,
            "diverged": True,
            "metrics": {"val/classification_error": 0.5},
            "bounds": {"val/classification_error": ">="},
        },
        {
            "kind": "search",
            "search": "sgd-b8-r0",
            "curve": "sgd",
            "global_batch": 8,
            "repeat": 0,
            "segment": 2,
            "state": "short",
            "end": None,
            "draws": 9,
            "goals": [],
        },
    ]


@pytest.mark.parametrize("name", ["a.b.jsonl", "a b.jsonl", "rows.json", ".jsonl"])
def test_a_runners_name_is_checked(tmp_path, name):
    with pytest.raises(UsageError, match="runner"):
        StudyWriter(tmp_path / name)


@given(st.lists(st.booleans(), max_size=40))
def test_samples_come_back(wrong):
    assert unpacked(packed(np.array(wrong, dtype=bool)), len(wrong)).tolist() == wrong


def test_a_cut_at_every_byte_loses_at_most_the_last_line(tmp_path):
    """The rows read are those of the whole lines, and a new writer goes on after them."""
    source = tmp_path / "whole" / "rows" / "runner-1.jsonl"
    with StudyWriter(source) as writer:
        writer.trial(trial(KEY, 3), attempt="aa", engine="vmap")
        writer.evaluation(KEY, 3, evaluation(7, math.nan, y=math.inf), attempt="aa")
        writer.outcome(KEY, 3, "diverged", 7, attempt="aa")
    content = source.read_bytes()
    target = tmp_path / "cut.jsonl"
    rows = journal.read(source)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        target.write_bytes(content[:cut])
        kept = sum(end <= cut for end in ends)
        assert repr(journal.read(target)) == repr(rows[:kept])
        tail = journal.Tail(target)
        assert repr(tail.rows()) == repr(rows[:kept])
        target.write_bytes(content)
        assert repr(tail.rows()) == repr(rows[kept:])


def test_a_study_cut_anywhere_is_the_study_of_its_whole_lines(tmp_path):
    write_study(tmp_path / "a")
    write_study(tmp_path / "b")
    path = tmp_path / "a" / "rows" / "runner-0.jsonl"
    other = tmp_path / "b" / "rows" / "runner-0.jsonl"
    (tmp_path / "b" / "rows" / "runner-1.jsonl").write_bytes(
        (tmp_path / "a" / "rows" / "runner-1.jsonl").read_bytes()
    )
    content = path.read_bytes()
    for cut in range(len(content), 0, -397):
        path.write_bytes(content[:cut])
        other.write_bytes(content[: content.rfind(b"\n", 0, cut) + 1])
        assert shown(read_study(tmp_path / "a")) == shown(read_study(tmp_path / "b"))


@pytest.mark.processes
def test_four_writers_and_a_reader_lose_no_row(tmp_path):
    writers = [start(tmp_path, number, EVALUATIONS) for number in range(4)]
    try:
        seen = 0
        while any(writer.poll() is None for writer in writers):
            if (tmp_path / "rows").is_dir():
                now = sum(len(c.evaluations) for data in read_study(tmp_path) for c in data.curves)
                assert now >= seen
                seen = now
            for writer in writers:
                assert writer.stdout is not None
                writer.stdout.readline()
    finally:
        for writer in writers:
            end(writer)
    tables = read_study(tmp_path)
    assert [key.global_batch for key in tables.searches] == [1, 2, 4, 8]
    for data in tables:
        assert [e.step for e in data.curves[0].evaluations] == list(range(EVALUATIONS))
        assert data.curves[0].evaluations[9].metrics["val/classification_error"] == (0.1, "=")


@pytest.mark.processes
def test_a_killed_writer_loses_nothing_it_had_written(tmp_path):
    killed, other = start(tmp_path, 0, 10**6), start(tmp_path, 1, EVALUATIONS)
    try:
        assert killed.stdout is not None
        for _ in range(300):
            said = int(killed.stdout.readline())
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        said = max([said, *(int(line) for line in killed.stdout if line.endswith("\n"))])
        assert other.stdout is not None
        other.stdout.read()
    finally:
        end(killed)
        end(other)
    first, second = read_study(tmp_path)
    steps = [e.step for e in first.curves[0].evaluations]
    assert steps == list(range(len(steps)))
    assert len(steps) > said
    assert len(second.curves[0].evaluations) == EVALUATIONS
