"""A virtual and a real run of one script agree to rounding."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "world"))

import real_fleet
from lighthouse import Lighthouse

from shoal import VirtualEvent, VirtualWorld
from shoal.testing.links import Board
from shoal.testing.processes import Herd

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_three_real_processes_equal_three_virtual_workers(tmp_path: Path) -> None:
    with Herd(tmp_path, {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn"}) as herd:
        lighthouse = Lighthouse(herd)
        path = str(tmp_path / "board")
        board = Board.create(path, workers=4, coordinator=lighthouse.address, ready=False)

        def start(slot: int) -> Any:
            child = herd.start(real_fleet.train_mlp, path, slot, slow_seconds=0.05, name=f"w{slot}")
            assert child.message(60) == "ready"
            return child

        workers = [start(0), start(1), start(2)]
        board.ready = True
        while workers[0].message(60)[0] < 25:
            pass
        board.ask_to_leave(2)
        workers[2].wait(60)
        joiner = start(3)
        joiner.message(60)  # its first committed step
        Path(f"{path}.hurry").touch()
        real = workers[0].result(60)
        others = [workers[1].result(60), joiner.result(60)]
    sizes = [3] + [workers for _, workers in real["members"]]
    assert sizes[-1] == 3 and 2 in sizes, "a leave and then a join took place"
    # Virtual workers follow the same changes at the same steps.
    events = []
    for step, (before, after) in enumerate(itertools.pairwise(sizes)):
        if after != before:
            kind = "join" if after > before else "leave"
            events.append(VirtualEvent(kind=kind, workers=abs(after - before), at_step=step))
    virtual = real_fleet.train_mlp(None, 0, world=VirtualWorld(3, events))
    assert virtual["members"] == real["members"]
    a, b = torch.tensor(real["after_20_steps"]), torch.tensor(virtual["after_20_steps"])
    assert (a - b).norm() <= 1e-5 * b.norm()
    # Some hundred steps with ReLU and dropout later rounding has grown, but not into another run.
    for name, value in virtual["state"].items():
        expected, found = torch.tensor(value), torch.tensor(real["state"][name])
        torch.testing.assert_close(
            found, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
        for other in others:
            assert other["state"][name] == real["state"][name], "real workers hold the same bits"
