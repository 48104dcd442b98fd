"""The page of a run that shoal made itself: what the fleet writes is what the report reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shoal
from shoal.fleet.doctor import examine, outlook, read_run
from shoal.report import write_run_report
from shoal.report.run import load_run
from shoal.report.wording import headline
from shoal.world.virtual import VirtualEvent, VirtualWorld

SAMPLES = 400


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Two epochs on 1 -> 3 -> 2 virtual workers, with a test after each."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Linear(6, 2)
    world = VirtualWorld(
        1,
        [
            VirtualEvent(kind="join", workers=2, at_samples=120),
            VirtualEvent(kind="kill", workers=1, at_samples=600),
        ],
    )
    fleet = shoal.init(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        scaling=shoal.scaling.Dynamic(reference_batch=8),
        world=world,
        run_dir=tmp_path / "run",
    )
    for _ in fleet.epochs(2):
        for a, b in fleet.batches((x, y), local_batch=8):
            fleet.backward(torch.nn.functional.cross_entropy(model(a), b))
            fleet.step()
        fleet.evaluate((x, y), right, name="test")
    fleet.close()
    return tmp_path / "run"


def right(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


def test_the_page_tells_what_the_fleet_did(trained: Path) -> None:
    run = load_run(trained)
    rows = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    scores = [row["scores"]["accuracy"] for row in rows if row["kind"] == "evaluate"]
    text = headline(run)
    assert f"Trained {2 * SAMPLES} samples on 1 to 3 workers" in text
    assert "2 changes of membership, one unannounced" in text
    assert "every sample used exactly once per epoch" in text
    assert f"test accuracy {scores[-1]:.3g}" in text
    assert run.counts == {"used": 2 * SAMPLES, "repeated": 0, "missed": 0}
    assert run.config["local_batch"] == 8
    assert run.finished
    assert not run.notes
    assert [worker.samples for worker in run.workers] == [None]
    page = write_run_report(trained).read_text()
    assert "Linear" in page
    assert "dynamic" in page


def test_the_doctor_reads_what_the_fleet_described(trained: Path) -> None:
    assert not (trained / "run.json").exists()
    config = read_run(trained)[0]
    assert [entry.workers for entry in outlook(config)] == [1, 2, 3]
    assert [entry.global_batch for entry in outlook(config)] == [8, 16, 24]
    assert not [check for check in examine(trained) if check.name == "configuration"]


def test_the_supervisors_form_of_the_configuration_is_read_too(trained: Path) -> None:
    config = read_run(trained)[0]
    document = {"config": dict(config), "workers": "1:4", "command": ["python", "train.py"]}
    (trained / "run.json").write_text(json.dumps(document))
    wrapped = read_run(trained)[0]
    assert wrapped["workers"] == 2
    assert wrapped["workers_asked"] == "1:4"
    assert outlook(wrapped) == outlook(config)
    assert load_run(trained).config == wrapped
