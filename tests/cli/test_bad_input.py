"""A user's mistakes end in one clear line and exit 2, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.ledger import journal

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SCRIPT = str(Path(__file__).parent / "faulty.py")


def shoal_run(run_dir: Path, mistake: str, *options: str, **variables: str) -> tuple[int, str]:
    """Exit status and everything that was printed."""
    command = [sys.executable, "-m", "shoal", "run", "--run-dir", str(run_dir), *options]
    command += ["--no-report", SCRIPT, mistake]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("batch_size", "local_batch"),
        ("no_samples", "sample"),
        ("refused_rule", "SquareRoot"),
    ],
)
def test_a_mistake_in_the_loop_is_one_line_and_exit_2(
    tmp_path: Path, mistake: str, said: str
) -> None:
    status, text = shoal_run(tmp_path / "run", mistake, "--workers", "2")
    assert status == 2, text
    assert said in text
    assert "Traceback" not in text
    assert text.count("UsageError:") <= 1, "one line, not one for each worker"
    assert not (tmp_path / "run").exists(), "nothing was written"


def test_a_range_of_workers_upside_down(tmp_path: Path) -> None:
    status, text = shoal_run(tmp_path / "run", "none", "--workers", "4:1")
    assert status == 2
    assert "4:1" in text and "1:4" in text
    assert not (tmp_path / "run").exists()


def test_a_data_set_that_changes_its_length_stops_with_the_step(tmp_path: Path) -> None:
    status, text = shoal_run(tmp_path / "run", "shrinks", "--workers", "1")
    assert status == 2, text
    assert "at step" in text and "63" in text and "64" in text


def test_a_loss_that_is_not_finite_stops_all_workers_and_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    status, text = shoal_run(
        run, "not_finite", "--workers", "2", "--checkpoint-every", "0.05", EPOCHS="20"
    )
    assert status == 1, text
    assert "not finite" in text and "step 10" in text and "smaller lr" in text
    for file in (run / "metrics").glob("*.jsonl"):
        assert max(row["step"] for row in journal.read(file)) <= 10  # type: ignore[type-var]


def test_resuming(tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, text = shoal_run(run, "checkpointed", "--workers", "2")
    assert status == 0, text
    written = sorted((run / "checkpoints").glob("step-*"))
    assert len(written) == 3
    # Without --resume the directory is refused, and stays as it was.
    status, text = shoal_run(run, "checkpointed", "--workers", "1")
    assert status == 2 and "--resume" in text, text
    # Another model, data set or seed is named.
    for mistake, said in (
        ("other_model", "model = another"),
        ("other_data", "72"),
        ("other_seed", "seed"),
    ):
        status, text = shoal_run(run, mistake, "--workers", "1", "--resume", EPOCHS="5")
        assert status == 2, (mistake, text)
        assert said in text and "Traceback" not in text, (mistake, text)
    # A cut file is noticed, said, and the checkpoint before is taken.
    newest = sorted(written)[-1]
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    status, text = shoal_run(run, "checkpointed", "--workers", "3", "--resume", EPOCHS="5")
    assert status == 0, text
    assert newest.name in text and "damaged" in text
    rows = [r for f in (run / "metrics").glob("*.jsonl") for r in journal.read(f)]
    assert max(int(row["samples"]) for row in rows) == 5 * 64  # type: ignore[call-overload]
