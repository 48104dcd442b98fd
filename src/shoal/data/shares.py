"""How a step's samples are dealt to the workers: whole micro-batches, in order.

The step is cut into micro-batches first, without looking at the number of workers, and these are
dealt afterwards. So with a constant global batch the micro-batches of a step are the same whoever
computes them, and only the sums over them are grouped otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples start <= i < stop of a step, counted from the step's first; never empty.

    ``len()`` is the number of samples.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def shares(samples: int, micro_batch: int, workers: int) -> list[list[MicroBatch]]:
    """Cut a step into micro-batches and deal them to the workers in contiguous blocks.

    Numbers of micro-batches differ by at most one between workers; the lower ranks have the more.
    Only the last micro-batch of the step can be short; a rank beyond their number gets none.

    Args:
        samples: of the step, >= 0.
        micro_batch: samples per forward pass, >= 1.
        workers: of the step, >= 1.

    Returns:
        For each rank its micro-batches in order, counted from the step's first sample.

    Raises:
        ValueError: an argument below its least value.

    Example:
        >>> [[len(m) for m in share] for share in shares(16, 4, 3)]
        [[4, 4], [4], [4]]
    """
    _check(samples, micro_batch, workers)
    return [_dealt(samples, micro_batch, workers, rank) for rank in range(workers)]


def share(samples: int, micro_batch: int, workers: int, rank: int) -> list[MicroBatch]:
    """One worker's part of :func:`shares`, without the others'.

    Args:
        samples: of the step, >= 0.
        micro_batch: samples per forward pass, >= 1.
        workers: of the step, >= 1.
        rank: 0 to workers - 1.

    Raises:
        ValueError: an argument outside its range.

    Example:
        >>> share(10, 4, 2, 0)
        [MicroBatch(start=0, stop=4), MicroBatch(start=4, stop=8)]
    """
    _check(samples, micro_batch, workers)
    if not 0 <= rank < workers:
        raise ValueError(f"rank = {rank}; with workers = {workers} it is 0 to {workers - 1}")
    return _dealt(samples, micro_batch, workers, rank)


def _dealt(samples: int, micro_batch: int, workers: int, rank: int) -> list[MicroBatch]:
    pieces = -(-samples // micro_batch)
    each, extra = divmod(pieces, workers)
    first = rank * each + min(rank, extra)
    last = first + each + (rank < extra)
    return [
        MicroBatch(k * micro_batch, min((k + 1) * micro_batch, samples)) for k in range(first, last)
    ]


def _check(samples: int, micro_batch: int, workers: int) -> None:
    if samples < 0:
        raise ValueError(f"samples = {samples}; a step has none or more")
    if micro_batch < 1:
        raise ValueError(f"micro_batch = {micro_batch}; a forward pass takes at least one sample")
    if workers < 1:
        raise ValueError(f"workers = {workers}; a step has at least one worker")
