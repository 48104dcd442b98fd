"""Which samples each worker trains on: positions leased in blocks, and an account of every one drawn.

A run has one endless row of positions: position q is sample ``order(q % n; seed, epoch q // n)``. A worker
leases a block of them, draws its batches from it, and leases the next. At a round what it drew since the
last one counts as used. What a worker had drawn since its last round when it died was trained into weights
that are lost: it is discarded and counted, or leased again, as asked. What it had leased and not drawn goes
back. So ``drawn = used + discarded`` holds at every round, whatever joins, leaves or dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np

from shoal.data import Order
from shoal.data.order import Indices
from shoal.errors import UsageError

ShardName = Literal["shared", "fixed"]
LossPolicy = Literal["discard", "lease again"]

_MIX = 0x9E3779B97F4A7C15


class Leases:
    """Positions of a run, leased to workers.

    Args:
        samples: in the training set, n >= 1.
        seed: of the order, 0 <= seed < 2**64.
        block: positions leased at a time, >= 1.
        lost: what becomes of positions that a dead worker drew since its last round.

    Raises:
        UsageError: a number outside its range, or an unknown policy.

    Example:
        >>> leases = Leases(samples=100, seed=0, block=8)
        >>> first, second = leases.draw(0, 12), leases.draw(1, 4)
        >>> leases.settle([0]); leases.drop(1)
        >>> leases.drawn, leases.used, leases.discarded, leases.pending
        (16, 12, 4, 0)
    """

    def __init__(
        self, *, samples: int, seed: int, block: int, lost: LossPolicy = "discard"
    ) -> None:
        if samples < 1 or block < 1:
            raise UsageError(f"samples, block = {samples}, {block}; both are at least 1")
        if lost not in ("discard", "lease again"):
            raise UsageError(f"lost = {lost!r}; known are 'discard' and 'lease again'; choose one")
        self._samples, self._seed, self._block, self._lost = samples, seed, block, lost
        self._orders: dict[int, Order] = {}
        self._mark = 0
        self._returned: deque[Indices] = deque()
        self._leased: dict[int, Indices] = {}
        self._since: dict[int, list[Indices]] = {}
        self.drawn = self.used = self.discarded = 0

    @property
    def pending(self) -> int:
        """Drawn since the last round of whoever drew it: neither used nor discarded so far."""
        return sum(len(part) for parts in self._since.values() for part in parts)

    @property
    def epoch(self) -> float:
        """Passes over the data that have been leased."""
        return self._mark / self._samples

    def draw(self, worker: int, count: int) -> Indices:
        """The worker's next ``count`` samples.

        Args:
            worker: number of the worker.
            count: how many, >= 0.

        Returns:
            Indices into the training set, shape (count,).
        """
        have = self._leased.get(worker, np.empty(0, dtype=np.int64))
        while len(have) < count:
            have = np.concatenate([have, self._lease()])
        positions, self._leased[worker] = have[:count], have[count:]
        self._since.setdefault(worker, []).append(positions)
        self.drawn += count
        return self._samples_at(positions)

    def settle(self, workers: Iterable[int]) -> None:
        """A round of these workers: what they drew since their last one is used."""
        for worker in workers:
            self.used += sum(len(part) for part in self._since.pop(worker, []))

    def drop(self, worker: int) -> None:
        """A worker is gone: what it drew since its last round is lost, what it leased goes back."""
        parts = self._since.pop(worker, [])
        rest = self._leased.pop(worker, None)
        if rest is not None and len(rest):
            self._returned.append(rest)
        self.discarded += sum(len(part) for part in parts)
        if self._lost == "lease again":
            self._returned.extend(part for part in parts if len(part))

    def _lease(self) -> Indices:
        if self._returned:
            return self._returned.popleft()
        first, self._mark = self._mark, self._mark + self._block
        return np.arange(first, self._mark, dtype=np.int64)

    def _samples_at(self, positions: Indices) -> Indices:
        epochs, offsets = np.divmod(positions, self._samples)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            if epoch not in self._orders:
                self._orders[epoch] = Order(n=self._samples, seed=self._seed, epoch=epoch)
                while len(self._orders) > 4:
                    del self._orders[next(iter(self._orders))]
            chosen = epochs == epoch
            found[chosen] = self._orders[epoch][offsets[chosen]]
        return found


class Shards:
    """Each worker's own part of the training set, for experiments: sample j is worker j mod ``workers``'s.

    A worker that joins later takes the part of number mod ``workers``. The account is as that of
    :class:`Leases`.

    Args:
        samples: in the training set, >= ``workers``.
        seed: of each part's order, 0 <= seed < 2**64.
        workers: parts, >= 1.

    Raises:
        UsageError: more parts than samples.
    """

    def __init__(self, *, samples: int, seed: int, workers: int) -> None:
        if not 1 <= workers <= samples:
            raise UsageError(
                f"shards = 'fixed' of {samples} samples for {workers} workers; each needs at least one"
            )
        self._samples, self._seed, self._workers = samples, seed, workers
        self._at: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self.drawn = self.used = self.discarded = 0

    @property
    def pending(self) -> int:
        """As :attr:`Leases.pending`."""
        return sum(self._since.values())

    @property
    def epoch(self) -> float:
        """Samples drawn over samples there are."""
        return self.drawn / self._samples

    def draw(self, worker: int, count: int) -> Indices:
        """As :meth:`Leases.draw`."""
        part = worker % self._workers
        size = len(range(part, self._samples, self._workers))
        first = self._at.get(worker, 0)
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, offsets = np.divmod(positions, size)
        seed = (self._seed + (worker + 1) * _MIX) % 2**64
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = Order(n=size, seed=seed, epoch=epoch)[offsets[chosen]]
        self._at[worker] = first + count
        self._since[worker] = self._since.get(worker, 0) + count
        self.drawn += count
        return part + self._workers * found

    def settle(self, workers: Iterable[int]) -> None:
        """As :meth:`Leases.settle`."""
        self.used += sum(self._since.pop(worker, 0) for worker in workers)

    def drop(self, worker: int) -> None:
        """As :meth:`Leases.drop`; a part's samples are no other worker's."""
        self.discarded += self._since.pop(worker, 0)
