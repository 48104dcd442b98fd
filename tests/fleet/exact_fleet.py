"""One worker of several fleets in a row, all of which must learn the same bits (``deterministic=True``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from real_fleet import HOLD_SECONDS, ReadyLink, dawdle
from torch import nn

import shoal
from shoal.testing import processes
from shoal.world.contract import World
from shoal.world.elastic.timing import Timing
from shoal.world.elastic.world import ElasticWorld

SAMPLES, EPOCHS, GLOBAL_BATCH, MICRO_BATCH = 297, 3, 24, 3


def in_turn(board: str, slot: int, sizes: Sequence[int], slow_seconds: float) -> None:
    """Be part of fleets of ``sizes`` workers one after the other; tells ``(size, what it learned)``.

    The board of the fleet of k workers is ``{board}{k}``; smaller fleets than ``slot`` + 1 go by without
    this worker. The last fleet, on ``board``, changes: the test says when this worker enters it.
    """
    timing = Timing(patience_seconds=60.0)
    for size in sizes:
        if slot < size:
            link = ReadyLink(f"{board}{size}", slot=slot)
            processes.tell((size, learn(ElasticWorld(link, timing=timing, min_workers=size))))
    processes.tell("waiting")
    processes.hear(120.0)
    world = ElasticWorld(ReadyLink(board, slot=slot), timing=timing)
    processes.tell(("changing", learn(world, board, slow_seconds)))


def learn(world: World, board: str = "", slow_seconds: float = 0.0) -> dict[str, Any]:
    """Train a small classifier with BatchNorm, dropout, momentum and clipping, in exact sums.

    Of a step's 8 micro-batches three workers get 3, 3 and 2. An epoch ends with a step of 9 samples, 3
    micro-batches, which leaves the fourth worker idle.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 12, generator=generator)
    y = (x @ torch.randn(12, 4, generator=generator)).argmax(1)
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    fleet = shoal.init(
        model,
        optimizer,
        batch_policy=f"constant:{GLOBAL_BATCH}",
        deterministic=True,
        schedule=shoal.schedules.cosine(warmup_samples=100),
        world=world,
    )
    before = digest(model.state_dict())
    members: list[int] = []
    for _ in fleet.epochs(EPOCHS):
        batches = fleet.batches((x, y), local_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
        for inputs, labels in batches:
            fleet.backward(nn.functional.cross_entropy(model(inputs), labels))
            fleet.clip_grad_norm_(1.0)
            if board and isinstance(world, ElasticWorld):
                late = fleet.samples_seen > SAMPLES * EPOCHS // 2
                dawdle(board, world, slow_seconds, HOLD_SECONDS if late else 0.0)
            if fleet.step():
                members.append(fleet.workers)
                if board:
                    processes.tell((fleet.step_count, fleet.workers))
    learned = {
        "weights": digest(model.state_dict()),
        "momentum": digest(
            {str(i): s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}
        ),
        "members": members,
        "trained": digest(model.state_dict()) != before,
        "samples": fleet.samples_seen,
    }
    fleet.close()
    torch.use_deterministic_algorithms(False)
    return learned


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of every bit."""
    word = hashlib.sha256()
    for name, tensor in tensors.items():
        word.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return word.hexdigest()
