"""A disk that fills up, what killed writers leave on it, and settings from the environment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_fleet import classifier, same_bits, train

import shoal
from shoal.fleet.checkpoint import Checkpoints
from shoal.ledger import journal


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it: from then on the files whose names end as given take no more bytes."""

    def fill(*endings: str) -> None:
        write = os.write

        def refuse(descriptor: int, data: bytes) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(endings):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        monkeypatch.setattr(journal.os, "write", refuse)

    return fill


@pytest.mark.parametrize(
    ("file", "name"), [("w0.jsonl", "metrics of w0"), ("events.jsonl", "events of w0")]
)
def test_a_full_disk_does_not_stop_training_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full_disk: Any, file: str, name: str
) -> None:
    full_disk(file)
    run = train(run_dir=tmp_path, evaluate=True)
    assert run.fleet.samples_seen == 200 and same_bits(run.model, train().model)
    lines = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"shoal: {name} end here (") and "training goes on" in lines[0]
    other = tmp_path / ("events.jsonl" if file == "w0.jsonl" else "metrics/w0.jsonl")
    assert len(journal.read(other)) > 2


def leftovers(run: Path, step: int) -> Path:
    """What a process that was killed while it wrote has left."""
    part = run / "checkpoints" / f".step-{step:012d}.999999.part"
    part.mkdir(parents=True)
    (part / "__0_0.distcp").write_bytes(b"half a checkpoint")
    return part


def test_half_written_parts_are_removed_at_the_next_save(tmp_path: Path) -> None:
    older, later = leftovers(tmp_path, 3), leftovers(tmp_path, 9)
    store = Checkpoints(tmp_path / "checkpoints", every_seconds=60)
    store.write(dict, 5, wait=True)
    assert not older.exists()
    assert later.exists(), "somebody may be writing it"
    store.write(dict, 10, wait=True)
    assert not later.exists() and store.newest_step() == 10


def test_half_written_parts_do_not_outlive_a_resumed_run(tmp_path: Path) -> None:
    train(run_dir=tmp_path, until=5)
    part = leftovers(tmp_path, 7)
    run = train(run_dir=tmp_path, resume=True)
    assert run.fleet.samples_seen == 200
    assert not part.exists()


@pytest.mark.parametrize("value", ["abc", "", "0", "-1", "nan"])
def test_a_cadence_from_the_environment_that_is_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SHOAL_CHECKPOINT_SECONDS", value)
    with pytest.raises(
        shoal.UsageError, match=rf"SHOAL_CHECKPOINT_SECONDS = '?{value}'?; it is .*seconds > 0"
    ):
        train(run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert train(model=classifier(), checkpoint_seconds=5, epochs=1).fleet.samples_seen == 100


def test_it_ends_a_script_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, shoal\n"
        "model = torch.nn.Linear(1, 1)\n"
        "shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SHOAL_CHECKPOINT_SECONDS": "abc"},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "shoal: SHOAL_CHECKPOINT_SECONDS = 'abc'; it is a time in seconds > 0; set it to a number, "
        "or unset it"
    ]
