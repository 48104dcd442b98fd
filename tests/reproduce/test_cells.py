"""Finished cells survive a stop, and cells of other settings do not mix in."""

import json
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.reproduce.cells import Cells


def test_a_kept_cell_is_read_back(tmp_path: Path) -> None:
    store = Cells(directory=tmp_path / "long", settings={"lr": 0.1, "seeds": (1, 2)})
    assert store.read("a-1") is None
    assert not (tmp_path / "long").exists()
    store.keep("a-1", {"accuracy": 90.5, "spike": float("inf")})
    assert store.read("a-1") == {"accuracy": 90.5, "spike": None}
    assert store.read("a-2") is None
    assert [path.name for path in (tmp_path / "long").iterdir()] == ["a-1.json"]


def test_other_settings_are_refused_with_the_file_and_the_fix(tmp_path: Path) -> None:
    Cells(directory=tmp_path, settings={"lr": 0.1}).keep("a-1", {"accuracy": 1.0})
    other = Cells(directory=tmp_path, settings={"lr": 0.2})
    with pytest.raises(UsageError, match=r"a-1\.json was made with other settings.*--out"):
        other.read("a-1")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"values": {}}', "null"])
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a-1.json").write_text(content)
    with pytest.raises(UsageError, match="unreadable"):
        Cells(directory=tmp_path, settings={}).read("a-1")


def test_what_a_kill_leaves_behind_does_not_count_as_finished(tmp_path: Path) -> None:
    store = Cells(directory=tmp_path, settings={})
    store.keep("a-1", {"accuracy": 1.0})
    whole = store.path("a-1").read_text()
    store.path("a-1").unlink()
    (tmp_path / ".a-1.json.99.partial").write_text(whole[: len(whole) // 2])
    assert store.read("a-1") is None
    store.keep("a-1", {"accuracy": 2.0})
    assert json.loads(store.path("a-1").read_text())["values"] == {"accuracy": 2.0}
