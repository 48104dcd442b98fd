"""Small models, data and loops that the fleet's tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.data import Order

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "heavy_ball": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def classes(n: int = 100) -> tuple[Tensor, Tensor]:
    """n points of 6 features in 3 classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator)
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


def classifier(*, norm: bool = False, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """A small multi-layer perceptron from a fixed seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(6, 8)]
    if norm:
        layers.append(nn.BatchNorm1d(8))
    layers.append(nn.Tanh())
    if dropout:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(8, 3))
    return nn.Sequential(*layers)


@dataclass
class Run:
    """What a training loop leaves behind."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    fleet: shoal.Fleet
    lrs: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)

    def weights(self) -> Tensor:
        """All parameters and buffers as one vector."""
        state = self.model.state_dict().values()
        return torch.cat([t.detach().double().flatten() for t in state])


def accuracy(model: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
    """Sums for two metrics."""
    out = model(batch[0])
    return {
        "accuracy": ((out.argmax(1) == batch[1]).sum(), len(batch[1])),
        "loss": (F.cross_entropy(out, batch[1], reduction="sum"), len(batch[1])),
    }


def train(
    world: Any = None,
    *,
    model: nn.Module | None = None,
    optimizer: str | torch.optim.Optimizer = "heavy_ball",
    data: Any = None,
    epochs: int = 2,
    local_batch: int = 8,
    micro_batch: int | None = None,
    clip: float | None = None,
    evaluate: bool = False,
    close: bool = True,
    until: int | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    **init: Any,
) -> Run:
    """An ordinary loop on a fleet."""
    model = classifier() if model is None else model
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    fleet = shoal.init(model, optimizer, world=world, **init)
    run = Run(model, optimizer, fleet)
    data = classes() if data is None else data
    for _ in fleet.epochs(epochs):
        for batch in fleet.batches(data, local_batch=local_batch, micro_batch=micro_batch):
            value = (
                F.cross_entropy(model(batch[0]), batch[1]) if loss is None else loss(model, batch)
            )
            fleet.backward(value)
            if clip is not None:
                fleet.clip_grad_norm_(clip)
            before = fleet.samples_seen
            if fleet.step():
                run.lrs.append(fleet.lr)
                run.batches.append(fleet.samples_seen - before)
            if until is not None and fleet.step_count >= until:
                break
        if evaluate:
            run.scores.append(fleet.evaluate(data, accuracy, local_batch=7))
    if close:
        fleet.close()
    return run


def plain(
    *,
    model: nn.Module,
    optimizer: str | torch.optim.Optimizer = "heavy_ball",
    data: tuple[Tensor, Tensor] | None = None,
    epochs: int = 2,
    batch: int = 8,
    clip: float | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    seed: int = 0,
) -> nn.Module:
    """The same loop in plain PyTorch, in the fleet's order of the samples."""
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    x, y = classes() if data is None else data
    for epoch in range(epochs):
        order = torch.as_tensor(Order(n=len(x), seed=seed, epoch=epoch).take(0, len(x)))
        for rows in order.split(batch):
            optimizer.zero_grad()
            pair = [x[rows], y[rows]]
            value = F.cross_entropy(model(pair[0]), pair[1]) if loss is None else loss(model, pair)
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have equal parameters and buffers, bit for bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in ours)


def digest(value: Any) -> str:
    """A hash of nested dicts, lists, tensors and plain values."""
    made = hashlib.sha256()

    def walk(item: Any) -> None:
        if isinstance(item, Tensor):
            made.update(f"{item.dtype}{tuple(item.shape)}".encode())
            made.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, Mapping):
            for key in item:
                made.update(repr(key).encode())
                walk(item[key])
        elif isinstance(item, list | tuple):
            made.update(f"[{len(item)}".encode())
            for part in item:
                walk(part)
        else:
            made.update(repr(item).encode())

    walk(value)
    return made.hexdigest()


def training_state(fleet: shoal.Fleet) -> dict[str, Any]:
    """The snapshot without what an evaluation may move."""
    tree: dict[str, Any] = dict(fleet._replica.snapshot())
    del tree["evaluation"]
    progress = dict(tree["progress"])
    del progress["commits"], progress["lineage"]
    return {**tree, "progress": progress}


class Counter(nn.Module):
    """One weight per sample; the gradient of a sample is minus its one-hot vector."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> Tensor:
        return -self.weight[numbers].sum()


@dataclass
class Counted:
    """What a counting run has learned and where it stands."""

    weights: Tensor
    seen: int
    fleet: shoal.Fleet
    steps: dict[int, Step]


@dataclass(frozen=True)
class Step:
    """A committed step as the loop saw it: positions, workers and learning rate."""

    start: int
    stop: int
    workers: int
    lr: float


def count(
    world: Any = None,
    *,
    samples: int,
    epochs: int = 1,
    local_batch: int,
    micro_batch: int | None = None,
    policy: Any = "proportional",
    scaling: Any = None,
    until: int | None = None,
    evaluate: bool = False,
    steps: dict[int, Step] | None = None,
    **init: Any,
) -> Counted:
    """Train a :class:`Counter` and note the committed steps in ``steps``, which workers may share.

    The units of a step add up to 1 (they are those of its first micro-batch), so the gradient is a sum and
    not a mean: with lr 1 the weights end as the number of times each sample was trained, else as the sum
    of the lr of the steps that trained it.
    """
    model = Counter(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fleet = shoal.init(model, optimizer, world=world, scaling=scaling, batch_policy=policy, **init)
    numbers = torch.arange(samples)
    steps = {} if steps is None else steps
    try:
        for _ in fleet.epochs(epochs):
            for batch in fleet.batches(numbers, local_batch=local_batch, micro_batch=micro_batch):
                order = Order(n=samples, seed=0, epoch=fleet.epoch)
                position = fleet.epoch * samples + int(order.positions(batch.numpy())[0])
                start = fleet.samples_seen
                fleet.backward(model(batch), reduction="sum", weight=float(position == start))
                if fleet.step():
                    seen = Step(start, fleet.samples_seen, fleet.workers, fleet.lr)
                    assert steps.setdefault(fleet.step_count, seen) == seen
                if until is not None and fleet.step_count >= until:
                    break
            if evaluate:
                scores = fleet.evaluate(numbers, lambda m, b: {"mean": (b.sum(), len(b))})
                assert scores["mean"] == (samples - 1) / 2
        # A worker that alone saw the last step fail learns here that the others have committed it.
        fleet.evaluate(numbers, lambda m, b: {"mean": (b.sum(), len(b))}, local_batch=64)
    except shoal.ResumableStop:
        pass
    finally:
        counted = Counted(model.weight.detach(), fleet.samples_seen, fleet, steps)
        fleet.close()
    return counted


def check_counts(run: Counted, samples: int) -> None:
    """Every position below ``run.seen`` was trained once, at its step's learning rate."""
    rate = torch.zeros(run.seen, dtype=torch.float64)
    for step in run.steps.values():
        assert (rate[step.start : step.stop] == 0).all()
        rate[step.start : step.stop] = step.lr
    assert (rate != 0).all()
    expected = torch.zeros(samples, dtype=torch.float64)
    for epoch in range(-(-run.seen // samples)):
        stop = min(samples, run.seen - epoch * samples)
        rows = torch.as_tensor(Order(n=samples, seed=0, epoch=epoch).take(0, stop))
        expected[rows] += rate[epoch * samples : epoch * samples + stop]
    torch.testing.assert_close(run.weights, expected, rtol=1e-9, atol=1e-9)
