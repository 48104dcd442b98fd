"""The long experiment: Fashion-MNIST, a small CNN, drawn and trace-driven numbers of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data import Order, image_task
from shoal.reproduce.cells import Cells
from shoal.reproduce.claims import Claim
from shoal.reproduce.dynamic import spot_trace
from shoal.reproduce.dynamic.criteria import (
    L1,
    L2,
    L3,
    L4,
    LONG,
    LONG_SEEDS_NEEDED,
    Array,
    judge_kept,
    judge_spike,
)
from shoal.reproduce.dynamic.pace import Pace
from shoal.reproduce.dynamic.spikes import spikes
from shoal.reproduce.progress import Progress
from shoal.scaling import Dynamic, Linear, schedules
from shoal.scaling.contract import Rule
from shoal.workloads.draws import keyed_integers
from shoal.workloads.fashion_cnn import SmallCNN, evaluate

LONG_SEED_BASE = 83_000
MOST_WORKERS = 16
_WORKERS_STREAM = 7

# Workers at a step, as a function of (seed, epoch, step).
Availability = Callable[[int, int, int], int]


@dataclass(frozen=True, kw_only=True)
class LongSettings:
    """Everything that decides the numbers of a cell besides its own name.

    Args:
        seeds: one run of each method for each.
        epochs: full passes over the training samples.
        block_epochs: how long a drawn number of workers stays.
        worker_samples: samples per worker and step.
        lr: base learning rate, for one worker.
        warmup_epochs: linear warm-up from 0.
        momentum: of SGD.
        weight_decay: of SGD, coupled.
    """

    seeds: tuple[int, ...] = (LONG_SEED_BASE, LONG_SEED_BASE + 1, LONG_SEED_BASE + 2)
    epochs: int = 12
    block_epochs: int = 2
    worker_samples: int = 16
    lr: float = 0.01
    warmup_epochs: int = 1
    momentum: float = 0.9
    weight_decay: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Images:
    """Fashion-MNIST, normalised by its training part.

    Args:
        train: shape (samples, 1, 28, 28).
        train_labels: shape (samples,).
        test: shape (samples, 1, 28, 28).
        test_labels: shape (samples,).
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images() -> Images:
    """The 55,000 training and 10,000 test samples; the validation part is not used.

    Raises:
        DataMissing: Fashion-MNIST cannot be had here.
        UsageError: its files are damaged.
    """
    task = image_task("fashion-mnist")
    return Images(
        train=task.train[0],
        train_labels=task.train[1],
        test=task.test[0],
        test_labels=task.test[1],
    )


@dataclass(frozen=True, kw_only=True)
class LongCell:
    """One training run.

    Args:
        scenario: ``static``, ``drawn`` or ``trace``.
        method: ``1x``, ``linear at once`` or ``dynamic``.
        seed: of weights, order and draws.
    """

    scenario: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Its file name without the suffix."""
        return f"{self.scenario}-{self.method.replace(' ', '-')}-{self.seed}"


def cells(settings: LongSettings) -> tuple[LongCell, ...]:
    """All runs, seed by seed, so that an unfinished experiment has whole seeds first."""
    kinds = (
        ("static", "1x"),
        ("drawn", "linear at once"),
        ("drawn", "dynamic"),
        ("trace", "linear at once"),
        ("trace", "dynamic"),
    )
    return tuple(
        LongCell(scenario=scenario, method=method, seed=seed)
        for seed in settings.seeds
        for scenario, method in kinds
    )


def availability(scenario: str, settings: LongSettings) -> Availability:
    """How many workers there are, for a scenario."""

    def drawn(seed: int, epoch: int, step: int) -> int:
        block = np.array([epoch // settings.block_epochs], dtype=np.int64)
        return 1 + int(keyed_integers(seed, _WORKERS_STREAM, block, bound=MOST_WORKERS)[0])

    if scenario == "drawn":
        return drawn
    if scenario == "trace":
        return lambda seed, epoch, step: spot_trace.available(step)
    return lambda seed, epoch, step: 1


def rule_of(method: str, settings: LongSettings) -> Rule[Any]:
    """The scaling rule of a method; a static run at one worker never leaves its reference batch."""
    if method == "dynamic":
        return Dynamic(reference_batch=settings.worker_samples)
    return Linear(reference_batch=settings.worker_samples)


def run_cell(
    cell: LongCell,
    settings: LongSettings,
    images: Images,
    tick: Callable[[int], None] = lambda samples: None,
) -> dict[str, object]:
    """Train one cell and score it.

    Args:
        cell: which one.
        settings: what all cells have in common.
        images: the data.
        tick: told of the samples of every step.

    Returns:
        Test accuracy, test loss, spike, the workers of each stretch, steps and seconds.
    """
    started = time.perf_counter()
    model = SmallCNN(cell.seed)
    losses, batches = _train(model, cell, settings, images, tick)
    accuracy, test_loss = evaluate(model, images.test, images.test_labels)
    return {
        "accuracy": accuracy,
        "test_loss": test_loss,
        "spike": float(spikes(losses[:, None], batches)[0]),
        "workers": _stretches(batches // settings.worker_samples),
        "steps": len(batches),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _train(
    model: SmallCNN,
    cell: LongCell,
    settings: LongSettings,
    images: Images,
    tick: Callable[[int], None],
) -> tuple[Array, NDArray[np.int64]]:
    """Train ``model`` in place; the loss and the nominal global batch of every step."""
    count = len(images.train_labels)
    workers = availability(cell.scenario, settings)
    schedule = schedules.cosine(warmup_samples=settings.warmup_epochs * count)
    pace = Pace(
        rule_of(cell.method, settings),
        schedule.resolve(settings.epochs * count),
        momentum=settings.momentum,
        epoch_samples=count,
        global_batch=workers(cell.seed, 0, 0) * settings.worker_samples,
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    losses: list[Tensor] = []
    batches: list[int] = []
    for epoch in range(settings.epochs):
        left = torch.from_numpy(Order(n=count, seed=cell.seed, epoch=epoch).take(0, count))
        while len(left):
            batch = workers(cell.seed, epoch, pace.step) * settings.worker_samples
            chosen, left = left[:batch], left[batch:]
            logits = model(images.train[chosen])
            loss = nn.functional.cross_entropy(logits, images.train_labels[chosen])
            pace.take_step(
                optimizer, loss, base_lr=settings.lr, global_batch=batch, samples=len(chosen)
            )
            losses.append(loss.detach())
            batches.append(batch)
            tick(len(chosen))
    return torch.stack(losses).double().numpy(), np.array(batches, dtype=np.int64)


def _stretches(workers: NDArray[np.int64]) -> list[list[int]]:
    """Pairs of (first step, workers) wherever the number changes."""
    starts = [0, *(int(step) + 1 for step in np.flatnonzero(np.diff(workers)))]
    return [[start, int(workers[start])] for start in starts]


def cell_store(directory: Path, settings: LongSettings, images: Images) -> Cells:
    """The files of finished cells under ``directory``."""
    known = asdict(settings) | {
        "train_samples": len(images.train_labels),
        "test_samples": len(images.test_labels),
        "trace": list(spot_trace.WORKERS),
        "trace_row_steps": spot_trace.ROW_STEPS,
    }
    known.pop("seeds")
    return Cells(directory=directory, settings=known)


Finished = dict[str, Mapping[str, Any]]


def run_long(
    settings: LongSettings,
    images: Images,
    store: Cells,
    progress: Progress,
    *,
    most_cells: int | None = None,
) -> Finished:
    """Run the cells that are not finished yet, each kept as soon as it is.

    Args:
        settings: what all cells have in common.
        images: the data.
        store: where finished cells lie.
        progress: told of every step, in samples; finished cells are skipped.
        most_cells: stop in order after so many new cells; None for all of them.

    Returns:
        The numbers of every finished cell, by its name.
    """
    finished: Finished = {}
    work = settings.epochs * len(images.train_labels)
    new = 0
    for cell in cells(settings):
        known = store.read(cell.name)
        if known is not None:
            finished[cell.name] = known
            progress.skip(work)
            progress.finish_piece(f"{cell.name}: kept from an earlier call")
            continue
        if most_cells is not None and new >= most_cells:
            continue
        values = run_cell(
            cell, settings, images, tick=lambda samples, c=cell: progress.advance(samples, c.name)
        )
        store.keep(cell.name, values)
        finished[cell.name] = store.read(cell.name) or {}
        new += 1
        progress.finish_piece(f"{cell.name}: {values['accuracy']:.2f} %")
    return finished


def judge_long(settings: LongSettings, finished: Finished) -> tuple[Claim, ...]:
    """L1-L4 over the seeds of which all runs are finished; not run with fewer than 3 of them."""
    whole = [
        seed
        for seed in settings.seeds
        if all(cell.name in finished for cell in cells(settings) if cell.seed == seed)
    ]
    if len(whole) < LONG_SEEDS_NEEDED:
        return tuple(statement.not_run() for statement in LONG)

    def column(scenario: str, method: str, field: str) -> Array:
        names = [LongCell(scenario=scenario, method=method, seed=seed).name for seed in whole]
        values = [finished[name][field] for name in names]
        return np.array([np.inf if value is None else value for value in values], dtype=np.float64)

    static = column("static", "1x", "accuracy")
    judged: list[Claim] = []
    for scenario, kept, spike in (("drawn", L1, L2), ("trace", L3, L4)):
        judged += [
            judge_kept(kept, whole, static, column(scenario, "dynamic", "accuracy")),
            judge_spike(
                spike,
                whole,
                column(scenario, "linear at once", "spike"),
                column(scenario, "dynamic", "spike"),
            ),
        ]
    return tuple(judged)
