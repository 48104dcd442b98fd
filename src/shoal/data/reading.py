"""Reading a micro-batch, in the training process or in a loader process.

A *span* is a pair of positions (start, stop) within one epoch. It is all that travels to a loader
process, which works out the samples from the order by itself.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..children import die_with_parent, internet_sockets, let_go_of
from .order import Indices, Order
from .sources import Source

Span = tuple[int, int]

_WINDOW = 4096

# Positions are counted from 0, so no micro-batch is ever this one: it asks a loader process for
# nothing.
NOTHING: Span = (0, 0)


class SpanReader:
    """Reads the micro-batch of a span; the whole of what a loader process knows of the run.

    Args:
        source: the data set.
        n: samples in an epoch.
        seed: of the run.
        shuffled: whether positions go through the epoch's order, or are the samples themselves.
        restores: whether the global random generators are put back after a read.
    """

    def __init__(
        self, source: Source, *, n: int, seed: int, shuffled: bool, restores: bool
    ) -> None:
        self._source = source
        self._n = n
        self._seed = seed
        self._shuffled = shuffled
        self._restores = restores
        self._window = _Window(-1, 0, np.empty(0, dtype=np.int64))

    def read(self, span: Span) -> object:
        """The batch of the samples at these positions.

        Raises:
            Exception: whatever the data set or the collate function raises, with a note on the
            sample.
        """
        start, stop = span
        epoch, offset = divmod(start, self._n)
        if self._shuffled:
            samples = self._ordered(epoch, offset, offset + stop - start)
        else:
            samples = np.arange(offset, offset + stop - start, dtype=np.int64)
        return self._source.batch(samples, seed=self._seed, epoch=epoch, restores=self._restores)

    def _ordered(self, epoch: int, start: int, stop: int) -> Indices:
        """A piece of the epoch's order, cut from a window that is worked out at once.

        The order of 64 positions takes hardly less time than that of some thousands.
        """
        window = self._window
        first = start - start % _WINDOW
        if window.epoch != epoch or window.first > start or window.last < stop:
            last = min(max(first + _WINDOW, stop), self._n)
            order = Order(n=self._n, seed=self._seed, epoch=epoch)
            window = self._window = _Window(epoch, first, order.take(first, last))
        return window.samples[start - window.first : stop - window.first]


@dataclass(frozen=True)
class _Window:
    """The samples at the positions of an epoch from ``first`` on."""

    epoch: int
    first: int
    samples: Indices

    @property
    def last(self) -> int:
        return self.first + len(self.samples)


class RemoteReader:
    """A :class:`SpanReader` as the data set of loader processes: answers (span, batch or failure).

    A failure is an answer like any other, so that one in a batch that was read ahead, and is no
    longer wanted, disturbs nobody.
    """

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader

    def __getitem__(self, span: Span) -> tuple[Span, object]:
        if span == NOTHING:
            return span, None
        try:
            return span, self._reader.read(span)
        except Exception as error:
            return span, Failure.of(error)


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a loader process to the training process.

    Args:
        error: the exception pickled, or None where it cannot be.
        text: its traceback as the loader process saw it.
    """

    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Pack an exception that was just caught."""
        text = "".join(traceback.format_exception(error))
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)  # some exceptions can be packed and not unpacked
        except Exception:
            packed = None
        return cls(packed, text)

    def reraise(self) -> None:
        """Raise the data set's own exception, the traceback of the loader process as its cause."""
        cause = _InLoaderProcess(self.text)
        if self.error is None:
            raise RuntimeError(
                "the data set failed in a loader process, with an exception that cannot be sent"
            ) from cause
        error: Exception = pickle.loads(self.error)
        raise error from cause


class _InLoaderProcess(Exception):
    """The traceback of another process as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class LoaderProcessSetup:
    """What a loader process does before it reads anything.

    Args:
        parent: process that started it.
        dies_with_parent: whether the kernel ends it when the thread that started it ends.
        inherits: whether it was forked, and so holds the training process's sockets.
        user: the user's own set-up, called with the number of the loader process.
    """

    parent: int
    dies_with_parent: bool
    inherits: bool
    user: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        # Ctrl-C reaches the whole process group; the training process decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.dies_with_parent:
            die_with_parent(self.parent)
        if self.inherits:
            # With copies here, the other workers would not notice that this one closed its
            # connections, or was killed.
            let_go_of(internet_sockets())
        if self.user is not None:
            self.user(number)
