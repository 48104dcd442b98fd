"""``shoal run`` with workers that really train: joins, leaves, kills, hangs, a drain and a resume.

The model has one weight per sample and the loss of a batch is minus the sum of its samples' weights; a
step's units add up to 1 and the learning rate is 1, so each weight ends as the number of times its sample
was trained. Exactly-once is read from there, and from the summary.
"""

import json
import signal

import pytest
from supervised import Run, until

from shoal.cli import main
from shoal.errors import UsageError
from shoal.fleet.supervisor.rundir import find_control
from shoal.ledger.journal import read

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES = 64
TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
import shoal

here, name, epochs = Path(__file__).parent, os.environ["SHOAL_WORKER"], {epochs}

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        # Everybody but who starts the run begins with wrong weights: they have to be given the state.
        self.weight = nn.Parameter(torch.full(({samples},), 1000.0 * (name != "w0"), dtype=torch.float64))

    def forward(self, numbers):
        return -self.weight[numbers].sum()

def first_of_step(batch):
    order = shoal.data.Order(n={samples}, seed=0, epoch=fleet.epoch)
    at = fleet.samples_seen % {samples}
    return float(int(batch[0]) == int(order.take(at, at + 1)[0]))

def body(): pass
def between(epoch): pass
{more}
model = Counter()
fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
for epoch in fleet.epochs(epochs):
    for batch in fleet.batches(torch.arange({samples}), local_batch=4):
        fleet.backward(model(batch), reduction="sum", weight=first_of_step(batch))
        body()
        fleet.step()
    between(epoch)
fleet.save(here / "model.safetensors")
(here / f"end-{{name}}").write_text(json.dumps(model.weight.tolist()))
"""


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(script, *options, **more):
        runs.append(Run(tmp_path, script, *options, **more))
        return runs[-1]

    yield start
    for one in reversed(runs):
        one.close()


def script(epochs, more):
    return TRAIN.format(epochs=epochs, samples=SAMPLES, more=more)


def codes(one):
    return {row["worker"]: (row["code"], row["reason"]) for row in one.events("worker_exited")}


def finished(one, epochs, *names):
    """The run's summary, once it is certain that each sample was trained once an epoch."""
    assert one.wait(120.0) == 0, one.out + one.err
    for name in names:
        weights = json.loads((one.directory / f"end-{name}").read_text())
        assert weights == [float(epochs)] * SAMPLES
    summary = json.loads((one.run_dir / "summary.json").read_text())
    n = epochs * SAMPLES
    assert (summary["samples_expected"], summary["samples_used"]) == (n, n)
    assert (summary["samples_repeated"], summary["samples_missed"]) == (0, 0)
    assert summary["restarts_of_survivors"] == 0
    return summary


def test_resize_another_machine_a_notice_a_drain_and_a_resume(run, tmp_path, capsys):
    slow = "def body():\n    time.sleep(0.0 if (here / 'hurry').exists() else 0.1)\n"
    train = script(100, slow)
    notice = tmp_path / "notice"
    one = run(train, "--workers", "2", "--notice-file", str(notice), "--checkpoint-every", "0.5")
    one.until_at_work("w0", "w1")
    # Two more at once: one here, one from "another machine".
    assert main(["resize", str(one.run_dir), "3"]) == 0
    address, token = find_control(str(one.run_dir))
    far = run(
        train, "--join", address, run_dir=tmp_path / "far", environment={"SHOAL_TOKEN": token}
    )
    one.until_at_work("w0", "w1", "w2", "x3")
    until(lambda: any(e["workers_after"] == 4 for e in one.events("join")), "all four together")
    # The newest leaves first, and has nothing left to do there.
    assert main(["resize", str(one.run_dir), "3"]) == 0
    assert "workers 4 → 3" in capsys.readouterr().out
    assert far.wait() == 0
    assert codes(one) == {"x3": (0, "elsewhere")}
    # A spot notice for one of the others.
    (tmp_path / "draft").write_text("w2")
    (tmp_path / "draft").rename(notice)
    until(lambda: codes(one).get("w2") == (0, "left"), "the leave of w2")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 75
    assert {codes(one)[name][1] for name in ("w0", "w1")} == {"stopped"}
    # It spoke last, so that everything was written here; what it did is known here all the same.
    rows = read(one.run_dir / "metrics" / "x3.jsonl")
    assert rows == read(far.run_dir / "metrics" / "x3.jsonl")
    assert {row["rank"] for row in rows} <= {2, 3}
    assert not (far.run_dir / "checkpoints").exists()
    # One of the two may hear of the drain a step before the other, which then makes that step alone.
    rows = [row for name in ("w0", "w1") for row in read(one.run_dir / "metrics" / f"{name}.jsonl")]
    steps = max(row["step"] for row in rows)
    assert (one.run_dir / "checkpoints" / f"step-{steps:012d}").is_dir()
    (tmp_path / "hurry").touch()
    again = run(train, "--workers", "2", "--resume")
    summary = finished(again, 100, "w4", "w5")
    assert summary["steps"] > steps
    kinds = {(e["kind"], *e["names"]) for e in summary["events"]}
    assert {("leave", "x3"), ("leave", "w2")} <= kinds
    assert (tmp_path / "model.safetensors").exists()


def test_a_script_of_joins_leaves_kills_and_a_coordinators_crash(run, tmp_path):
    # Slow until all three are there, so that the marks below are certain to come after that.
    more = (
        "def body():\n"
        "    if fleet.workers == 3:\n"
        "        (here / 'wide').touch()\n"
        "    time.sleep(0.005 if (here / 'wide').exists() else 0.1)\n"
    )
    events = """
    [[event]]
    at_step = 5
    join = 1
    [[event]]
    at_step = 220
    kill = 1
    name = "w0"
    [[event]]
    at_step = 240
    kill_coordinator = true
    [[event]]
    at_step = 300
    leave = 1
    """
    (tmp_path / "script.toml").write_text(events)
    one = run(script(60, more), "--workers", "2", "--script", str(tmp_path / "script.toml"))
    summary = finished(one, 60, "w1")
    assert codes(one) == {"w0": (-9, "script"), "w2": (0, "left"), "w1": (0, "finished")}
    assert len(one.events("coordinator_restarted")) == 1
    changes = [
        (e["kind"], e["workers_before"], e["workers_after"], e["names"]) for e in summary["events"]
    ]
    assert changes == [
        ("join", 2, 3, ["w2"]),
        ("kill", 3, 2, ["w0"]),
        ("leave", 2, 1, ["w2"]),
    ]
    assert summary["respawns"] == 0


def test_only_who_hangs_is_killed(run, tmp_path):
    """Not its victim, nor who is busy between epochs, nor who waits below the least number of workers.

    For that the first replacement takes longer to come than a hang is allowed to last.
    """
    more = (
        "started = float(Path(f'/proc/{os.getpid()}').stat().st_ctime)\n"
        "while name == 'w2' and time.time() < started + 3.6:\n"
        "    time.sleep(0.05)\n"
        "def body():\n"
        "    time.sleep(0.02)\n"
        "    while name == 'w1' and fleet.step_count == 10:\n"
        "        pass\n"
        "def between(epoch):\n"
        "    time.sleep(4.0 if epoch == 3 else 0.0)\n"
    )
    (tmp_path / "script.toml").write_text("[[event]]\nat_step=60\nhang=1\nname='w2'")
    options = ["--workers", "2:2", "--hang-seconds", "3"]
    one = run(script(12, more), *options, "--script", str(tmp_path / "script.toml"))
    finished(one, 12, "w0", "w3")
    assert [(h["worker"], h["phase"]) for h in one.events("hang")] == [
        ("w1", "compute"),
        ("w2", "silent"),
    ]
    assert codes(one) == {
        "w0": (0, "finished"),
        "w1": (-9, "hang"),
        "w2": (-9, "hang"),
        "w3": (0, "finished"),
    }


def test_who_waits_to_be_let_in_and_is_not_needed_any_more_never_joins(run):
    more = (
        "def between(epoch):\n"
        "    while epoch == 1 and not (here / 'on').exists():\n"
        "        time.sleep(0.05)\n"
    )
    one = run(script(4, more), "--workers", "1")

    def is_between():
        try:
            (w0,) = one.control("status")["members"]
        except (UsageError, OSError, ValueError):
            return False  # not up yet
        return (w0.get("phase"), w0.get("epoch")) == ("user", 2)

    until(is_between, "w0 between two epochs")
    assert main(["resize", str(one.run_dir), "2"]) == 0
    until(lambda: one.control("watch", name="w0", seen=-1)["joins"], "w1 at the door")
    assert main(["resize", str(one.run_dir), "1"]) == 0
    until(lambda: codes(one) == {"w1": (0, "left")}, "the end of w1")
    (one.directory / "on").touch()
    summary = finished(one, 4, "w0")
    assert summary["events"] == []
