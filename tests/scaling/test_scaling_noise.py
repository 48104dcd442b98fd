"""Noise-matched, AdaScale and LEGW, and all ramps on exact second moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.scaling import (
    AdaScale,
    Dynamic,
    GradientNoise,
    Legw,
    Linear,
    NoiseMatched,
    Rule,
    SquareRoot,
)
from shoal.scaling.adascale import AdaScaleState, estimate
from shoal.testing.scaling import EPOCH_SAMPLES, Tick, begin, moment, walk


def multipliers(rule: Rule[Any], start: int, script: Sequence[int]) -> list[float]:
    rows, _ = walk(rule, begin(rule, start), [Tick(global_batch=batch) for batch in script])
    return [row.multiplier for row in rows]


@pytest.mark.parametrize("k", [2, 4, 8, 16])
def test_noise_matched_begins_at_the_root_and_follows_the_formula(k: int) -> None:
    values = multipliers(NoiseMatched(reference_batch=8), 8, [8 * k] * 80)
    assert values[0] == pytest.approx(k**0.5, rel=1e-15)
    for s in (0, 1, 5, 20):
        assert values[s] == pytest.approx(k / (1 + (k - 1) * 0.9 ** (2 * s)) ** 0.5, rel=1e-12)
    assert values[-1] == float(k)


def test_noise_matched_from_m0_to_target() -> None:
    values = multipliers(NoiseMatched(reference_batch=8), 32, [128] * 80)
    for s in (0, 3, 10):
        assert values[s] == pytest.approx(
            16 / (1 + (16 / 4 - 1) * 0.9 ** (2 * s)) ** 0.5, rel=1e-12
        )


def test_noise_matched_drops_at_once() -> None:
    assert multipliers(NoiseMatched(reference_batch=8), 128, [8, 8]) == [1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(1, 64),
    parts=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_noise_matched_is_the_variance_recursion(start: int, parts: list[tuple[int, int]]) -> None:
    """Every step V <- mu^2 V + (1 - mu^2) / k, whatever changes fall into a ramp."""
    script = [batch for batch, steps in parts for _ in range(steps)]
    told = multipliers(NoiseMatched(reference_batch=8, tolerance=1e-14), start, script)
    variance, expected = 8 / start, []
    for batch in script:
        k = batch / 8
        expected.append(min(k, (k / variance) ** 0.5))
        variance = 0.81 * variance + 0.19 / k
    assert told == pytest.approx(expected, rel=1e-9)


def loss_peak(rule: Rule[Any], before: int, after: int, base_lr: float = 0.01) -> float:
    """Peak of the expected loss over 300 steps after a change, over the loss before it.

    Noisy quadratic with exact second moments: 30 curvatures h log-spaced from 0.01 to 1, gradient
    noise h / batch, momentum 0.9, reference batch 8 (notes on arXiv 1904.12043, 6.2).
    """
    h = np.logspace(-2, 0, 30)
    covariance = np.zeros((30, 2, 2))
    script = [Tick(global_batch=8 * before)] * 4000 + [Tick(global_batch=8 * after)] * 300
    rows, _ = walk(rule, begin(rule, 8 * before), script)
    losses: list[float] = []
    for row in rows:
        lr = base_lr * row.multiplier
        step = np.empty((30, 2, 2))
        step[:, 0, 0], step[:, 0, 1] = 1 - lr * h, -lr * 0.9
        step[:, 1, 0], step[:, 1, 1] = h, 0.9
        push = np.array([[lr * lr, -lr], [-lr, 1.0]])
        covariance = step @ covariance @ step.transpose(0, 2, 1)
        covariance += (h / row.at.global_batch)[:, None, None] * push
        losses.append(float((h * covariance[:, 0, 0]).sum() / 2))
    return max(losses[4000:]) / losses[3999]


@pytest.mark.parametrize(
    ("rule", "before", "after", "peak"),
    [
        (Linear(reference_batch=8), 1, 16, 7.99),
        (Dynamic(reference_batch=8, ramp_steps=8), 1, 16, 2.86),
        (Dynamic(reference_batch=8, ramp_steps=20), 1, 16, 1.40),
        (Dynamic(reference_batch=8), 1, 16, 1.02),
        (Dynamic(reference_batch=8), 1, 4, 1.00),
        (NoiseMatched(reference_batch=8), 1, 16, 2.15),
        (NoiseMatched(reference_batch=8), 1, 4, 1.26),
        (Linear(reference_batch=8), 1, 4, 1.95),
        (Dynamic(reference_batch=8), 16, 1, 1.00),
        (Dynamic(reference_batch=8, ramp_steps=8, down="ramp"), 16, 1, 4.59),
        (Dynamic(reference_batch=8, ramp_steps=128, down="ramp"), 16, 1, 12.6),
    ],
    ids=str,
)
def test_peaks_on_the_noisy_quadratic(
    rule: Rule[Any], before: int, after: int, peak: float
) -> None:
    """The table of the notes, section 1.5, to one unit of its last digit."""
    assert loss_peak(rule, before, after) == pytest.approx(peak, abs=0.1 if peak > 9 else 0.01)


def sums(gradients: np.ndarray, sizes: Sequence[int]) -> GradientNoise:
    """The sums of pieces with mean gradients ``gradients`` and ``sizes`` samples."""
    weights = np.asarray(sizes, dtype=float)
    mean = (weights[:, None] * gradients).sum(0) / weights.sum()
    return GradientNoise(
        weighted_squares=float((weights * (gradients**2).sum(1)).sum()),
        pieces=len(sizes),
        samples=int(weights.sum()),
        mean_square=float((mean**2).sum()),
    )


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 4, 1), (1, 31)])
def test_estimates_are_unbiased_for_pieces_of_any_size(sizes: tuple[int, ...]) -> None:
    generator = np.random.default_rng(7)
    true = np.array([0.3, -0.2, 0.1])
    found = []
    for _ in range(4000):
        noise = generator.normal(size=(len(sizes), 3)) * 0.5 / np.sqrt(sizes)[:, None]
        learnt = estimate(sums(true + noise, sizes))
        assert learnt is not None
        found.append(learnt)
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / 4000**0.5
    assert abs(mean[0] - 3 * 0.25) < 4 * error[0]
    assert abs(mean[1] - 0.14) < 4 * error[1]


def test_equal_pieces_give_the_published_formula() -> None:
    """sig2 = (sum|g_i|^2 - S|g|^2) / (S - 1), mu2 = |g|^2 - sig2 / S, pieces of one reference."""
    gradients = np.random.default_rng(3).normal(size=(4, 6))
    mean_square = float((gradients.mean(0) ** 2).sum())
    published = ((gradients**2).sum() - 4 * mean_square) / 3
    rule = AdaScale(reference_batch=16)
    at = moment(0, 0, 64)
    state = rule.commit(rule.init(at), at, sums(gradients, (16,) * 4))
    assert state.noise / 16 == pytest.approx(published, rel=1e-12)
    assert state.signal == pytest.approx(mean_square - published / 4, rel=1e-12)
    signal = max(mean_square - published / 4, 0.0)
    gain = (published + signal) / (published / 4 + signal)
    assert rule.multiplier(state, moment(1, 64, 64)) == pytest.approx(gain, rel=1e-12)


def test_gain_runs_from_1_all_signal_to_the_scale_all_noise() -> None:
    rule = AdaScale(reference_batch=8)

    def gain(noise: float, signal: float, batch: int) -> float:
        state = AdaScaleState(noise=noise, signal=signal, measured=1, reference_steps=0.0)
        return rule.multiplier(state, moment(1, 8, batch))

    assert gain(0.0, 1e3, 128) == pytest.approx(1.0, abs=1e-8)
    assert gain(80.0, 0.0, 128) == 16.0
    assert gain(80.0, -5.0, 128) == 16.0
    assert gain(8.0, 1.0, 32) == pytest.approx(2 / 1.25, rel=1e-15)
    assert gain(8.0, 1.0, 8) == 1.0
    assert gain(8.0, 1.0, 4) == pytest.approx(2 / 3, rel=1e-15)
    assert gain(80.0, 0.0, 4) == 0.5


def test_nothing_is_learnt_from_one_piece_or_from_numbers_that_are_not_finite() -> None:
    rule = AdaScale(reference_batch=8)
    at = moment(0, 0, 32)
    for noise in (
        GradientNoise(weighted_squares=9.0, pieces=1, samples=8, mean_square=1.0),
        GradientNoise(weighted_squares=float("inf"), pieces=3, samples=8, mean_square=1.0),
    ):
        state = rule.commit(rule.init(at), at, noise)
        assert state == AdaScaleState(noise=0.0, signal=0.0, measured=0, reference_steps=1.0)
        assert rule.multiplier(state, moment(1, 32, 32)) == 1.0
        assert rule.multiplier(state, moment(1, 32, 4)) == 0.5


def test_averages_are_plain_means_first_and_exponential_later() -> None:
    rule = AdaScale(reference_batch=8)
    scale = 100  # theta = 0.9: a plain mean for ten steps
    state = rule.init(moment(0, 0, 800))
    measured = list(np.random.default_rng(5).uniform(1, 2, size=25))
    expected = 0.0
    for step, value in enumerate(measured):
        at = moment(step, 800 * step, 8 * scale)
        noise = GradientNoise(weighted_squares=value, pieces=2, samples=800, mean_square=0.0)
        state = rule.commit(state, at, noise)
        mean = float(np.mean(measured[: step + 1]))
        expected = mean if step < 10 else 0.9 * expected + 0.1 * value
        assert state.noise == pytest.approx(expected, rel=1e-12)


def test_progress_is_the_sum_of_gains_in_reference_batches() -> None:
    rule = AdaScale(reference_batch=8)
    rows, _ = walk(rule, begin(rule, 8), [Tick(global_batch=8)] * 5 + [Tick(global_batch=64)] * 30)
    total = 0.0
    for row in rows:
        assert row.progress == pytest.approx(8 * total, rel=1e-12)
        total += row.multiplier
    assert rows[5].progress == 40.0
    assert rows[-1].progress < rows[-1].at.samples
    assert any(1.0 < row.multiplier < 8.0 for row in rows)


def test_a_change_of_the_batch_needs_no_correction_of_what_was_measured() -> None:
    rule = AdaScale(reference_batch=8)
    rows, _ = walk(rule, begin(rule, 16), [Tick(global_batch=16)] * 9)
    state = rows[-1].state
    assert rule.advance(state, moment(9, 144, 128)) == state


def test_adascale_asks_for_the_noise_it_needs() -> None:
    rule = AdaScale(reference_batch=8)
    at = moment(0, 0, 8)
    with pytest.raises(UsageError, match="noise = None; AdaScale learns from every committed step"):
        rule.commit(rule.init(at), at, None)


def test_legw_is_root_scaling_with_a_warm_up_of_w_k_epochs() -> None:
    rule, root = Legw(reference_batch=10, warmup_epochs=2), SquareRoot(reference_batch=10)
    for k in (1, 4):
        batch = 10 * k
        script = [Tick(global_batch=batch)] * 250
        rows, _ = walk(rule, begin(rule, batch), script)
        plain, _ = walk(root, begin(root, batch), script)
        steps = 2 * k * EPOCH_SAMPLES // batch
        assert steps == 200
        for index, (row, other) in enumerate(zip(rows, plain, strict=True)):
            share = min(1.0, (index + 1) / steps)
            assert row.multiplier == pytest.approx(other.multiplier * share, rel=1e-14)
        assert rows[steps - 1].multiplier == root.target(plain[0].state, plain[0].at)
        assert rows[0].ramp_end == steps - 1
        assert rows[steps - 1].ramp_end is None


def test_legw_keeps_its_place_in_the_warm_up_when_the_batch_changes() -> None:
    rule = Legw(reference_batch=10, warmup_epochs=2)
    values = multipliers(rule, 10, [10] * 100 + [40] * 50)
    assert values[99] == pytest.approx(0.5)
    assert values[100] == pytest.approx(2 * 101 / 200)
