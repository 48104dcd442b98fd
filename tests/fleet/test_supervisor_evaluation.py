"""``shoal run``: a run that is stopped or killed in an evaluation makes it once it is resumed."""

import json
import os
import signal

import pytest
from supervised import Run, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TRAIN = """
import os, time
from pathlib import Path
import torch
from torch import nn
import shoal

here = Path(__file__).parent
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=torch.float64))

    def forward(self, numbers):
        return -self.weight[numbers].sum()

def first_of_step(batch):
    order = shoal.data.Order(n=64, seed=0, epoch=fleet.epoch)
    at = fleet.samples_seen % 64
    return float(int(batch[0]) == int(order.take(at, at + 1)[0]))

def trained(m, batch):
    if not (here / "hurry").exists():
        if fleet.epoch == 2 and fleet.is_primary:  # it has written its checkpoint
            (here / "evaluating").touch()
        time.sleep(0.2 if fleet.epoch == 2 else 0.0)
    return {"trained": (m.weight[batch].sum(), len(batch))}

model = Counter()
fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
for epoch in fleet.epochs(3):
    for batch in fleet.batches(torch.arange(64), local_batch=4):
        fleet.backward(model(batch), reduction="sum", weight=first_of_step(batch))
        fleet.step()
    fleet.checkpoint()
    fleet.evaluate(torch.arange(64), trained, local_batch=1)
"""


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_an_evaluation_is_not_lost(tmp_path, how):
    runs = [Run(tmp_path, TRAIN, "--workers", "2")]
    try:
        one = runs[0]
        until((tmp_path / "evaluating").exists, "the second epoch's evaluation", 120.0)
        if how == "stopped":
            one.process.send_signal(signal.SIGTERM)
            assert one.wait() == 75, one.out + one.err
        else:
            os.kill(one.process.pid, signal.SIGKILL)
            one.wait()
        assert [e["samples"] for e in one.events("evaluate")] == [64]
        (tmp_path / "hurry").touch()
        runs.append(Run(tmp_path, TRAIN, "--workers", "1", "--resume"))
        assert runs[1].wait(120.0) == 0, runs[1].out + runs[1].err
        rows = runs[1].events("evaluate")
        assert [(e["samples"], e["scores"]["trained"]) for e in rows] == [
            (64, 1.0), (128, 2.0), (192, 3.0)
        ]  # fmt: skip
        summary = json.loads((one.run_dir / "summary.json").read_text())
        assert (summary["samples_used"], summary["samples_repeated"]) == (192, 0)
    finally:
        for each in runs:
            each.close()
