"""The noise scale: unbiased where truth is known, finite populations, and a replay of a real model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.noise_replay import noise_scale_of_winner, replay
from shoal.study.noise_scale import NoiseMeasurement, noise_scale
from shoal.study.records import Goal, SearchKey, Trial
from shoal.study.search_summary import SearchSummary, TrialSummary
from shoal.study.space import Log, Space
from shoal.study.spec import CurveSpec
from shoal.study.steps_to_result import Reach, StepsToResult
from shoal.study.workload import Workload

SMALL, LARGE = 8, 64


def measured(
    count: int,
    norm: float,
    trace: float,
    seed: int = 0,
    n: int | None = None,
    dimensions: int = 400,
) -> list[NoiseMeasurement]:
    """Gradients G + noise in ``dimensions`` coordinates; the loss falls by a factor e^3."""
    random = np.random.default_rng(seed)
    inverse = 1 / n if n else 0.0
    mean = np.zeros(dimensions)
    mean[0] = math.sqrt(norm)
    found = []
    for step in range(count):
        sd = math.sqrt(trace / dimensions)
        common = sd * math.sqrt(1 / LARGE - inverse) * random.standard_normal(dimensions)
        own = sd * math.sqrt(1 / SMALL - 1 / LARGE)
        parts = LARGE // SMALL
        spread = own * random.standard_normal((parts, dimensions))
        spread = (spread - spread.mean(0)) * math.sqrt(parts / (parts - 1))
        micro = mean + common + spread
        found.append(
            NoiseMeasurement(
                step,
                3.0 * math.exp(-3 * step / count),
                float((micro**2).sum(1).mean()),
                float((micro.mean(0) ** 2).sum()),
            )
        )
    return found


def test_the_planted_scale_is_recovered():
    rows = measured(400, norm=1.0, trace=26.5)
    found = noise_scale(rows, small_batch=SMALL, large_batch=LARGE, train_samples=None)
    assert found.value == pytest.approx(26.5, rel=0.05)
    assert found.interval.holds(26.5)
    assert len(found.bins) == 5 and found.measurements == 400
    assert all(scale == pytest.approx(26.5, rel=0.15) for _, _, scale in found.bins)


def test_the_ratio_of_means_is_used_and_not_the_mean_of_ratios():
    rows = measured(3000, norm=1.0, trace=100.0, dimensions=50)
    ratios = []
    for m in rows:
        trace = (m.small - m.large) / (1 / SMALL - 1 / LARGE)
        ratios.append(trace / (m.large - trace / LARGE))
    found = noise_scale(
        rows, small_batch=SMALL, large_batch=LARGE, train_samples=None, resamples=10
    )
    assert abs(found.value - 100) < 0.25 * abs(np.mean(ratios) - 100)


def test_finite_populations_have_less_noise():
    rows = measured(400, norm=1.0, trace=26.5, n=80)
    right = noise_scale(rows, small_batch=SMALL, large_batch=LARGE, train_samples=80)
    wrong = noise_scale(rows, small_batch=SMALL, large_batch=LARGE, train_samples=None)
    assert right.value == pytest.approx(26.5, rel=0.05)
    assert wrong.value > 1.2 * right.value
    with pytest.raises(UsageError, match="no more than the 60"):
        noise_scale(rows, small_batch=SMALL, large_batch=LARGE, train_samples=60)


def test_progress_is_weighted_by_the_log_of_the_loss():
    early = [m._replace(loss=2.0) for m in measured(10, norm=1.0, trace=10.0, seed=1)]
    late = [m._replace(loss=0.2) for m in measured(400, norm=1.0, trace=100.0, seed=2)]
    found = noise_scale(
        [*early, *late], small_batch=SMALL, large_batch=LARGE, train_samples=None, bins=2
    )
    assert found.value == pytest.approx(55, rel=0.1), "two bins count equally"


def test_blocks_widen_the_interval_of_slow_noise():
    rows = measured(200, norm=1.0, trace=26.5)
    slow = []
    random = np.random.default_rng(3)
    for start in range(0, 200, 10):
        factor = math.exp(0.8 * random.standard_normal())
        slow += [m._replace(loss=1.0, large=m.large * factor) for m in rows[start : start + 10]]
    widths = {}
    for block in (1, 20):
        low, high = noise_scale(
            slow, small_batch=SMALL, large_batch=LARGE, train_samples=None, bins=1, block=block
        ).interval
        widths[block] = high - low
    assert widths[20] > 1.4 * widths[1]


def test_a_negative_norm_is_no_scale():
    rows = [NoiseMeasurement(k, 1.0 + k, 8.0, 1.0) for k in range(6)]
    found = noise_scale(rows, small_batch=SMALL, large_batch=LARGE, train_samples=None)
    assert math.isnan(found.value) and not found.foretells(30)
    assert all(math.isnan(scale) for _, _, scale in found.bins)


def test_within_a_decade():
    found = noise_scale(
        measured(200, 1.0, 26.5), small_batch=SMALL, large_batch=LARGE, train_samples=None
    )
    assert found.foretells(26.5) and found.foretells(200) and found.foretells(3)
    assert not found.foretells(300) and not found.foretells(2)


def test_bad_input_is_one_line():
    rows = measured(10, 1.0, 26.5)
    with pytest.raises(UsageError, match="2 steps or more"):
        noise_scale(rows[:1], small_batch=SMALL, large_batch=LARGE, train_samples=None)
    with pytest.raises(UsageError, match="small is less than large"):
        noise_scale(rows, small_batch=64, large_batch=64, train_samples=None)
    with pytest.raises(UsageError, match="positive"):
        bad = [m._replace(loss=0.0) for m in rows]
        noise_scale(bad, small_batch=SMALL, large_batch=LARGE, train_samples=None)


SAMPLES, INPUTS = 96, 6


@pytest.fixture(scope="module")
def workload() -> Workload:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, INPUTS, generator=random)
    y = (x @ torch.randn(INPUTS, 3, generator=random)).argmax(1)
    return Workload(
        name="linear",
        model=lambda: nn.Linear(INPUTS, 3),
        loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"),
        train=(x, y),
        val=(x, y),
    )


def task(workload: Workload) -> Task:
    curve = CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=1e-3, max=1.0)}))
    return Task(workload=workload, curve=curve, global_batch=4)


def test_the_replay_measures_the_gradients_there_are(workload):
    key = SearchKey(curve="sgd", global_batch=4, repeat=0)
    trial = Trial(search=key, id=7, unit=(0.5,), parameters={"lr": 0.05}, seed=11, address="")
    engine = PoolEngine(task(workload))
    steps = [0, 3, 10]
    rows = replay(workload, engine, trial, steps, small_batch=1, micro_batches=SAMPLES)
    assert [r.step for r in rows] == steps
    with pytest.raises(KeyError):
        engine.step(7)
    # All samples in batches of one: by hand, at the same weights.
    engine.admit(trial)
    for row in rows:
        engine.advance({7: row.step})
        model = workload.build(0)
        model.load_state_dict({k: v.clone() for k, v in engine.weights(7).items()})
        x, y = workload.split("train")
        gradients = []
        for i in range(SAMPLES):
            model.zero_grad()
            workload.loss(model(x[i : i + 1]), y[i : i + 1]).mean().backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        each = torch.stack(gradients).double()
        assert row.small == pytest.approx(float(each.square().sum(1).mean()), rel=1e-5)
        assert row.large == pytest.approx(float(each.mean(0).square().sum()), rel=1e-4)
    # With all samples in hand |G|^2 is exact and tr(Sigma) that of the data.
    found = noise_scale(rows, small_batch=1, large_batch=SAMPLES, train_samples=SAMPLES, bins=1)
    assert found.value > 0


def test_the_replay_refuses_more_than_there_is(workload):
    key = SearchKey(curve="sgd", global_batch=4, repeat=0)
    trial = Trial(search=key, id=0, unit=(0.5,), parameters={"lr": 0.05}, seed=1, address="")
    engine = PoolEngine(task(workload))
    with pytest.raises(UsageError, match="96 training samples"):
        replay(workload, engine, trial, [0], small_batch=50, micro_batches=2)
    with pytest.raises(UsageError, match="at least 2"):
        replay(workload, engine, trial, [0], small_batch=5, micro_batches=1)


def test_along_the_winner_of_a_search(workload):
    key = SearchKey(curve="sgd", global_batch=4, repeat=0)
    trial = Trial(search=key, id=0, unit=(0.5,), parameters={"lr": 0.05}, seed=1, address="")
    goal = Goal(metric="val/loss", value=0.5)
    row = TrialSummary(trial=trial, crossing=60, diverged=None, last=60, is_feasible=True)
    result = StepsToResult(
        goal=goal, reach=Reach.REACHED, steps=60, winner=0, end=60, draws=1, feasible=1
    )
    search = SearchSummary(key=key, result=result, feasible=1, end=60, trials=(row,))
    curve = task(workload).curve
    found = noise_scale_of_winner(workload, curve, search, measurements=24, micro_batches=8)
    assert found.measurements >= 20 and found.value > 0
    again = noise_scale_of_winner(workload, curve, search, measurements=24, micro_batches=8)
    assert again == found
    lost = replace(search, result=replace(result, winner=None, steps=None))
    with pytest.raises(UsageError, match="no winner"):
        noise_scale_of_winner(workload, curve, lost)
