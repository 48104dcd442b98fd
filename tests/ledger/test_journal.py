"""Journals survive a kill at any byte, and give back what was put in."""

import doctest
import json
import math
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.ledger.journal import Journal, decode, encode, read

ROWS = [
    {"step": 0, "loss": 1.5, "text": 'line\nend, ünïcode \u2028 and "quotes"'},
    {"step": 1, "loss": math.inf, "nested": {"a/b": [1.0, -math.inf], "~": None}},
    {"step": 2, "names": ["w0", "w1"], "empty": {}},
]


def write(path, rows):
    with Journal(path) as journal:
        for row in rows:
            journal.append(row)


def test_rows_come_back_as_they_went_in(tmp_path):
    write(tmp_path / "deep" / "rows.jsonl", ROWS)
    assert read(tmp_path / "deep" / "rows.jsonl") == ROWS


def test_a_cut_at_every_byte_loses_only_the_line_being_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, ROWS)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = ROWS[: sum(end <= cut for end in ends)]
        assert read(path) == kept
        # A new writer starts on a fresh line, whatever its predecessor left.
        write(path, [{"after": cut}])
        assert read(path) == [*kept, {"after": cut}]


def test_a_torn_line_longer_than_the_block_searched_is_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, ROWS)
    with path.open("ab") as file:
        file.write(b'{"long":"' + b"x" * 200_000)
    write(path, [{"after": 1}])
    assert read(path) == [*ROWS, {"after": 1}]


@pytest.mark.parametrize("damage", [b"\n", b"garbage\n", b"[1,2]\n", b'{"a":\n', b"\xff\xfe\n"])
def test_damage_inside_is_named_not_skipped(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n' + damage + b'{"b":2}\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 2"):
        read(path)


def test_a_missing_journal_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.jsonl")


def test_what_is_not_json_writes_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        for bad in ({"x": object()}, {"x": math.nan, "y": object()}):
            with pytest.raises(TypeError):
                journal.append(bad)
        with pytest.raises(ValueError, match="_nonfinite"):
            journal.append({"_nonfinite": {}})
    assert path.read_bytes() == b""
    with pytest.raises(ValueError, match="closed"):
        journal.append({})


def test_stored_lines_are_strict_json_with_null_for_non_finite_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, [{"loss": math.nan, "at": [math.inf]}])

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "loss": None,
        "at": [None],
        "_nonfinite": {"loss": "nan", "at/0": "inf"},
    }


def test_a_disk_that_takes_half_a_row_leaves_none_of_it(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    real = os.write
    with Journal(path) as journal:
        journal.append({"a": 1})
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="disk full"):
            journal.append({"b": 2})
        monkeypatch.undo()
        journal.append({"c": 3})
    assert read(path) == [{"a": 1}, {"c": 3}]


def test_threads_never_mix_their_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:

        def work(thread):
            for i in range(50):
                journal.append({"thread": thread, "i": i, "pad": "x" * 500})

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = read(path)
    for t in range(4):
        assert [row["i"] for row in rows if row["thread"] == t] == list(range(50))


def test_a_forked_child_cannot_write(tmp_path, monkeypatch):
    with Journal(tmp_path / "rows.jsonl") as journal:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="one writer"):
            journal.append({"a": 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_place_of_a_non_finite_number_is_never_ambiguous():
    for row in ({"": {"b": math.inf}}, {"b": math.inf, "": 1}, {"a/b": {"0": math.inf}, "a": {}}):
        assert decode(encode(row)) == row


@given(st.dictionaries(st.text().filter(lambda key: key != "_nonfinite"), json_values, max_size=4))
def test_encode_and_decode_are_inverse(row):
    line = encode(row)
    assert "\n" not in line
    assert decode(line) == row


def test_the_example_holds():
    from shoal.ledger import journal

    result = doctest.testmod(journal)
    assert result.attempted > 0
    assert result.failed == 0
