"""Buffer form, velocity form and torch's SGD are one algorithm, over runs whose batch changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.scaling import (
    Dynamic,
    LearningRate,
    Linear,
    buffer_step,
    by_name,
    schedules,
    velocity_step,
)
from shoal.testing.scaling import Tick, begin, random_script, walk

BASE_LR = 0.02
CURVATURES = torch.linspace(0.05, 1.0, 7, dtype=torch.float64)


def gradient_at(weights: Tensor, step: int) -> Tensor:
    """A quadratic's slope with noise that depends on the step only."""
    noise = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return CURVATURES * weights + 0.1 * noise


def rows_of(rule: Linear | Dynamic, seed: int = 0) -> list[tuple[float, float]]:
    """(learning rate, momentum factor) of 200 committed steps with many changes."""
    script = [tick for tick in random_script(rule, seed, steps=200) if tick.is_committed]
    rows, _ = walk(rule, begin(rule, script[0].global_batch), script)
    return [(BASE_LR * row.multiplier / 16, row.momentum_factor) for row in rows]


def test_case_gradient_one() -> None:
    """cases.md, momentum: buffer form -12.6092, velocity form without correction -8.0814."""
    rule = Linear(reference_batch=8, momentum_correction=False)
    script = [Tick(global_batch=8)] * 5 + [Tick(global_batch=32)] * 5
    rows, _ = walk(rule, begin(rule, 8), script)
    plain = buffered = uncorrected = corrected = (0.0, 0.0)
    last = 0.1
    for row in rows:
        lr = 0.1 * row.multiplier
        plain = buffer_step(*plain, 1.0, lr=lr, momentum=0.9)
        corrected = velocity_step(*corrected, 1.0, lr=lr, momentum=0.9, lr_ratio=lr / last)
        uncorrected = velocity_step(*uncorrected, 1.0, lr=lr, momentum=0.9)
        buffered = buffer_step(
            *buffered, 1.0, lr=lr, momentum=0.9, momentum_factor=row.momentum_factor
        )
        last = lr
    assert plain[0] == pytest.approx(-12.6092, abs=5e-5)
    assert corrected[0] == pytest.approx(plain[0], rel=1e-14)
    # The case list rounds 8.08134 up; in closed form it is 4 (5 - q) + q v + (5 - q), v = 1 - .9^5.
    v = 1 - 0.9**5
    q = 9 * v
    assert uncorrected[0] == pytest.approx(-(4 * (5 - q) + q * v + (5 - q)), rel=1e-14)
    assert uncorrected[0] == pytest.approx(-8.0814, abs=1e-4)
    assert buffered[0] == pytest.approx(uncorrected[0], rel=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("rule", [Dynamic(reference_batch=16), Linear(reference_batch=16)])
def test_both_forms_and_torch_end_at_equal_weights(
    rule: Linear | Dynamic, weight_decay: float, nesterov: bool
) -> None:
    start = torch.ones(7, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD(
        [parameter], lr=1.0, momentum=0.9, weight_decay=weight_decay, nesterov=nesterov
    )
    by_buffer = by_velocity = (start, torch.zeros_like(start))
    rates = rows_of(rule)
    last = rates[0][0]
    for step, (lr, factor) in enumerate(rates):
        assert factor == 1.0
        by_buffer = buffer_step(
            *by_buffer,
            gradient_at(by_buffer[0], step),
            lr=lr,
            momentum=0.9,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )
        by_velocity = velocity_step(
            *by_velocity,
            gradient_at(by_velocity[0], step),
            lr=lr,
            momentum=0.9,
            lr_ratio=lr / last,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )
        parameter.grad = gradient_at(parameter.detach(), step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        last = lr
    assert optimizer.param_groups[0]["weight_decay"] == weight_decay
    torch.testing.assert_close(by_buffer[0], by_velocity[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(by_buffer[0], parameter.detach(), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(by_buffer[0], start)


def test_linear_without_correction_makes_torch_follow_the_uncorrected_velocity_form() -> None:
    rule = Linear(reference_batch=16, momentum_correction=False)
    start = torch.ones(7, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, weight_decay=1e-2)
    by_velocity = by_buffer = (start, torch.zeros_like(start))
    rates = rows_of(rule)
    for step, (lr, factor) in enumerate(rates):
        by_velocity = velocity_step(
            *by_velocity,
            gradient_at(by_velocity[0], step),
            lr=lr,
            momentum=0.9,
            weight_decay=1e-2,
        )
        by_buffer = buffer_step(
            *by_buffer, gradient_at(by_buffer[0], step), lr=lr, momentum=0.9, weight_decay=1e-2
        )
        parameter.grad = gradient_at(parameter.detach(), step)
        optimizer.param_groups[0]["lr"] = lr
        if step:
            optimizer.state[parameter]["momentum_buffer"].mul_(factor)
        optimizer.step()
    assert len({factor for _, factor in rates}) > 2
    torch.testing.assert_close(parameter.detach(), by_velocity[0], rtol=1e-11, atol=1e-12)
    assert not torch.allclose(by_buffer[0], by_velocity[0], rtol=1e-3)


def test_learning_rate_is_base_times_schedule_times_multiplier() -> None:
    rate = LearningRate(
        rule=by_name("dynamic", reference_batch=8, ramp_steps=8),
        schedule=schedules.cosine().resolve(6_400),
    )
    place = begin(rate.rule, 8)
    rows, _ = walk(rate.rule, place, [Tick(global_batch=8)] * 5 + [Tick(global_batch=32)] * 30)
    state = place.state
    for row in rows:
        step = rate.before_step(state, row.at)
        assert step.factor == schedules.cosine(total_samples=6_400)(row.at.samples)
        assert (step.multiplier, step.momentum_factor) == (row.multiplier, 1.0)
        assert step.lr(0.1) == 0.1 * step.factor * step.multiplier
        target = rate.target_lr(step.state, row.at, 0.1)
        assert target == 0.1 * step.factor * row.at.global_batch / 8
        state = rate.rule.commit(step.state, row.at, None)
    assert step.lr(0.1) == target
