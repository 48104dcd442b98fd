"""A fleet of real processes under a test's control, training a model whose weights count samples.

The model is linear with one weight per sample, the loss of sample i is -w[i], so its gradient is a
one-hot vector: with lr x global batch per sample, the weights end as the number of times each sample was
trained. Exactly-once is thus read from what was learned, not from a log.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.testing import processes
from shoal.testing.links import BoardLink
from shoal.world.elastic.timing import Timing
from shoal.world.elastic.world import ElasticWorld


class Counter(nn.Module):
    """One weight per sample; ``forward`` of sample numbers is their negative sum."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.weight[numbers].sum()


def state_hash(fleet: shoal.Fleet) -> str:
    """A hash of everything a joiner would receive."""
    from shoal.world.elastic.transport import state_hash as hashed

    return hashed(fleet._replica.snapshot())


def train(
    board: str,
    slot: int,
    *,
    samples: int,
    epochs: int,
    local_batch: int,
    micro_batch: int | None = None,
    policy: str = "proportional",
    pause_seconds: float = 0.002,
    leave_at: int | None = None,
    die_at: int | None = None,
    hang_at: int | None = None,
    die_in_evaluation: int | None = None,
    evaluate: bool = True,
    timing: Mapping[str, Any] | None = None,
    scaling: Any = None,
) -> dict[str, Any]:
    """One worker's whole life; tells (step, samples) every few steps and returns its end."""
    torch.set_num_threads(1)
    torch.manual_seed(slot)
    processes.tell("up")
    link = BoardLink(board, slot=slot)
    world = ElasticWorld(link, timing=Timing(**{"patience_seconds": 30.0, **dict(timing or {})}))
    model = Counter(samples)
    with torch.no_grad():
        model.weight += slot  # joiners must take over weights, not keep their own
    if slot == 0:
        nn.init.zeros_(model.weight)
    # lr times global batch is 1: the multiplier of Linear at reference 1 is the global batch.
    rule = scaling or shoal.scaling.Linear(reference_batch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fleet = shoal.init(model, optimizer, scaling=rule, batch_policy=policy, world=world)
    numbers = torch.arange(samples)
    trace: list[tuple[int, int, int, float]] = []
    calls = 0

    def count(_: nn.Module, batch: torch.Tensor) -> dict[str, tuple[float, int]]:
        nonlocal calls
        calls += 1
        if die_in_evaluation is not None and calls > die_in_evaluation:
            os.kill(os.getpid(), 9)
        time.sleep(pause_seconds)
        return {"mean": (batch.double().sum().item(), len(batch))}

    scores: list[float] = []
    for _ in fleet.epochs(epochs):
        for batch in fleet.batches(numbers, local_batch=local_batch, micro_batch=micro_batch):
            fleet.backward(model(batch), reduction="sum")
            if die_at is not None and fleet.step_count >= die_at:
                os.kill(os.getpid(), 9)
            if hang_at is not None and fleet.step_count >= hang_at:
                processes.tell("hung")
                os.kill(os.getpid(), 19)
            if leave_at is not None and fleet.step_count >= leave_at:
                world.request_leave()
            time.sleep(pause_seconds)
            if fleet.step():
                trace.append((fleet.step_count, fleet.samples_seen, fleet.workers, fleet.lr))
                processes.tell(trace[-1])
        if evaluate:
            scores.append(fleet.evaluate(numbers, count, local_batch=max(1, samples // 7))["mean"])
    result = {
        "weight": model.weight.detach().tolist(),
        "hash": state_hash(fleet),
        "trace": trace,
        "scores": scores,
        "samples_seen": fleet.samples_seen,
        "step": fleet.step_count,
    }
    fleet.close()
    return result


def digest(result: Mapping[str, Any]) -> str:
    """A short name of what was learned, for comparing workers in messages."""
    return hashlib.sha256(repr(result["weight"]).encode()).hexdigest()[:8]


def board_path(directory: Path) -> str:
    """Where the board of a test lies."""
    return str(directory / "board")
