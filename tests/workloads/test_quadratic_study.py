"""The closed forms against the moment recursion, and the optima against the reference table."""

import itertools
import math

import numpy as np
import pytest

from shoal.workloads.noisy_quadratic import NoisyQuadratic
from shoal.workloads.quadratic_study import (
    HeavyBall,
    QuadraticTask,
    Setting,
    Sgd,
    heavy_ball_optima,
    sgd_optima,
    steps_to_goal,
)

BATCHES = [4**k for k in range(1, 11)]
# Section 5.3 of the notes, computed there by other code on 120 learning rates, and 40 x 15 for momentum.
SGD_STEPS = [1513608, 378337, 96518, 25808, 10496, 7884, 7203, 7064, 7031, 7023]
SGD_LR = [0.0141, 0.0532, 0.222, 0.758, 1.55, 1.90, 1.90, 1.90, 1.90, 1.90]
MOMENTUM_STEPS = [1504149, 377520, 88912, 20395, 5332, 1380, 362, 202, 192, 188]
MOMENTUM_EFFECTIVE_LR = [0.0135, 0.0522, 0.227, 0.89, 3.5, 13.9, 55, 82, 82, 68]


def recursion(setting: Setting, task: QuadraticTask, batch: int, steps: int) -> list[float]:
    moments = NoisyQuadratic(curvatures=tuple(task.curvatures)).moments(start=1.0)
    risks = [moments.loss]
    for _ in range(steps):
        moments = moments.step(lr=setting.lr, momentum=setting.momentum, global_batch=batch)
        risks.append(moments.loss)
    return risks


SMALL = QuadraticTask(coordinates=40, goal=0.05)


@pytest.mark.parametrize(
    "setting",
    [
        Sgd(SMALL, 0.05),
        Sgd(SMALL, 1.0),
        Sgd(SMALL, 1.9),
        HeavyBall(SMALL, 0.01, 0.5),
        HeavyBall(SMALL, 0.2, 0.95),
        HeavyBall(SMALL, 1.0, 0.9),
        HeavyBall(SMALL, 3.4, 0.95),
        HeavyBall(SMALL, 4e-6, 0.9999),
    ],
    ids=lambda s: f"{type(s).__name__}-{s.lr:.2g}-{s.momentum}",
)
def test_closed_form_is_the_moment_recursion(setting: Setting) -> None:
    for batch in (1, 64):
        exact = recursion(setting, SMALL, batch, 300)
        for step in (0, 1, 2, 3, 10, 77, 300):
            start, noise = setting.risk(step)
            assert start + noise / batch == pytest.approx(exact[step], rel=1e-6)
        assert setting.noise_limit > 0


@pytest.mark.parametrize("lr, momentum", [(4 * 0.1**2, 0.81), (1.5**2, 0.25)])
def test_roots_that_meet_cost_little_accuracy(lr: float, momentum: float) -> None:
    """At h = 1/4, and at h = 1 from the negative side."""
    exact = recursion(setting := HeavyBall(SMALL, lr, momentum), SMALL, 1, 300)
    for step in (1, 2, 10, 300):
        assert sum(setting.risk(step)) == pytest.approx(exact[step], rel=2e-5)


def test_the_noise_limit_is_where_the_noise_ends() -> None:
    for setting in (Sgd(SMALL, 0.5), HeavyBall(SMALL, 0.5, 0.8)):
        assert setting.risk(50_000)[1] == pytest.approx(setting.noise_limit, rel=1e-9)
    assert math.isinf(Sgd(SMALL, 2.0).noise_limit)
    assert math.isinf(HeavyBall(SMALL, 3.9, 0.9).noise_limit)


@pytest.mark.parametrize("batch", [4, 32, 1024])
def test_steps_are_the_first_below_the_goal(batch: int) -> None:
    for lr in (0.01, 0.05, 0.3, 1.2):
        setting = Sgd(SMALL, lr)
        risks = recursion(setting, SMALL, batch, 4_000)
        first = next((t for t, risk in enumerate(risks) if risk < SMALL.goal), None)
        assert steps_to_goal(SMALL, setting, batch) == first


def test_a_goal_below_the_start_is_met_at_step_0_and_out_of_reach_never() -> None:
    easy = QuadraticTask(coordinates=3, goal=10.0)
    assert steps_to_goal(easy, Sgd(easy, 0.1), 1) == 0
    hard = QuadraticTask(coordinates=3, goal=1e-6)
    assert steps_to_goal(hard, Sgd(hard, 0.5), 1) is None
    with pytest.raises(ValueError, match="larger batches or an easier goal"):
        sgd_optima(QuadraticTask(coordinates=3, goal=1e-9), [1], learning_rates=20)
    with pytest.raises(ValueError, match="goal is positive"):
        QuadraticTask(goal=0.0)


def test_ruling_settings_out_early_loses_no_optimum() -> None:
    """The pruned search against every learning rate at every batch."""
    [*optima] = sgd_optima(SMALL, [4, 64, 4096], learning_rates=60)
    odds = np.geomspace(1e-3 / 1.999, 1.999 / 1e-3, 60)
    for optimum in optima:
        every = [
            steps_to_goal(SMALL, Sgd(SMALL, float(2 * o / (1 + o))), optimum.global_batch)
            for o in odds
        ]
        assert optimum.steps == min(s for s in every if s is not None)


def test_sgd_agrees_with_the_reference_table() -> None:
    optima = sgd_optima(QuadraticTask(), BATCHES)
    for optimum, steps, lr in zip(optima, SGD_STEPS, SGD_LR, strict=True):
        # Ours is the finer grid: never worse, and the table's is 5 % coarse.
        assert 0.95 * steps <= optimum.steps <= 1.001 * steps
        assert optimum.lr == pytest.approx(lr, rel=0.07)
    ratios = [a.steps / b.steps for a, b in itertools.pairwise(optima)]
    assert ratios[0] == pytest.approx(4, rel=0.01) and ratios[-1] < 1.01


def test_momentum_agrees_with_the_reference_table() -> None:
    batches = BATCHES[1::2]
    optima = heavy_ball_optima(QuadraticTask(), batches, rates=16, momenta=12, zooms=3)
    table = zip(MOMENTUM_STEPS[1::2], MOMENTUM_EFFECTIVE_LR[1::2], strict=True)
    for optimum, (steps, effective) in zip(optima, table, strict=True):
        # The table's grid is coarse in momentum too, so up to 16 % are left to find.
        assert 0.82 * steps <= optimum.steps <= 1.03 * steps
        assert optimum.effective_lr == pytest.approx(effective, rel=0.3)
