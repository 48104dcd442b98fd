"""Which sample is the i-th of epoch e: a keyed bijection computed on demand.

An epoch's order is never stored. ``order(i)`` is computed for just the positions asked for, so a
worker that joins, or a run that resumes, needs the seed and the epoch and nothing else, and a data
set of 2**40 samples costs no more memory than one of a thousand.

For n > 1024 the bijection is a Feistel network on Z_a x Z_b, a = ceil(sqrt(n)), b = ceil(n / a):

    x = L * b + R
    rounds k = 0, 2, 4, 6:   L <- (L + F_k(R)) mod a
    rounds k = 1, 3, 5, 7:   R <- (R + F_k(L)) mod b
    F_k(h) = floor(m * top40(mix(A_k * h + B_k)) / 2**40)      m = a or b, whichever half is changed
    mix(y) = (y ^ (y >> 32)) * C                               all modulo 2**64

with the round keys A_k (odd) and B_k drawn from SHAKE-256 of (seed, epoch, n). Since a * b - n < a,
at most about one index in sqrt(n) falls outside [0, n) and is sent through again (cycle walking),
whatever n is: just above a power of two costs no more than elsewhere.

For n <= 1024 a Feistel network has too few round values to be near uniform, so the order there is a
table: the ranks of n pseudo-random 64-bit words, at most 8 KiB.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

MAX_SAMPLES = 2**40
_TABLE_SAMPLES = 1024
_ROUNDS = 8
# Five buffers of this many 64-bit words stay inside the second-level cache.
_CHUNK = 8192
_MIX = np.uint64(0xBF58476D1CE4E5B9)  # an odd constant with well-spread bits (splitmix64)
_FOLD, _TOP, _SCALE = np.uint64(32), np.uint64(24), np.uint64(40)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one epoch: a bijection on [0, n), its keys derived once.

    ``order[i]`` is the sample at position i, ``order.take(start, stop)`` the samples at a range of
    positions, ``order.positions(samples)`` the way back. The answer for a position does not depend
    on what else is asked with it. Compared and hashed by (n, seed, epoch) alone.

    Args:
        n: samples in an epoch, 1 to 2**40.
        seed: of the run, 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.

    Raises:
        ValueError: n, seed or epoch outside its range.

    Example:
        >>> order = Order(n=10, seed=0, epoch=0)
        >>> sorted(order.take(0, 10).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> order[3] == int(order.take(2, 5)[1])
        True
    """

    n: int
    seed: int
    epoch: int
    _table: Indices | None = field(init=False, repr=False, compare=False, default=None)
    _keys: tuple[tuple[np.uint64, np.uint64], ...] = field(
        init=False, repr=False, compare=False, default=()
    )

    def __post_init__(self) -> None:
        _check(self.n, self.seed, self.epoch)
        material = b"".join(
            value.to_bytes(8, "little") for value in (self.seed, self.epoch, self.n)
        )
        stream = hashlib.shake_256(b"shoal order 1" + material)
        if self.n <= _TABLE_SAMPLES:
            words = np.frombuffer(stream.digest(8 * self.n), dtype="<u8")
            table = np.argsort(words, kind="stable").astype(np.int64)
            table.setflags(write=False)
            object.__setattr__(self, "_table", table)
            return
        words = np.frombuffer(stream.digest(16 * _ROUNDS), dtype="<u8").astype(np.uint64)
        keys = tuple((words[2 * k] | np.uint64(1), words[2 * k + 1]) for k in range(_ROUNDS))
        object.__setattr__(self, "_keys", keys)

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: Indices) -> Indices: ...
    def __getitem__(self, index: int | Indices) -> int | Indices:
        """The sample at a position (an int), or at each of an array of positions.

        Raises:
            IndexError: a position outside [0, n); negative positions do not count from the end.
            TypeError: neither an integer nor an array of integers.
        """
        if isinstance(index, np.ndarray) and index.ndim:
            return self._map(self._checked(index, "position"), backwards=False)
        one = np.array([operator.index(index)], dtype=np.int64)
        return int(self._map(self._checked(one, "position"), backwards=False)[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.n, _CHUNK):
            yield from self.take(start, min(start + _CHUNK, self.n)).tolist()

    def take(self, start: int, stop: int) -> Indices:
        """The samples at positions start <= i < stop.

        Args:
            start: first position, 0 <= start <= stop.
            stop: one past the last, <= n.

        Returns:
            A new int64 array of length stop - start.

        Raises:
            IndexError: the range does not lie within [0, n].
        """
        if not 0 <= start <= stop <= self.n:
            raise IndexError(
                f"positions [{start}, {stop}) of an epoch of {self.n} samples; "
                "0 <= start <= stop <= n must hold"
            )
        return self._map(np.arange(start, stop, dtype=np.int64), backwards=False)

    def positions(self, samples: Indices) -> Indices:
        """The positions at which these samples come: the inverse of indexing.

        Args:
            samples: int64 array of samples in [0, n).

        Returns:
            A new int64 array of the same shape.

        Raises:
            IndexError: a sample outside [0, n).
        """
        return self._map(self._checked(samples, "sample"), backwards=True)

    def _checked(self, index: Indices, what: str) -> Indices:
        """A fresh contiguous int64 copy of ``index``, every value within [0, n)."""
        if index.dtype.kind not in "iu":
            raise TypeError(f"{what}s of type {index.dtype}; use an array of int64")
        low, high = (int(index.min()), int(index.max())) if index.size else (0, 0)
        if low < 0 or high >= self.n:
            bad = low if low < 0 else high
            raise IndexError(
                f"{what} = {bad} of an epoch of {self.n} samples; 0 <= i < n must hold"
            )
        return np.array(index, dtype=np.int64, order="C", copy=True)

    def _map(self, index: Indices, *, backwards: bool) -> Indices:
        """Replace ``index`` (owned by the caller's answer) by its image, in place."""
        if self._table is not None:
            return (np.argsort(self._table) if backwards else self._table)[index]
        words = index.reshape(-1).view(np.uint64)
        buffers = np.empty((4, min(words.size, _CHUNK)), dtype=np.uint64)
        for start in range(0, words.size, _CHUNK):
            self._walk(words[start : start + _CHUNK], buffers, backwards=backwards)
        return index

    def _walk(self, words: _Words, buffers: _Words, *, backwards: bool) -> None:
        """One pass of the network over a chunk in place; whatever left [0, n) goes again."""
        self._pass(words, buffers, backwards=backwards)
        n = np.uint64(self.n)
        if not words.size or words.max() < n:
            return
        outside = np.flatnonzero(words >= n)
        while outside.size:
            again = words[outside]
            self._pass(again, buffers, backwards=backwards)
            words[outside] = again
            outside = outside[again >= n]

    def _pass(self, words: _Words, buffers: _Words, *, backwards: bool) -> None:
        """The Feistel network itself on [0, a * b), in place, without allocation."""
        root = math.isqrt(self.n - 1) + 1
        a, b = np.uint64(root), np.uint64(-(-self.n // root))
        left, right, t, u = (row[: words.size] for row in buffers)
        np.floor_divide(words, b, out=left)
        np.multiply(left, b, out=t)
        np.subtract(words, t, out=right)
        for k in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
            source, target, modulus = (right, left, a) if k % 2 == 0 else (left, right, b)
            multiplier, offset = self._keys[k]
            np.multiply(source, multiplier, out=t)
            np.add(t, offset, out=t)
            np.right_shift(t, _FOLD, out=u)
            np.bitwise_xor(t, u, out=t)
            np.multiply(t, _MIX, out=t)
            np.right_shift(t, _TOP, out=t)
            np.multiply(t, modulus, out=t)
            np.right_shift(t, _SCALE, out=t)
            # Both terms are below the modulus, so the remainder is the smaller of the unsigned sum
            # (difference) and the same less (plus) the modulus: the wrong one wraps to a huge one.
            if backwards:
                np.subtract(target, t, out=target)
                np.add(target, modulus, out=t)
            else:
                np.add(target, t, out=target)
                np.subtract(target, modulus, out=t)
            np.minimum(target, t, out=target)
        np.multiply(left, b, out=words)
        np.add(words, right, out=words)


@overload
def order(index: int, *, n: int, seed: int, epoch: int) -> int: ...
@overload
def order(index: Indices, *, n: int, seed: int, epoch: int) -> Indices: ...
def order(index: int | Indices, *, n: int, seed: int, epoch: int) -> int | Indices:
    """The sample at a position of an epoch, or the samples at an array of positions.

    A bijection on [0, n) for every (n, seed, epoch), in memory that does not grow with n. For many
    calls with the same epoch keep an :class:`Order`.

    Args:
        index: position in [0, n), an int or an int64 array.
        n: samples in an epoch, 1 to 2**40.
        seed: of the run, 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.

    Returns:
        An int for an int, a new int64 array of the same shape for an array.

    Raises:
        IndexError: a position outside [0, n).
        TypeError: a position that is not an integer.
        ValueError: n, seed or epoch outside its range.

    Example:
        >>> sorted(order(i, n=5, seed=7, epoch=1) for i in range(5))
        [0, 1, 2, 3, 4]
    """
    return _recent(n, seed, epoch)[index]


@lru_cache(maxsize=8)
def _recent(n: int, seed: int, epoch: int) -> Order:
    return Order(n=n, seed=seed, epoch=epoch)


def _check(n: int, seed: int, epoch: int) -> None:
    if not 1 <= n <= MAX_SAMPLES:
        raise ValueError(f"n = {n}; an epoch has 1 to 2**40 samples")
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} = {value}; use an integer from 0 to 2**64 - 1")
