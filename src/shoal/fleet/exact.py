"""Sums whose result does not depend on the order of their terms.

A float32 term is split into two integers, ``hi`` in units of 2**-20 and ``lo`` in units of 2**-72, and
integers are added. Integer addition is associative, so one worker that adds 16 micro-batches and four
workers that add four each get the same bits. Terms up to 2**40 in size, and up to 4,096 of them, are
represented to 2**-72; larger or non-finite ones are reported instead of wrapped.

Source: the idea of an order-free accumulator is that of reproducible summation (Demmel and Nguyen
2015); the two fixed scales are ours. Costs four times the bytes of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.fleet.reducer import Reducer

HI_BITS = 20
LO_BITS = 72
LARGEST = float(2**40)


class ExactSum:
    """An order-free sum of float32 vectors of ``size`` entries.

    ``parts`` (int64, ``[2, size]``) is what travels: reduce it with an integer sum.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.parts = torch.zeros(2, size, dtype=torch.int64, device=device)

    def zero(self) -> None:
        """Start again."""
        self.parts.zero_()

    def add(self, start: int, values: Tensor) -> bool:
        """Add ``values`` (float32, flat) at ``start``; False if one is non-finite or beyond 2**40."""
        wide = values.to(torch.float64)
        fits = bool((wide.abs() < LARGEST).all())
        if not fits:
            return False
        hi = torch.round(wide * 2.0**HI_BITS)
        lo = torch.round((wide - hi * 2.0**-HI_BITS) * 2.0**LO_BITS)
        stop = start + values.numel()
        self.parts[0, start:stop] += hi.to(torch.int64)
        self.parts[1, start:stop] += lo.to(torch.int64)
        return True

    def read(self, start: int, out: Tensor) -> None:
        """Write the sum of the entries from ``start`` on into ``out`` (flat, any float type)."""
        stop = start + out.numel()
        hi = self.parts[0, start:stop].to(torch.float64) * 2.0**-HI_BITS
        lo = self.parts[1, start:stop].to(torch.float64) * 2.0**-LO_BITS
        out.copy_(hi + lo)


class ExactGradients:
    """The order-free sum of a step's gradients and movements of running statistics.

    Args:
        reducer: owns the gradients; they pass through it micro-batch by micro-batch.
        norm_size: entries of the running statistics, behind the gradients.
    """

    def __init__(self, reducer: Reducer, norm_size: int) -> None:
        self._reducer = reducer
        self._norm_start = sum(bucket.size for bucket in reducer.buckets)
        self._sum = ExactSum(self._norm_start + norm_size, reducer.device)

    @property
    def parts(self) -> Tensor:
        """What is to be reduced."""
        return self._sum.parts

    def zero(self) -> None:
        """Start a step."""
        self._sum.zero()

    def take(self, moved: Tensor | None) -> bool:
        """Move one micro-batch's gradients out of the buckets into the sum; False if one does not fit."""
        start, fits = 0, True
        for bucket in self._reducer.buckets:
            part = bucket.flat[: bucket.size]
            fits &= self._sum.add(start, part)
            start += bucket.size
            part.zero_()
        if moved is not None:
            fits &= self._sum.add(start, moved)
        return fits

    def give_back(self) -> None:
        """Write the fleet's sum of gradients into the buckets."""
        start = 0
        for bucket in self._reducer.buckets:
            self._sum.read(start, bucket.flat[: bucket.size])
            start += bucket.size

    def read_moved(self, out: Tensor) -> Tensor:
        """Write the fleet's movement of the running statistics into ``out`` and return it."""
        self._sum.read(self._norm_start, out)
        return out
