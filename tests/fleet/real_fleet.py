"""A fleet of real processes under a test's control, training a model whose weights count samples.

The model is linear with one weight per sample and the loss of a batch is minus the sum of its samples'
weights, so each sample's gradient is a one-hot vector. The loop weights its batches so that the fleet's
gradient is their sum, not their mean (the units of a step add up to 1): with a learning rate of 1 the
weights end as the number of times each sample was trained. Exactly-once is thus read from what was
learned, not from a log.
"""

from __future__ import annotations

import hashlib
import logging
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

# In the second half of a run, until the test has nothing more to do, a step takes this much longer.
HOLD_SECONDS = 20.0


class Counter(nn.Module):
    """One weight per sample; ``forward`` of sample numbers is their negative sum.

    ``tag`` takes no part in the loss: it shows whose initial weights were taken over.
    """

    def __init__(self, samples: int, tag: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples, dtype=torch.float64))
        self.tag = nn.Parameter(torch.full((3,), float(tag)))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.weight[numbers].sum()


class ReadyLink(BoardLink):
    """Says when its worker stands at the start barrier, its heartbeats already running."""

    def ready(self) -> None:
        processes.tell("ready")
        super().ready()


class FailsOnce:
    """A world's reduction that succeeded for all, but that this worker alone saw fail."""

    def __init__(self, world: ElasticWorld) -> None:
        self._world = world

    def wait(self) -> None:
        raise self._world._fail(RuntimeError("seen by one member only"))


def state_hash(fleet: shoal.Fleet) -> str:
    """A hash of everything a joiner would receive."""
    from shoal.world.elastic.transport import state_hash as hashed

    return hashed(fleet._replica.snapshot())


def plain_state(fleet: shoal.Fleet) -> dict[str, Any]:
    """What the state holds beside tensors, for saying where two workers differ."""
    tree: Any = fleet._replica.snapshot()
    return {
        "progress": tree["progress"],
        "evaluation": {k: str(v) for k, v in tree["evaluation"].items()},
        "rule": tree["rule"],
        "optimizer": str(tree["optimizer"]),
    }


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
    slow_seconds: float = 0.002,
    leave_at: int | None = None,
    die_at: int | None = None,
    hang_at: int | None = None,
    die_in_evaluation: int | None = None,
    fail_at: int | None = None,
    evaluate: bool = True,
    timing: Mapping[str, Any] | None = None,
    scaling: Any = None,
) -> dict[str, Any]:
    """One worker's whole life; tells (step, samples) every few steps and returns its end."""
    torch.set_num_threads(1)
    torch.manual_seed(slot)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    link = ReadyLink(board, slot=slot)
    world = ElasticWorld(link, timing=Timing(**{"patience_seconds": 30.0, **dict(timing or {})}))
    model = Counter(samples, slot)
    rule = scaling or shoal.scaling.Unscaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fleet = shoal.init(model, optimizer, scaling=rule, batch_policy=policy, world=world)
    if fail_at is not None:
        _fail_once(world, fleet, fail_at)
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
    for number in fleet.epochs(epochs):
        if not trace and not scores:
            # Let in, even if no share of this worker ever holds a sample.
            processes.tell((fleet.step_count, number, fleet.workers, 0.0))
        for batch in fleet.batches(numbers, local_batch=local_batch, micro_batch=micro_batch):
            fleet.backward(
                model(batch), reduction="sum", weight=first_of_step(fleet, batch, samples)
            )
            if die_at is not None and fleet.step_count >= die_at:
                os.kill(os.getpid(), 9)
            if hang_at is not None and fleet.step_count >= hang_at:
                processes.tell("hung")
                os.kill(os.getpid(), 19)
            if leave_at is not None and fleet.step_count >= leave_at:
                world.request_leave()
            late = fleet.samples_seen > samples * epochs // 2
            dawdle(board, world, slow_seconds, HOLD_SECONDS if late else 0.0)
            time.sleep(pause_seconds)
            if fleet.step():
                trace.append((fleet.step_count, fleet.samples_seen, fleet.workers, fleet.lr))
                if len(trace) <= 150:  # a pipe that nobody reads would fill up
                    processes.tell(trace[-1])
        if evaluate:
            scores.append(fleet.evaluate(numbers, count, local_batch=max(1, samples // 7))["mean"])
    result = {
        "weight": model.weight.detach().tolist(),
        "tag": model.tag.tolist(),
        "hash": state_hash(fleet),
        "plain": plain_state(fleet),
        "trace": trace,
        "scores": scores,
        "samples_seen": fleet.samples_seen,
        "step": fleet.step_count,
    }
    fleet.close()
    return result


def hurried(board: str) -> bool:
    """Whether the test has nothing more to do to this fleet, so that it may run to its end."""
    return os.path.exists(board + ".hurry")


def dawdle(board: str, world: ElasticWorld, seconds: float, hold_seconds: float = 0.0) -> None:
    """Take ``seconds``, or less once the test has nothing more to do.

    With ``hold_seconds`` take so much longer, unless somebody wants to come or go: a run that has not
    much left waits for the test, however long a newcomer takes to start.
    """
    begun = time.monotonic()
    while not hurried(board):
        waited = time.monotonic() - begun
        if waited >= seconds and (waited >= seconds + hold_seconds or stirred(world)):
            return
        time.sleep(min(0.005, max(seconds, 0.001)))


def stirred(world: ElasticWorld) -> bool:
    """Whether somebody knocks, or a member was asked to leave: the next steps take care of it."""
    enrolment, link = world._enrolment, world._link
    assert isinstance(link, BoardLink) and enrolment.membership is not None
    members = {f"w{slot}": slot for slot in range(link._board.workers)}
    leavers = (link._board.leave_asked(members[name]) for name in enrolment.membership.names)
    return link.joins() != enrolment.knocks or any(leavers)


def first_of_step(fleet: shoal.Fleet, batch: torch.Tensor, samples: int) -> float:
    """1 for the batch with the step's first sample, 0 for all others: a step's units add up to 1."""
    cursor = fleet.samples_seen
    order = shoal.data.Order(n=samples, seed=0, epoch=cursor // samples)
    return float(int(batch[0]) == int(order.take(cursor % samples, cursor % samples + 1)[0]))


def _fail_once(world: ElasticWorld, fleet: shoal.Fleet, step: int) -> None:
    """From ``step`` on, let one reduction succeed for the others and fail here."""
    reduce = world.all_reduce
    done = False

    def all_reduce(tensor: torch.Tensor) -> Any:
        nonlocal done
        work = reduce(tensor)
        if done or fleet.step_count < step or fleet.workers < 2:
            return work
        done = True
        work.wait()
        return FailsOnce(world)

    world.all_reduce = all_reduce  # type: ignore[method-assign]
    fleet._stepper.reducer._all_reduce = all_reduce


def digest(result: Mapping[str, Any]) -> str:
    """A short name of what was learned, for comparing workers in messages."""
    return hashlib.sha256(repr(result["weight"]).encode()).hexdigest()[:8]


def board_path(directory: Path) -> str:
    """Where the board of a test lies."""
    return str(directory / "board")


def mlp_task() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """A small classifier with BatchNorm and dropout, heavy ball, and data for it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1200, 12, generator=generator)
    y = (x @ torch.randn(12, 4, generator=generator)).argmax(1)
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, (x, y)


def train_mlp(
    board: str | None, slot: int, *, world: Any = None, epochs: int = 2, slow_seconds: float = 0.0
) -> dict[str, Any]:
    """Train :func:`mlp_task` in a real fleet, or in ``world``; returns weights and memberships."""
    torch.set_num_threads(1)
    if board is not None:
        world = ElasticWorld(ReadyLink(board, slot=slot), timing=Timing(patience_seconds=30.0))
    model, optimizer, data = mlp_task()
    fleet = shoal.init(
        model,
        optimizer,
        scaling=shoal.scaling.Dynamic(reference_batch=8),
        schedule=shoal.schedules.cosine(warmup_samples=200),
        world=world,
    )
    members: list[tuple[int, int]] = []
    early: list[float] = []
    for _ in fleet.epochs(epochs):
        for x, y in fleet.batches(data, local_batch=8):
            fleet.backward(nn.functional.cross_entropy(model(x), y))
            fleet.clip_grad_norm_(2.0)
            if board is not None:
                late = fleet.samples_seen > len(data[0]) * epochs // 2
                dawdle(board, world, slow_seconds, HOLD_SECONDS if late else 0.0)
            if fleet.step():
                members.append((fleet.step_count, fleet.workers))
                if fleet.step_count == 20:
                    early = nn.utils.parameters_to_vector(model.parameters()).double().tolist()
                if board is not None and len(members) <= 150:
                    processes.tell(members[-1])
    result = {
        "state": {k: v.double().tolist() for k, v in model.state_dict().items()},
        "members": members,
        "after_20_steps": early,
    }
    fleet.close()
    return result
