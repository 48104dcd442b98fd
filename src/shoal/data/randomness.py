"""Per-sample randomness: what a data set draws for a sample depends on (seed, epoch, index) alone.

Augmentation that draws from a worker's own generator gives another picture when another worker, or
another loader process, happens to read the sample. Here every read starts from a state derived from
the run's seed, the epoch and the sample's index, so it comes out the same whoever reads it and
however often.

A data set may draw from the global generators of torch (CPU), numpy and ``random``, which are set
before each read, or from :func:`sample_generator`.
"""

from __future__ import annotations

import hashlib
import random
import struct
from contextvars import ContextVar, Token
from types import TracebackType

import numpy as np
import torch

_reading: ContextVar[SampleRandomness | None] = ContextVar("shoal_reading", default=None)


def sample_seed(seed: int, epoch: int, index: int, stream: int = 0) -> int:
    """A 64-bit seed for one sample of one epoch.

    A keyed hash (BLAKE2b), so neighbouring samples, epochs and seeds have unrelated values.

    Args:
        seed: of the run, 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 1.
        index: of the sample in the data set, 0 to 2**64 - 1.
        stream: which of several independent seeds of the same sample, 0 to 2**64 - 1. 0 seeds the
            global generators, k the k-th call of :func:`sample_generator` in a read.

    Returns:
        An integer in [0, 2**64).

    Raises:
        ValueError: an argument outside its range.

    Example:
        >>> sample_seed(0, 0, 1) == sample_seed(0, 0, 1)
        True
        >>> sample_seed(0, 0, 1) == sample_seed(0, 1, 1)
        False
    """
    try:
        material = struct.pack("<QQQQ", seed, epoch, index, stream)
    except struct.error as error:
        raise ValueError(
            f"seed, epoch, index, stream = {seed}, {epoch}, {index}, {stream}; "
            "each is an integer from 0 to 2**64 - 1"
        ) from error
    digest = hashlib.blake2b(material, digest_size=8, person=b"shoal sample 1")
    return int.from_bytes(digest.digest(), "little")


def sample_generator() -> torch.Generator:
    """A fresh generator for the sample that is being read, to be called inside ``__getitem__``.

    Works in the training process and in loader processes alike. Each call within one read gives
    another, independent generator, so that two transforms of a sample that both ask do not draw the
    same numbers; the k-th call always gives the same one.

    Returns:
        A new CPU generator that nobody else holds.

    Raises:
        RuntimeError: called outside of a read, or in a thread that the data set started itself.
    """
    current = _reading.get()
    if current is None:
        raise RuntimeError(
            "sample_generator() outside of a read; it works inside a data set's __getitem__ while "
            "shoal reads a sample, in the thread that shoal called. Elsewhere use a "
            "torch.Generator() of your own"
        )
    return current.generator()


class SampleRandomness:
    """A context in which samples of one epoch are read, each from its own random state.

    On leaving it the global generators are put back to where they were on entering, so that reading
    data leaves no trace in the training process's own randomness (dropout, say).

    Args:
        seed: of the run.
        epoch: of the samples.
        restores: whether to put the global generators back; a loader process has no need for it.

    Example:
        >>> with SampleRandomness(0, 3) as randomness:
        ...     randomness.at(17)
        ...     first = torch.rand(())
        >>> with SampleRandomness(0, 3) as randomness:
        ...     randomness.at(17)
        ...     again = torch.rand(())
        >>> bool(first == again)
        True
    """

    __slots__ = ("_before", "_calls", "_epoch", "_index", "_restores", "_seed", "_token")

    def __init__(self, seed: int, epoch: int, *, restores: bool = True) -> None:
        self._seed = seed
        self._epoch = epoch
        self._restores = restores
        self._index = -1
        self._calls = 0
        self._before: _Global | None = None
        self._token: Token[SampleRandomness | None] | None = None

    def __enter__(self) -> SampleRandomness:
        self._before = _Global() if self._restores else None
        self._token = _reading.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._token is not None
        _reading.reset(self._token)
        if self._before is not None:
            self._before.put_back()

    def at(self, index: int) -> None:
        """Set the global generators for the sample that is read next."""
        self._index = index
        self._calls = 0
        value = sample_seed(self._seed, self._epoch, index)
        # torch and numpy run the same Mersenne Twister and take 32 bits to seed it: the two halves
        # keep them apart. torch.manual_seed would walk through the accelerators too, at 80 times
        # the cost.
        torch.default_generator.manual_seed(value & 0xFFFFFFFF)
        np.random.seed(value >> 32)
        random.seed(value)

    def generator(self) -> torch.Generator:
        """What :func:`sample_generator` returns at this point of the read."""
        if self._index < 0:
            raise RuntimeError("no sample is being read yet; call at(index) first")
        self._calls += 1
        value = sample_seed(self._seed, self._epoch, self._index, self._calls)
        return torch.Generator().manual_seed(value)


class _Global:
    """The state of the three global generators at one moment."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def put_back(self) -> None:
        torch.default_generator.set_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
