"""The exact moments of the noisy quadratic, against sampling and against closed forms."""

import numpy as np
import pytest

from shoal.workloads.noisy_quadratic import NoisyQuadratic


def test_moments_equal_those_of_many_sampled_runs() -> None:
    task = NoisyQuadratic(curvatures=(0.1, 1.0))
    generator = np.random.default_rng(3)
    runs, momentum = 200_000, 0.9
    w = np.full((runs, 2), 0.5)
    u = np.zeros((runs, 2))
    moments = task.moments(start=0.5)
    h = np.array(task.curvatures)
    for step in range(12):
        lr, batch, factor = (0.05, 4, 1.0) if step < 6 else (0.2, 16, 0.25)
        gradient = h * w + generator.normal(size=w.shape) * np.sqrt(h / batch)
        u = momentum * factor * u + gradient
        w = w - lr * u
        moments = moments.step(lr=lr, momentum=momentum, global_batch=batch, momentum_factor=factor)
    assert moments.loss == pytest.approx(float((h * w**2).mean(axis=0).sum() / 2), rel=0.02)
    assert moments.buffer_variance == pytest.approx(float((u**2).mean(axis=0).sum()), rel=0.02)


def test_buffer_of_a_flat_coordinate_has_the_closed_form_variance() -> None:
    task = NoisyQuadratic(curvatures=(1e-9,))
    moments = task.moments()
    for _ in range(300):
        moments = moments.step(lr=1e-3, momentum=0.9, global_batch=8)
    assert moments.buffer_variance == pytest.approx(1e-9 / 8 / (1 - 0.9**2), rel=1e-6)


def test_without_momentum_the_stationary_loss_is_known() -> None:
    lr, h, batch = 0.1, 0.5, 4
    moments = NoisyQuadratic(curvatures=(h,)).moments(start=2.0)
    for _ in range(2_000):
        moments = moments.step(lr=lr, momentum=0.0, global_batch=batch)
    variance = lr**2 * h / batch / (1 - (1 - lr * h) ** 2)
    assert moments.loss == pytest.approx(h * variance / 2, rel=1e-9)


@pytest.mark.parametrize("curvatures", [(), (0.0,), (1.0, -0.1)])
def test_curvatures_must_be_positive(curvatures: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        NoisyQuadratic(curvatures=curvatures)
