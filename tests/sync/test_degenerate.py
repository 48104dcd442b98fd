"""Rules at the settings at which they are another, simpler one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.sync import (
    BMUF,
    EAMSGD,
    EASGD,
    SGP,
    AllReduce,
    DiLoCo,
    Downpour,
    Independent,
    Leader,
    LocalSGD,
    Lookahead,
    PowerSGD,
    SlowMo,
    Stacked,
    SyncRule,
)
from shoal.testing.sync_task import LAYOUT, LR, NUMBERS, Task, begin, run, walk

STEPS = 13

BIT_FOR_BIT: dict[str, tuple[SyncRule[Any], SyncRule[Any]]] = {
    "leader, pull 0": (Leader(sync_every=2, global_sync_every=2, pull=0.0), Independent()),
    "easgd, alpha 0": (EASGD(sync_every=2, alpha=0.0), Independent()),
    "easgd together, alpha 0": (EASGD(sync_every=2, alpha=0.0, synchronous=True), Independent()),
    "lookahead, step 1": (Lookahead(sync_every=2, step_size=1.0), Independent()),
    "diloco, its own stays": (DiLoCo(sync_every=4, mixing=1.0), Independent()),
    "local sgd, in its warm-up": (LocalSGD(warmup_steps=99), AllReduce()),
    "powersgd, in its warm-up": (PowerSGD(warmup_steps=99), AllReduce()),
    "powersgd, nothing worth it": (PowerSGD(warmup_steps=0, min_compression=1e6), AllReduce()),
    "eamsgd, momentum 0": (
        EAMSGD(sync_every=3, momentum=0.0, alpha=0.25),
        EASGD(sync_every=3, alpha=0.25),
    ),
    "a period longer than the run": (LocalSGD(sync_every=99), Independent()),
}

TO_ROUNDING: dict[str, tuple[SyncRule[Any], SyncRule[Any]]] = {
    "slowmo without momentum": (SlowMo(sync_every=4, slow_momentum=0.0), LocalSGD(sync_every=4)),
    "bmuf without momentum": (BMUF(sync_every=4, block_momentum=0.0), LocalSGD(sync_every=4)),
    "diloco, outer lr 1": (
        DiLoCo(sync_every=4, outer_lr=1.0, outer_momentum=0.0),
        LocalSGD(sync_every=4),
    ),
    "slowmo and bmuf": (
        SlowMo(sync_every=4, slow_momentum=0.5),
        BMUF(sync_every=4, block_momentum=0.5),
    ),
    "diloco, plain momentum, and bmuf": (
        DiLoCo(sync_every=4, outer_lr=1.0, outer_momentum=0.5, nesterov=False),
        BMUF(sync_every=4, block_momentum=0.5),
    ),
    "powersgd of full rank": (
        PowerSGD(warmup_steps=0, rank=5, min_compression=1.0, error_feedback=False),
        AllReduce(),
    ),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("name", list(BIT_FOR_BIT))
def test_equal_bit_for_bit(name: str, workers: int) -> None:
    left, right = (run(rule, workers=workers, steps=STEPS)[0] for rule in BIT_FOR_BIT[name])
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one.x, other.x), f"step {number}"


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("name", list(TO_ROUNDING))
def test_equal_to_rounding(name: str, workers: int) -> None:
    left, right = (
        run(rule, workers=workers, steps=STEPS, task=Task(dtype=torch.float64))[0]
        for rule in TO_ROUNDING[name]
    )
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one.x, other.x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("pull", "workers"), [(0.0, 3), (0.5, 1)])
def test_a_narrow_wire_leaves_what_does_not_travel_exact(pull: float, workers: int) -> None:
    task, exchange = Task(), Stacked(workers, wire="bf16")
    rule = Leader(sync_every=2, global_sync_every=2, pull=pull)
    rows, _ = walk(rule, task, exchange, begin(rule, task, exchange), STEPS)
    expected, _, _ = run(Independent(), workers=workers, steps=STEPS)
    for row, other in zip(rows, expected, strict=True):
        assert torch.equal(row.x, other.x)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_averaging_every_step_is_the_mean_of_weights(workers: int) -> None:
    rows, _, _ = run(LocalSGD(sync_every=1), workers=workers, steps=STEPS)
    task = Task()
    x = task.start(workers)
    for number, row in enumerate(rows):
        x = x - task.gradients(x, tuple(range(workers)), number) * LR
        x = (x.double().sum(dim=0, keepdim=True) / workers).float().repeat(workers, 1)
        assert torch.equal(row.x, x)
    # ... and, from equal weights on, all-reduce of gradients to rounding
    assert all(torch.equal(row.x[0], other) for row in rows for other in row.x)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_whole_pull_in_every_step_copies_the_leader(workers: int) -> None:
    rows, _, _ = run(
        Leader(sync_every=1, global_sync_every=1, pull=1.0), workers=workers, steps=STEPS
    )
    for row in rows:
        assert all(torch.equal(row.x[0], other) for other in row.x)


def test_gossip_of_two_is_their_mean_and_of_eight_in_three_rounds_too() -> None:
    rows, _, _ = run(SGP(), workers=2, steps=1)
    mean, _, _ = run(LocalSGD(sync_every=1), workers=2, steps=1)
    assert torch.allclose(rows[0].x, mean[0].x, rtol=1e-6)
    rule, exchange = SGP(), Stacked(8)
    x = Task(dtype=torch.float64).start(8)
    state, expected = rule.init(x, exchange), x.mean(dim=0)
    for _ in range(3):
        outcome = rule.after_step(state, x, exchange, Task().signals(x, exchange.ranks, LR))
        x, state = outcome.x, outcome.state
    torch.testing.assert_close(x, expected.expand_as(x), rtol=1e-12, atol=1e-12)


def test_push_sum_outlives_lost_messages() -> None:
    """What is lost takes its weight along, so what is trained stays a weighted mean of the workers'."""
    rule, exchange = SGP(), Stacked(4)
    exchange.lost = [(0, 1), (2, 0)]
    x = torch.tensor([[0.0], [1.0], [2.0], [5.0]], dtype=torch.float64)
    state = rule.init(x, exchange)
    for _ in range(40):
        outcome = rule.after_step(state, x, exchange, Task().signals(x, exchange.ranks, LR))
        x, state = outcome.x, outcome.state
    assert not torch.equal(state.surplus, torch.zeros_like(state.surplus))
    assert (x.max() - x.min()).item() < 1e-6
    assert x.min().item() >= 0.0 and x.max().item() <= 5.0


def test_the_outer_step_is_torchs_nesterov_sgd() -> None:
    rule = DiLoCo(sync_every=2)
    rows, _, _ = run(rule, workers=3, steps=8, task=Task(dtype=torch.float64))
    task, ranks = Task(dtype=torch.float64), (0, 1, 2)
    x = task.start(3)
    outer = torch.nn.Parameter(x.mean(dim=0))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for number, row in enumerate(rows):
        x = x - task.gradients(x, ranks, number) * LR
        if number % 2:
            outer.grad = outer.detach() - x.mean(dim=0)
            optimizer.step()
            x = outer.detach().repeat(3, 1)
        torch.testing.assert_close(row.x, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("outer_lr", "expected"), [(1.0, -2.0), (0.5, -1.0)])
def test_pseudo_gradient_of_two_inner_steps(outer_lr: float, expected: float) -> None:
    rule, exchange = DiLoCo(sync_every=2, outer_lr=outer_lr, outer_momentum=0.0), Stacked(1)
    x, seen = torch.zeros(1, 1), [0.0]
    state = rule.init(x, exchange)
    for _ in range(2):
        outcome = rule.after_step(state, x - 1.0, exchange, Task().signals(x, (0,), LR))
        seen.append((x - 1.0).item())
        x, state = outcome.x, outcome.state
    assert seen == [0.0, -1.0, -2.0]
    assert x.item() == expected


def test_three_parameter_groups_are_one_step_each_time() -> None:
    """Period 4, 12 steps of an optimizer with three groups: exactly 3 averagings."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters)])
    rule, exchange, rounds = LocalSGD(sync_every=4), Stacked(2), 0
    flat = torch.nn.utils.parameters_to_vector(parameters).detach()
    state = rule.init(torch.stack([flat, flat]), exchange)
    for _ in range(12):
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
        flat = torch.nn.utils.parameters_to_vector(parameters).detach()
        x = torch.stack([flat, flat])
        outcome = rule.after_step(state, x, exchange, Task().signals(x[:, :1], (0, 1), LR))
        state, rounds = outcome.state, rounds + outcome.is_round
    assert rounds == 3
    assert exchange.traffic.sent_bytes["mean"] == (1 + 3) * 2 * flat.numel() * 4 - 2 * 9 * 4


def test_a_save_at_step_five_of_a_period_of_eight_meets_its_round_at_step_eight() -> None:
    for rule in (
        Leader(sync_every=8, global_sync_every=8),
        LocalSGD(sync_every=8),
        EASGD(sync_every=8),
        EAMSGD(sync_every=8),
        Downpour(sync_every=8),
        SlowMo(sync_every=8),
        BMUF(sync_every=8),
        DiLoCo(sync_every=8),
        Lookahead(sync_every=8),
        SGP(sync_every=8),
    ):
        _, place, exchange = run(rule, workers=2, steps=5)
        state: Any = rule.load_state_dict(rule.state_dict(place.state))  # pyright: ignore[reportArgumentType]
        met = []
        x, task = place.x, Task()
        for number in range(6, 11):
            at, state = rule.before_step(state, x)
            outcome: Any = rule.after_step(
                state, at, exchange, task.signals(at, exchange.ranks, LR)
            )
            x, state = outcome.x, outcome.state
            met.append((number, outcome.is_round))
        assert [number for number, is_round in met if is_round] == [8], rule.name


def test_powersgd_keeps_what_it_left_out_and_sends_it_later() -> None:
    """A constant gradient of rank 2 through rank 1: what is applied catches up with what was given."""
    rule, exchange = PowerSGD(warmup_steps=0, min_compression=1.0), Stacked(2)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 2, generator=generator) @ torch.randn(2, 5, generator=generator)
    gradient = torch.zeros(2, NUMBERS)
    gradient[:, :30] = matrix.flatten()
    state: Any = rule.init(gradient, exchange, LAYOUT)
    applied = torch.zeros(NUMBERS)
    for _ in range(60):
        mean, state = rule.reduce_gradients(
            state, gradient, exchange, Task().signals(gradient, (0, 1), LR)
        )
        assert torch.equal(mean[0], mean[1])
        applied += mean[0]
    missing = torch.linalg.vector_norm(applied / 60 - gradient[0])
    assert missing < 0.05 * torch.linalg.vector_norm(gradient[0])
