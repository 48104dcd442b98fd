"""The vectorised training against an ordinary loop, one model at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.reproduce.dynamic.methods import METHODS, WORKER_SAMPLES, Method, alternating
from shoal.reproduce.dynamic.pace import Pace
from shoal.reproduce.dynamic.tier2 import DigitsSettings, total_work, train
from shoal.scaling import Dynamic, Linear, schedules
from shoal.scaling.contract import Rule
from shoal.workloads.digits_mlp import DigitsTask, StackedMLP, load_digits_task

SETTINGS = DigitsSettings(seeds=(31, 32, 33), epoch_samples=256, warmup_epochs=1)
EPOCHS = 5


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    return load_digits_task()


def workers(epoch: int) -> int:
    return (1, 4, 1, 8, 2)[epoch]


def plain_loop(task: DigitsTask, row: int, rule: Rule[Any]) -> tuple[nn.Sequential, list[float]]:
    """Seed ``row`` alone: nn.Linear layers, torch.optim.SGD, one optimizer step at a time."""
    size = SETTINGS.epoch_samples
    model = StackedMLP(SETTINGS.seeds).member(row)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=SETTINGS.momentum, weight_decay=SETTINGS.weight_decay
    )
    pace = Pace(
        rule,
        schedules.cosine(warmup_samples=size, total_samples=EPOCHS * size),
        momentum=SETTINGS.momentum,
        epoch_samples=size,
        global_batch=8,
    )
    seen: list[float] = []
    for epoch in range(EPOCHS):
        inputs, labels = task.epoch(SETTINGS.seeds, epoch * size, size)
        batch = workers(epoch) * WORKER_SAMPLES
        for x, y in zip(inputs[row].split(batch), labels[row].split(batch), strict=True):
            rate = pace.next(batch)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = SETTINGS.lr * rate.factor * rate.multiplier
            for parameter in model.parameters():
                buffer = optimizer.state[parameter].get("momentum_buffer")
                if buffer is not None:
                    buffer *= rate.momentum_factor
            optimizer.step()
            pace.commit(rate, batch)
            seen.append(float(loss.detach()))
    return model, seen


@pytest.mark.parametrize(
    "rule",
    [
        lambda: Linear(reference_batch=8),
        lambda: Linear(reference_batch=8, momentum_correction=False),
        lambda: Dynamic(reference_batch=8),
        lambda: Dynamic(reference_batch=8, ramp_steps=8, down="ramp"),
    ],
    ids=["linear", "without correction", "dynamic", "symmetric"],
)
def test_each_seed_equals_an_ordinary_loop(task: DigitsTask, rule: Callable[[], Any]) -> None:
    training = train(task, SETTINGS, rule(), workers, epochs=EPOCHS, lr=SETTINGS.lr)
    assert len(training.batches) == 32 + 8 + 32 + 4 + 16
    for row in range(len(SETTINGS.seeds)):
        model, seen = plain_loop(task, row, rule())
        np.testing.assert_allclose(training.losses[:, row], seen, rtol=2e-4)
        wanted = dict(model.named_parameters())
        for name, parameter in training.model.member(row).named_parameters():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-4, atol=1e-5)


def test_the_rules_differ_where_they_should(task: DigitsTask) -> None:
    def loss_after(rule: Rule[Any]) -> np.ndarray:
        return train(task, SETTINGS, rule, workers, epochs=EPOCHS, lr=SETTINGS.lr).losses

    linear = loss_after(Linear(reference_batch=8))
    dynamic = loss_after(Dynamic(reference_batch=8))
    np.testing.assert_array_equal(linear[:33], dynamic[:33])
    assert not np.allclose(linear[34:40], dynamic[34:40], rtol=1e-3)


def test_all_methods_see_the_same_first_batches(task: DigitsTask) -> None:
    first = {}
    for method in METHODS:
        if method.workers is alternating:
            training = train(task, SETTINGS, method.rule(), method.workers, epochs=2, lr=0.02)
            first[method.name] = training.losses
    assert len(first) == 9
    for values in first.values():
        np.testing.assert_array_equal(values, first["none"])


def test_every_baseline_is_there_with_the_pilot_beside_it() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names) == 11
    assert all(isinstance(method, Method) and method.pilot[0] for method in METHODS)
    assert [alternating(epoch) for epoch in range(6)] == [1, 1, 16, 16, 1, 1]


def test_work_is_the_sum_of_what_the_ticks_report(task: DigitsTask) -> None:
    ticks: list[float] = []
    train(task, SETTINGS, Linear(reference_batch=8), workers, epochs=5, lr=0.02, tick=ticks.append)
    assert len(ticks) == 5 and ticks[0] > ticks[3]
    assert total_work(DigitsSettings(seeds=(1,))) > 90_000
