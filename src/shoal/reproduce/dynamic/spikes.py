"""The loss spike after a scale-out, defined once for every experiment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

AFTER_STEPS = 40
BEFORE_STEPS = 50


def scale_outs(batches: NDArray[np.int64]) -> list[int]:
    """Steps at which the global batch is larger than in the step before."""
    return [int(step) for step in np.flatnonzero(np.diff(batches) > 0) + 1]


def spikes(losses: Array, batches: NDArray[np.int64]) -> Array:
    """Mean spike of each run over its scale-outs.

    A spike is the largest loss in the 40 steps from a scale-out on (fewer where the run or the
    stretch at that batch ends earlier) minus the mean loss of the 50 steps before it.

    Args:
        losses: training loss of each step, shape (steps, runs).
        batches: nominal global batch of each step, shape (steps,).

    Returns:
        Shape (runs,); infinite where a loss after a scale-out is not finite, NaN without any.
    """
    found: list[Array] = []
    finite = np.nan_to_num(losses, nan=np.inf, posinf=np.inf)
    changes = np.append(np.flatnonzero(np.diff(batches)) + 1, len(batches))
    for step in scale_outs(batches):
        end = min(step + AFTER_STEPS, int(changes[changes > step].min()))
        after = finite[step:end].max(axis=0)
        before = finite[max(step - BEFORE_STEPS, 0) : step].mean(axis=0)
        with np.errstate(invalid="ignore"):
            found.append(np.where(np.isinf(after), np.inf, after - before))
    if not found:
        return np.full(losses.shape[1], np.nan)
    return np.mean(found, axis=0)


def around_scale_outs(losses: Array, batches: NDArray[np.int64], steps: int = 64) -> list[float]:
    """Loss from 50 steps before a scale-out to ``steps`` after, averaged over runs and scale-outs.

    Only scale-outs that have so many steps on both sides count.

    Args:
        losses: training loss of each step, shape (steps, runs).
        batches: nominal global batch of each step, shape (steps,).
        steps: how many after the scale-out, >= 1.

    Returns:
        50 + ``steps`` numbers, or none where no scale-out qualifies.
    """
    windows = [
        losses[step - BEFORE_STEPS : step + steps].mean(axis=1)
        for step in scale_outs(batches)
        if step >= BEFORE_STEPS and step + steps <= len(batches)
    ]
    return [float(value) for value in np.mean(windows, axis=0)] if windows else []
