"""A model's own buffers on a fleet: counters, moving averages, codebooks.

They are what is left of the model's state beside parameters and BatchNorm statistics, which have rules
of their own (:mod:`shoal.fleet.norm`). There is no mean of a counter and no sum of a codebook, so one
worker's values count: **those of rank 0**, which has samples in every step. A step that changes a
buffer on any worker makes all of them take over rank 0's, bit for bit; one that is not committed leaves
no trace. So a buffer that counts forward passes counts rank 0's.

Each worker begins a step with the values that were agreed, and the exchange's header says which
buffers were changed by anybody. Only these travel, in one more reduction to which all but rank 0
contribute zeros. What the loop itself changes between two steps counts in the same way.

Buffers registered with ``persistent=False`` are caches, which each worker makes for itself: they are
not part of a model's state and are left alone.

Limits: with ``deterministic=True`` they are no part of what is independent of the number of workers,
because rank 0's share is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.fleet.norm import RunningStatistics
from shoal.world.contract import Work

# Buffers lie in what travels at multiples of this, so that their bytes can be read as any type.
_ALIGNED_BYTES = 16
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ModelBuffers:
    """The persistent buffers of ``model`` that are no running statistics, with a commit point."""

    def __init__(self, model: nn.Module, norm: RunningStatistics) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []
        self._agreed: list[Tensor] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                statistic = name in _STATISTICS and module in norm.layers
                cache = name in module._non_persistent_buffers_set
                if buffer is None or statistic or cache or id(buffer) in seen:
                    continue
                if buffer.layout is not torch.strided:
                    continue
                seen.add(id(buffer))
                self._places.append((module, name))
                self._names.append(f"{prefix}.{name}".lstrip("."))
                self._agreed.append(buffer.detach().clone())
        # Whether the commit point holds a change that the others have not been told of.
        self._changed = [False] * len(self._places)
        self._first: list[Tensor | None] = []
        self._odd: set[int] = set()

    @property
    def slots(self) -> int:
        """Header slots used by a step: one mark per buffer."""
        return len(self._places)

    def mark(self) -> None:
        """Take the present values as the commit point (after a load)."""
        self._changed = [False] * len(self._places)
        for i, agreed in enumerate(self._agreed):
            now = self._now(i)
            if now is not None:
                agreed.copy_(now)

    def begin(self) -> None:
        """Start a step: with what the loop has changed since the last one, which is told to the others."""
        for i, agreed in enumerate(self._agreed):
            now = self._now(i)
            if now is not None and not torch.equal(now, agreed):
                agreed.copy_(now)
                self._changed[i] = True

    def rank_done(self, *, first: bool, last: bool) -> None:
        """In a process that plays several ranks: one of them is through with its micro-batches."""
        if first:
            self._first = [
                None if (now := self._now(i)) is None else now.clone() for i in self._all
            ]
        self.abandon()
        if last:
            for i, value in enumerate(self._first):
                now = self._now(i)
                if value is not None and now is not None:
                    now.copy_(value)

    def write(self, slots: Tensor) -> None:
        """Put this worker's marks into the header."""
        marks = [self._changed[i] or self._differs(i) for i in self._all]
        slots.copy_(torch.tensor(marks, dtype=slots.dtype))

    def agree(
        self, marks: Sequence[float], all_reduce: Callable[[Tensor], Work], *, speaks: bool
    ) -> None:
        """Take over rank 0's values of the buffers that somebody changed.

        Args:
            marks: the summed header slots, so the same on all workers.
            all_reduce: sums a tensor over the fleet in place.
            speaks: whether rank 0 is in this process.

        Raises:
            ExchangeFailed: a peer was lost; the step is to be abandoned.
        """
        moved = [i for i, mark in enumerate(marks) if mark > 0]
        if not moved:
            return
        views, size = [], 0
        for i in moved:
            views.append((size, size + self._agreed[i].nbytes))
            size = -(-views[-1][1] // _ALIGNED_BYTES) * _ALIGNED_BYTES
        table = torch.zeros(size // 8, dtype=torch.int64, device=self._agreed[moved[0]].device)
        raw = table.view(torch.uint8)
        if speaks:
            for i, (start, stop) in zip(moved, views, strict=True):
                now = self._now(i)
                value = self._agreed[i] if now is None else now.detach()
                raw[start:stop].copy_(value.contiguous().view(-1).view(torch.uint8))
        all_reduce(table).wait()
        for i, (start, stop) in zip(moved, views, strict=True):
            agreed = self._agreed[i]
            agreed.copy_(raw[start:stop].view(agreed.dtype).view(agreed.shape))
            now = self._now(i)
            if now is not None:
                now.copy_(agreed)
            self._changed[i] = False

    def abandon(self) -> None:
        """Go back to the values the step began with."""
        for i, agreed in enumerate(self._agreed):
            now = self._now(i)
            if now is not None and not torch.equal(now, agreed):
                now.copy_(agreed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around forward passes that are no training: nothing of them stays."""
        held = [None if (now := self._now(i)) is None else now.clone() for i in self._all]
        try:
            yield
        finally:
            for i, value in enumerate(held):
                now = self._now(i)
                if value is not None and now is not None and not torch.equal(now, value):
                    now.copy_(value)

    @property
    def _all(self) -> range:
        return range(len(self._places))

    def _differs(self, i: int) -> bool:
        now = self._now(i)
        return now is not None and not torch.equal(now, self._agreed[i])

    def _now(self, i: int) -> Tensor | None:
        """The buffer as it is now, which may be another tensor than before; None if it does not fit."""
        module, name = self._places[i]
        now, agreed = module._buffers.get(name), self._agreed[i]
        if now is not None and now.shape == agreed.shape and now.dtype == agreed.dtype:
            return now.detach()
        if i not in self._odd:
            self._odd.add(i)
            print(
                f"shoal: buffer {self._names[i]} = another shape or type than at shoal.init; it is not "
                "kept equal over the workers, and joiners cannot take it over; register it with its "
                "final shape, or with persistent=False if it is a cache",
                file=sys.stderr,
                flush=True,
            )
        return None
