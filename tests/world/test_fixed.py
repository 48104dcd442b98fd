"""A world of fixed size over torch.distributed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from toy import Toy, Trainer, rows

from shoal.errors import ShoalError, UsageError
from shoal.testing.processes import Child, ChildFailed, Herd
from shoal.world.elastic.transport import state_hash
from shoal.world.fixed import FixedWorld

pytestmark = pytest.mark.processes


def train(
    directory: Path,
    rank: int,
    size: int,
    port: int,
    *,
    steps: int = 20,
    offer: int = -1,
    ballast: int = 0,
    leave_at: int = -2,
    die_at: int = -2,
) -> dict[str, object]:
    """The body of a worker process."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    world = FixedWorld.from_environment(timeout_seconds=30)
    toy = Toy(seed=rank + 1, offer=offer, ballast=ballast)
    trainer = Trainer(world, toy, directory / f"w{rank}.steps", pause_seconds=0.0)
    try:
        while toy.cursor < size * steps and not world.left:
            if toy.commits == leave_at:
                world.request_leave()
            if toy.commits == die_at:
                os._exit(9)
            trainer.step()
        toy.check()
        return {
            "commits": toy.commits,
            "hash": state_hash(toy.tree()),
            "left": world.left,
            "survivors": world.survivors,
            "bootstraps": toy.bootstraps,
            "restores": toy.restores,
            "ballast": toy.ballast[-1].item() if ballast else None,
        }
    finally:
        world.close()
        world.close()


def start(tmp_path: Path, herd: Herd, options: list[dict]) -> list[Child]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [
        herd.start(train, tmp_path, rank, len(options), port, name=f"w{rank}", **option)
        for rank, option in enumerate(options)
    ]


def test_all_take_the_state_of_the_newest_checkpoint(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        # More than one piece of the broadcast, and a last one that is not full.
        options = [{"offer": offer, "ballast": 9_000_001} for offer in (-1, 5, 5)]
        results = [child.result(60) for child in start(tmp_path, herd, options)]
    assert [r["bootstraps"] for r in results] == [0, 1, 0]
    assert [r["restores"] for r in results] == [1, 0, 1]
    assert len({r["hash"] for r in results}) == 1
    assert {r["ballast"] for r in results} == {2.0}
    assert results[0]["commits"] == 5 + 20


def test_one_that_wants_to_leave_stops_all_at_one_step(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        options = [{}, {"leave_at": 7}]
        results = [child.result(60) for child in start(tmp_path, herd, options)]
    assert [r["commits"] for r in results] == [8, 8]
    assert all(r["left"] and r["survivors"] == 0 for r in results)


def test_a_lost_worker_ends_the_run_with_advice(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        children = start(tmp_path, herd, [{}, {"die_at": 7}])
        with pytest.raises(ChildFailed, match=r"worker was lost.*--resume"):
            children[0].result(60)
        assert max(row["commits"] for row in rows(tmp_path, "w0")) in (6, 7)


def test_alone(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        (result,) = [child.result(60) for child in start(tmp_path, herd, [{}])]
    assert result["bootstraps"] == 1 and result["commits"] == 20


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        FixedWorld.from_environment()


def test_a_failed_exchange_cannot_be_settled(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = FixedWorld()
        world.attach(Toy(seed=1))
        membership = world.start_step()
        assert membership.names == ("rank0",) and membership.token
        assert world.start_step() is membership
        with pytest.raises(ShoalError, match="--resume"):
            world.settle(None)
        world.close()
        assert torch.distributed.is_initialized(), "it was not this world's to end"
    finally:
        torch.distributed.destroy_process_group()
