"""Counter-based draws: the i-th number of a stream is a pure function of (key, stream, i).

Runs that are compared must see the same samples, whatever the number of steps each of them takes,
so a draw belongs to a sample's position and never to a generator that was advanced some number of
times. Which sample stands at a position is :mod:`shoal.data.order`'s business; these draws are for
what happens to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keyed_bits(key: int, stream: int, counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 pseudo-random bits for each counter.

    Args:
        key: the run's seed, >= 0.
        stream: which purpose the draw serves, >= 0; streams of one key are unrelated.
        counters: positions, any shape, each >= 0.

    Returns:
        A new array of the same shape.

    Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014), keyed twice.
    """
    with np.errstate(over="ignore"):
        root = _mix(np.array([key], dtype=np.uint64) * _GOLDEN + np.uint64(stream))
        return _mix(_mix(counters.astype(np.uint64) * _GOLDEN + root) + _GOLDEN)


def keyed_integers(
    key: int, stream: int, counters: NDArray[np.int64], *, bound: int
) -> NDArray[np.int64]:
    """Integers in [0, bound), one for each counter; the modulo bias is below bound / 2**64.

    Args:
        key: the run's seed, >= 0.
        stream: which purpose the draw serves, >= 0.
        counters: positions, each >= 0.
        bound: exclusive upper end, >= 1.

    Returns:
        A new array of the shape of ``counters``.
    """
    return (keyed_bits(key, stream, counters) % np.uint64(bound)).astype(np.int64)
