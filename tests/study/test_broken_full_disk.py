"""A disk that is full in mid-run: one line that says so, nothing lost, and the same command goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.ledger.journal import read
from shoal.study.run import open_study
from shoal.study.runner import main
from shoal.study.runners import FULL_DISK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SPEC = """
name = "full"
workload = "digits_tiny"
global_batches = [32]
repeats = 1
[budget]
trials = 4
draw_limit = 8
max_steps = 120
full = true
[grid]
ratio = 1.02
[[goals]]
metric = "val/cross_entropy_error"
value = 0.3
[curves.sgd.space]
lr = { scale = "log", min = 3e-2, max = 1.0 }
"""


def test_it_says_so_keeps_everything_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "full.toml").write_text(SPEC)
    command = [sys.executable, "-m", "shoal", "study", "run", str(tmp_path / "full.toml")]
    command += ["--out", str(tmp_path / "out"), "--processes", "1", "--confirm", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # No file may grow beyond this: the journal meets it among its rows, as it meets a full disk.
    limit = 12_000
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert sum("no space left" in line and "kept" in line for line in said) == 1, said
    assert "Traceback" not in done.stderr
    journals = list((tmp_path / "out" / "rows").glob("*.jsonl"))
    assert len(journals) == 1, "an attempt that cannot succeed is not repeated"
    kept = journals[0].read_bytes()
    assert kept.endswith(b"\n") and len(read(journals[0])) > 10

    assert main([str(tmp_path / "out"), "--runner", "second"]) == 0
    assert journals[0].read_bytes() == kept
    directory, spec = open_study(tmp_path / "out")
    assert all(directory.end_of(key) is not None for key in spec.searches())


def test_a_log_without_room_does_not_change_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "full.toml").write_text(SPEC)
    from shoal.study.directory import StudyDirectory
    from shoal.study.run import begin
    from shoal.study.spec_file import load_spec

    begin(StudyDirectory(tmp_path / "out"), load_spec(tmp_path / "full.toml"), confirm_seeds=0)
    with Path("/dev/full").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "shoal.study.runner", str(tmp_path / "out"), "--runner", "only"],
            stdout=log, stderr=log, timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000)),
        )  # fmt: skip
    assert done.returncode == FULL_DISK
