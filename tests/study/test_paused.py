"""Paused searches: whole or absent, wherever the file is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.study.paused import Paused, clear, put_aside, take_up


def paused(segment: int, value: float) -> Paused:
    return Paused(
        segment=segment,
        facts={"steps": [1, 2], "value": value},
        tensors={"3/p/w": torch.full((2, 3), value)},
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    assert take_up(tmp_path) is None
    put_aside(tmp_path / "s", paused(0, 1.5))
    back = take_up(tmp_path / "s")
    assert back is not None
    assert back.segment == 0 and back.facts == {"steps": [1, 2], "value": 1.5}
    assert list(back.tensors) == ["3/p/w"]
    assert torch.equal(back.tensors["3/p/w"], torch.full((2, 3), 1.5))


def test_without_tensors(tmp_path: Path) -> None:
    put_aside(tmp_path, Paused(segment=2, facts={}, tensors={}))
    back = take_up(tmp_path)
    assert back is not None and not back.tensors and back.segment == 2


def test_a_file_cut_at_any_byte_counts_as_absent(tmp_path: Path) -> None:
    whole = put_aside(tmp_path, paused(0, 1.0)).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "1.safetensors").write_bytes(whole[:cut])
        back = take_up(tmp_path)
        assert back is not None and back.segment == 0


def test_a_new_segment_replaces_the_old_one(tmp_path: Path) -> None:
    put_aside(tmp_path, paused(0, 1.0))
    put_aside(tmp_path, paused(1, 2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["1.safetensors"]
    # A stopped owner that wakes up late does not win.
    put_aside(tmp_path, paused(0, 1.0))
    back = take_up(tmp_path)
    assert back is not None and back.facts["value"] == 2.0
    clear(tmp_path)
    assert take_up(tmp_path) is None


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_aside(tmp_path, paused(0, 1.0))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.study.paused.save_file", full)
    with pytest.raises(OSError, match="No space"):
        put_aside(tmp_path, paused(1, 2.0))
    back = take_up(tmp_path)
    assert back is not None and back.segment == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]
