"""Where an all-reduce run stands in its data: one integer, the samples committed so far.

The cursor counts from the start of the run, so cursor = epoch * n + offset. A *position* is such a
count too: position p is the sample ``order(p % n, epoch=p // n)``. Nothing here depends on the
number of workers, so a run continues at its cursor with any number of them.
"""

from __future__ import annotations


def epoch_of(cursor: int, n: int) -> int:
    """The epoch in which the next sample lies, counted from 0.

    Args:
        cursor: samples committed so far, >= 0.
        n: samples in an epoch, >= 1.

    Raises:
        ValueError: cursor < 0 or n < 1.

    Example:
        >>> epoch_of(9, 10), epoch_of(10, 10)
        (0, 1)
    """
    _check(cursor, n)
    return cursor // n


def offset_of(cursor: int, n: int) -> int:
    """How many samples of the present epoch are committed, 0 to n - 1.

    Args:
        cursor: samples committed so far, >= 0.
        n: samples in an epoch, >= 1.

    Raises:
        ValueError: cursor < 0 or n < 1.

    Example:
        >>> offset_of(9, 10), offset_of(10, 10)
        (9, 0)
    """
    _check(cursor, n)
    return cursor % n


def epoch_end(cursor: int, n: int) -> int:
    """The position at which the epoch of the next sample ends (exclusive).

    Args:
        cursor: samples committed so far, >= 0.
        n: samples in an epoch, >= 1.

    Raises:
        ValueError: cursor < 0 or n < 1.

    Example:
        >>> epoch_end(9, 10), epoch_end(10, 10)
        (10, 20)
    """
    return (epoch_of(cursor, n) + 1) * n


def step_span(cursor: int, n: int, global_batch: int) -> range:
    """The positions of the next step: the next ``global_batch``, or what is left of the epoch.

    The last batch of an epoch is short rather than dropped, padded or filled from the next epoch.

    Args:
        cursor: samples committed so far, >= 0.
        n: samples in an epoch, >= 1.
        global_batch: samples per optimizer step, >= 1.

    Returns:
        A non-empty range of positions within one epoch, starting at the cursor.

    Raises:
        ValueError: cursor < 0, n < 1 or global_batch < 1.

    Example:
        >>> step_span(0, 10, 4), step_span(8, 10, 4)
        (range(0, 4), range(8, 10))
    """
    if global_batch < 1:
        raise ValueError(f"global_batch = {global_batch}; a step takes at least one sample")
    return range(cursor, min(cursor + global_batch, epoch_end(cursor, n)))


def steps_left(cursor: int, n: int, global_batch: int) -> int:
    """How many steps the present epoch still takes at this global batch, >= 1.

    Args:
        cursor: samples committed so far, >= 0.
        n: samples in an epoch, >= 1.
        global_batch: samples per optimizer step, >= 1.

    Raises:
        ValueError: cursor < 0, n < 1 or global_batch < 1.

    Example:
        >>> steps_left(0, 10, 4), steps_left(8, 10, 4)
        (3, 1)
    """
    if global_batch < 1:
        raise ValueError(f"global_batch = {global_batch}; a step takes at least one sample")
    return -(-(epoch_end(cursor, n) - cursor) // global_batch)


def _check(cursor: int, n: int) -> None:
    if n < 1:
        raise ValueError(f"n = {n}; an epoch has at least one sample")
    if cursor < 0:
        raise ValueError(f"cursor = {cursor}; it counts committed samples from 0")
