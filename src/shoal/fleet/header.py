"""The numbers that a step's workers add up beside their gradients: the header's first slots.

Behind them come one mark per parameter that was used, the movement of running statistics, one mark per
buffer that was changed, and the world's flags.
"""

from __future__ import annotations

from collections.abc import Sequence

SAMPLES, WEIGHT, WEIGHT_HI, LOSS, NONFINITE, VOID, SQUARES, PIECES = range(8)
FIXED_SLOTS = 8
# The header is float32, in which whole numbers are exact up to here; weights travel in two parts.
EXACT_FLOAT32 = 2**24
WEIGHT_RADIX = 4096.0


def add_weight(sums: list[float], weight: float) -> None:
    """Add the units of one micro-batch."""
    high = weight // WEIGHT_RADIX
    sums[WEIGHT_HI] += high
    sums[WEIGHT] += weight - high * WEIGHT_RADIX


def summed_weight(summed: Sequence[float]) -> float:
    """The units of all workers; whole numbers are exact up to 2**36."""
    return summed[WEIGHT_HI] * WEIGHT_RADIX + summed[WEIGHT]
