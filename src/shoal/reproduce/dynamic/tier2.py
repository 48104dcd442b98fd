"""Tier 2: real images of digits, every rule on the same samples, all seeds in one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.reproduce.dynamic.methods import METHODS, SHORT_METHODS, WORKER_SAMPLES
from shoal.reproduce.dynamic.pace import Pace
from shoal.reproduce.dynamic.spikes import around_scale_outs, spikes
from shoal.reproduce.progress import Progress
from shoal.scaling import schedules
from shoal.scaling.contract import Rule
from shoal.workloads.digits_mlp import DigitsTask, StackedMLP, evaluate, losses

Array = NDArray[np.float64]

RECORDED_SEED_BASE = 71_000
QUICK_SEED_BASE = 52_000
RECORDED_SEEDS = 16
QUICK_SEEDS = 4


@dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """Section 6.3 of the notes, in one place.

    Args:
        seeds: the paired runs.
        epochs: of the main comparison.
        epoch_samples: samples in an epoch; a multiple of every global batch used.
        warmup_epochs: linear warm-up from 0.
        lr: base learning rate of the main comparison.
        short_epochs: lengths of the short static runs.
        short_lr: their base learning rate.
        momentum: of SGD.
        weight_decay: of SGD, coupled.
    """

    seeds: tuple[int, ...]
    epochs: int = 30
    epoch_samples: int = 4_096
    warmup_epochs: int = 2
    lr: float = 0.02
    short_epochs: tuple[int, ...] = (4, 8)
    short_lr: float = 0.005
    momentum: float = 0.9
    weight_decay: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training of all seeds leaves.

    Args:
        model: the trained models.
        losses: training loss of each step before its update, shape (steps, seeds).
        batches: nominal global batch of each step.
    """

    model: StackedMLP
    losses: Array
    batches: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's outcome; arrays have one entry per seed.

    Args:
        accuracy: test accuracy in percent.
        test_loss: mean cross-entropy on the test samples.
        spike: mean loss spike over the run's scale-outs; NaN where there was none.
        around: mean loss around a scale-out, see :func:`~.spikes.around_scale_outs`.
    """

    accuracy: Array
    test_loss: Array
    spike: Array
    around: list[float]

    def to_dict(self) -> dict[str, object]:
        """Every number, as plain JSON values."""
        return {
            "accuracy": self.accuracy.tolist(),
            "test_loss": self.test_loss.tolist(),
            "spike": self.spike.tolist(),
            "loss_around_scale_out": self.around,
        }


def train(
    task: DigitsTask,
    settings: DigitsSettings,
    rule: Rule[Any],
    workers: Callable[[int], int],
    *,
    epochs: int,
    lr: float,
    tick: Callable[[float], None] = lambda work: None,
) -> Training:
    """Train one model per seed with SGD under a scaling rule.

    Args:
        task: the data.
        settings: what all methods have in common.
        rule: a scaling rule with a reference batch of 8 samples.
        workers: virtual workers of 8 samples each, by epoch.
        epochs: length of the run; the cosine ends there.
        lr: base learning rate.
        tick: told after each epoch what it has cost, see :func:`epoch_work`.
    """
    size = settings.epoch_samples
    schedule = schedules.cosine(warmup_samples=settings.warmup_epochs * size)
    pace = Pace(
        rule,
        schedule.resolve(epochs * size),
        momentum=settings.momentum,
        epoch_samples=size,
        global_batch=workers(0) * WORKER_SAMPLES,
    )
    model = StackedMLP(settings.seeds)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    seen: list[torch.Tensor] = []
    batches: list[int] = []
    for epoch in range(epochs):
        inputs, labels = task.epoch(settings.seeds, epoch * size, size)
        batch = workers(epoch) * WORKER_SAMPLES
        for start in range(0, size, batch):
            part = slice(start, start + batch)
            each = losses(model(inputs[:, part]), labels[:, part])
            pace.take_step(optimizer, each.sum(), base_lr=lr, global_batch=batch)
            seen.append(each.detach())
            batches.append(batch)
        tick(epoch_work(size, batch))
    return Training(
        model=model,
        losses=torch.stack(seen).double().numpy(),
        batches=np.array(batches, dtype=np.int64),
    )


def outcome(training: Training, task: DigitsTask) -> Row:
    """Test scores and spikes of a finished training."""
    accuracy, test_loss = evaluate(training.model, task)
    return Row(
        accuracy=accuracy.numpy(),
        test_loss=test_loss.double().numpy(),
        spike=spikes(training.losses, training.batches),
        around=around_scale_outs(training.losses, training.batches),
    )


@dataclass(frozen=True, kw_only=True)
class DigitsRows:
    """All outcomes of tier 2.

    Args:
        settings: what was run.
        main: the long comparison, by method.
        short: the short static runs, by epochs and method.
    """

    settings: DigitsSettings
    main: dict[str, Row]
    short: dict[int, dict[str, Row]]


def epoch_work(epoch_samples: int, batch: int) -> float:
    """What an epoch costs, in steps of the small batch: a step has a fixed and a growing part."""
    return epoch_samples / batch * (1 + batch / 100)


def total_work(settings: DigitsSettings) -> float:
    """What all of tier 2 costs, the unit of its progress."""
    runs = [(method.workers, settings.epochs) for method in METHODS]
    runs += [
        (method.workers, epochs) for method in SHORT_METHODS for epochs in settings.short_epochs
    ]
    return sum(
        epoch_work(settings.epoch_samples, workers(epoch) * WORKER_SAMPLES)
        for workers, epochs in runs
        for epoch in range(epochs)
    )


def run_tier2(
    task: DigitsTask,
    settings: DigitsSettings,
    progress: Progress,
) -> DigitsRows:
    """Train every method on every seed.

    Args:
        task: the data.
        settings: section 6.3 and the seeds.
        progress: told of every epoch, see :func:`epoch_work`.
    """
    largest = max(method.workers(epoch) for method in METHODS for epoch in range(settings.epochs))
    assert settings.epoch_samples % (largest * WORKER_SAMPLES) == 0, settings.epoch_samples
    main: dict[str, Row] = {}
    for method in METHODS:
        label = f"digits, {method.name}"
        training = train(
            task,
            settings,
            method.rule(),
            method.workers,
            epochs=settings.epochs,
            lr=settings.lr,
            tick=lambda work, label=label: progress.advance(work, label),
        )
        main[method.name] = outcome(training, task)
        progress.finish_piece(f"{label}: {main[method.name].accuracy.mean():.2f} %")
    short: dict[int, dict[str, Row]] = {}
    for epochs in settings.short_epochs:
        short[epochs] = {}
        for method in SHORT_METHODS:
            label = f"digits, {epochs} epochs, {method.name}"
            training = train(
                task,
                settings,
                method.rule(),
                method.workers,
                epochs=epochs,
                lr=settings.short_lr,
                tick=lambda work, label=label: progress.advance(work, label),
            )
            short[epochs][method.name] = outcome(training, task)
            progress.finish_piece(f"{label}: {short[epochs][method.name].accuracy.mean():.2f} %")
    return DigitsRows(settings=settings, main=main, short=short)


def seeds_from(base: int, count: int) -> tuple[int, ...]:
    """``count`` seeds in a row from ``base``."""
    return tuple(range(base, base + count))


def sd(values: Sequence[float] | Array) -> float:
    """Sample standard deviation; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
