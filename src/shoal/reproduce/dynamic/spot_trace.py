"""A synthetic trace of available workers, in the shape that real spot machines show.

Published traces of cloud spot capacity (one row about every minute, e.g. 56, 36, 31, 29 machines
within minutes) have cliffs, when many machines go at once, then slow and partial recovery in small
steps, with quiet stretches in between. The numbers below are made up in that shape and scaled to
1-16 workers; they were not recorded anywhere.
"""

from __future__ import annotations

WORKERS = (
    *(16, 16, 10, 9, 8, 8, 8, 9, 9, 11, 12, 12),
    *(16, 16, 16, 13, 6, 5, 5, 5, 7, 8, 8, 10),
    *(14, 16, 16, 9, 3, 1, 1, 2, 4, 8, 12, 16),
)
ROW_STEPS = 150


def available(step: int) -> int:
    """Workers there are at an optimizer step; each row holds 150 steps and the trace repeats."""
    return WORKERS[step // ROW_STEPS % len(WORKERS)]
