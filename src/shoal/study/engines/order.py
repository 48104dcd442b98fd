"""Which samples a trial's steps train on: a function of its seed and the step alone.

The batch of step t are positions [tB, (t + 1)B) of an endless row of shuffled passes over the training
set. Pass e is ``shoal.data.Order`` of (samples, seed, e): counter-based, so any step can be trained
again, and nothing depends on the engine, the slot or where a trial was interrupted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.data import Order
from shoal.errors import UsageError

Indices = npt.NDArray[np.int64]

_AHEAD = 8192
"""Positions computed at once: numpy's calls then cost little, and the buffers stay in the cache."""


class TrialOrder:
    """The batches of one trial.

    Args:
        seed: of the trial, 0 <= seed < 2**64.
        samples: in the training set, >= 1.
        global_batch: samples per step, >= 1; beyond ``samples`` a batch spans several passes.

    Raises:
        UsageError: a number outside its range.

    Example:
        >>> order = TrialOrder(seed=1, samples=10, global_batch=4)
        >>> sorted(order.take(0, 5).reshape(-1).tolist()) == sorted(list(range(10)) * 2)
        True
    """

    def __init__(self, *, seed: int, samples: int, global_batch: int) -> None:
        if samples < 1 or global_batch < 1:
            raise UsageError(
                f"samples, global_batch = {samples}, {global_batch}; both are at least 1"
            )
        self._seed, self._samples, self._batch = seed, samples, global_batch
        self._start = 0
        self._ahead: Indices = np.empty(0, dtype=np.int64)

    def take(self, step: int, steps: int) -> Indices:
        """The samples of steps ``step ... step + steps - 1``: shape (steps, global_batch), read only.

        Args:
            step: the first, >= 0.
            steps: how many, >= 1.
        """
        start, stop = step * self._batch, (step + steps) * self._batch
        if not (self._start <= start and stop <= self._start + len(self._ahead)):
            self._start, end = start, max(stop, start + _AHEAD)
            if self._samples <= _AHEAD:  # whole passes: a part of one costs as many calls
                self._start -= start % self._samples
                end += -end % self._samples
            self._ahead = _stream(self._seed, self._samples, self._start, end)
        part = self._ahead[start - self._start : stop - self._start]
        return part.reshape(steps, self._batch)


def _stream(seed: int, samples: int, start: int, stop: int) -> Indices:
    """Positions ``start ... stop - 1`` of the passes, pass by pass."""
    pieces: list[Indices] = []
    while start < stop:
        number, offset = divmod(start, samples)
        end = min(samples, offset + stop - start)
        pieces.append(Order(n=samples, seed=seed, epoch=number).take(offset, end))
        start += end - offset
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
