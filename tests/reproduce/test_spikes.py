"""The definition of a loss spike."""

import numpy as np
import pytest

from shoal.reproduce.dynamic.spikes import around_scale_outs, scale_outs, spikes


def made_up() -> tuple[np.ndarray, np.ndarray]:
    batches = np.array([8] * 60 + [128] * 64 + [8] * 60 + [128] * 64)
    losses = np.full((len(batches), 2), 0.5)
    return losses, batches


def test_scale_outs_are_the_steps_with_more_than_the_step_before() -> None:
    _, batches = made_up()
    assert scale_outs(batches) == [60, 184]


def test_spike_is_the_maximum_of_40_after_minus_the_mean_of_50_before() -> None:
    losses, batches = made_up()
    losses[99, 0] = 1.5
    losses[184, 0] = 0.9
    losses[10:60, 1] = 0.3
    losses[100, 1] = 9.0
    losses[9, 1] = 9.0
    np.testing.assert_allclose(spikes(losses, batches), [(1.0 + 0.4) / 2, 0.2 / 2])


def test_window_ends_with_the_stretch() -> None:
    batches = np.array([8] * 50 + [16] * 5 + [8] * 50)
    losses = np.zeros((len(batches), 1))
    losses[54], losses[55] = 0.2, 7.0
    assert spikes(losses, batches)[0] == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_an_infinite_spike(bad: float) -> None:
    losses, batches = made_up()
    losses[70:, 0] = bad
    assert spikes(losses, batches)[0] == np.inf
    assert spikes(losses, batches)[1] == 0.0


def test_no_scale_out_no_spike() -> None:
    assert np.isnan(spikes(np.zeros((9, 3)), np.full(9, 8))).all()
    assert around_scale_outs(np.zeros((9, 3)), np.full(9, 8)) == []


def test_curve_around_scale_outs_is_the_mean_over_them() -> None:
    losses, batches = made_up()
    losses[60], losses[184] = 1.0, 2.0
    curve = around_scale_outs(losses, batches)
    assert len(curve) == 50 + 64
    assert curve[49] == 0.5 and curve[50] == pytest.approx(1.5) and curve[51] == 0.5
