"""A fleet that is lost as a whole goes on by itself from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.ledger import journal

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SCRIPT = str(Path(__file__).parent / "faulty.py")


def live_workers(run: Path) -> dict[str, int]:
    """Names and processes of the workers that are alive."""
    alive: dict[str, int] = {}
    path = run / "events.jsonl"
    for row in journal.read(path) if path.exists() else []:
        if row["kind"] == "worker_started":
            alive[str(row["worker"])] = int(row["pid"])  # type: ignore[call-overload]
        elif row["kind"] == "worker_exited":
            alive.pop(str(row["worker"]), None)
    return alive


def test_all_workers_killed_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "shoal", "run", "--workers", "2", "--run-dir", str(run)]
    command += ["--checkpoint-every", "0.2", "--no-report", SCRIPT, "slow"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": "100"}
    supervisor = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while len(list(run.glob("checkpoints/step-*"))) < 2:
            assert time.monotonic() < limit, "no checkpoint was written"
            assert supervisor.poll() is None
            time.sleep(0.05)
        for pid in live_workers(run).values():
            os.kill(pid, signal.SIGKILL)
        assert supervisor.wait(90) == 0
    finally:
        supervisor.kill()
        supervisor.wait()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples_used"] == summary["samples_expected"] == 6400
    assert summary["samples_repeated"] == summary["samples_missed"] == 0
    events = journal.read(run / "events.jsonl")
    resumed = [row for row in events if row["kind"] == "resume"]
    assert len(resumed) == 1 and int(resumed[0]["step"]) > 0  # type: ignore[call-overload]
