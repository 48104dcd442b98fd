"""The loader: a worker's micro-batches by position, read ahead in the background.

A training loop asks for one span of positions at a time and says which it expects to ask for next.
Loader processes read ahead along that expectation. When it turns out wrong, because the workers
have changed or a step is drawn again, what was read for nothing is thrown away, what is still
wanted is kept, and the processes go on. A batch depends on its positions alone, so reading ahead
can never lose or repeat a sample.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import UsageError
from .order import Order
from .reading import NOTHING, Failure, LoaderProcessSetup, RemoteReader, Span, SpanReader
from .sources import Collate, source_of

Upcoming = Callable[[], Iterable[Span]]


class Draws:
    """The micro-batches of one data set, by position.

    Position p of a run over n samples is the sample ``Order(n, seed, epoch=p // n)[p % n]``.
    Tensors and arrays are gathered in the training process; other data sets are read sample by
    sample, each sample from its own random state (see :func:`shoal.data.sample_generator`), in the
    training process or in loader processes.

    Loader processes are forked where the platform is Linux: nothing need be picklable and no
    ``if __name__ == "__main__"`` is needed. They let go of the training process's internet sockets
    and are ended by the kernel when it is killed; so a data set that talks to a server must connect
    in the process that reads. One that keeps locks or threads of its own is better off with
    ``multiprocessing_context="forkserver"``, where it must be picklable.

    Args:
        dataset: tensors, arrays, a tuple or dict of them, a ``TensorDataset``, a map-style
            ``Dataset``, or anything with ``__getitem__`` and ``__len__``.
        seed: of the run, 0 to 2**64 - 1.
        n: the length the run began with; None for the present length.
        shuffled: False to read in the data set's own order (evaluation).
        num_workers: loader processes of this worker, as in PyTorch's DataLoader; 0 reads in the
            training process.
        collate: makes a batch of a list of samples; None for torch's ``default_collate``.
        prefetch: micro-batches that each loader process reads ahead, >= 1.
        pin_memory: put batches into page-locked memory, for copies to a GPU.
        worker_init: called in each loader process with its number before it reads.
        multiprocessing_context: ``"fork"``, ``"forkserver"`` or ``"spawn"``; None for the choice
            above.

    Raises:
        TypeError: a data set that cannot be read by index.
        ValueError: a seed or a length out of range (``UsageError`` for no samples, a length other
            than ``n``, or another number out of range).

    Example:
        >>> draws = Draws(torch.arange(10), seed=0)
        >>> first, second = draws.fetch(0, 6), draws.fetch(6, 10)
        >>> sorted(torch.cat([first, second]).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        dataset: object,
        *,
        seed: int,
        n: int | None = None,
        shuffled: bool = True,
        num_workers: int = 0,
        collate: Collate | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        worker_init: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if num_workers < 0:
            raise UsageError(f"num_workers = {num_workers}; use 0 or more loader processes")
        if prefetch < 1:
            raise UsageError(f"prefetch = {prefetch}; a loader process reads at least 1 ahead")
        self._source = source_of(dataset, collate)
        self.n = len(self._source) if n is None else n
        self.check_length()
        Order(n=self.n, seed=seed, epoch=0)  # refuses a length or seed out of range now, not later
        self._pins = _may_pin(pin_memory)
        self._background: _Background | None = None
        reading = {"n": self.n, "seed": seed}
        self._reader = SpanReader(self._source, **reading, shuffled=shuffled, restores=True)
        if num_workers and self._source.in_memory:
            warnings.warn(
                f"num_workers = {num_workers} has no effect on a data set of tensors or arrays: a "
                "batch is one gather, quicker than its way back from a loader process",
                stacklevel=2,
            )
        elif num_workers:
            remote = SpanReader(self._source, **reading, shuffled=shuffled, restores=False)
            self._background = _Background(
                RemoteReader(remote),
                processes=num_workers,
                prefetch=prefetch,
                pins=self._pins,
                user_init=worker_init,
                context=multiprocessing_context or _default_context(),
            )
        self._closed = False

    def fetch(self, start: int, stop: int, upcoming: Upcoming | None = None) -> object:
        """The batch of the samples at positions start <= p < stop.

        Args:
            start: first position, counted from the start of the run, >= 0.
            stop: one past the last; > start and within the same epoch.
            upcoming: called for the spans most likely asked for next, in order; only as many are
                taken as are read ahead. None: nothing is read ahead.

        Returns:
            What the collate function makes of the samples; for tensors the same structure with a
            batch dimension. New tensors that nobody else holds.

        Raises:
            ValueError: an empty span, one that crosses the end of an epoch, or a loader that is
            closed. Exception: whatever the data set raises, its traceback in a loader process as
            the cause.
        """
        if self._closed:
            raise ValueError("these draws are closed; make new ones to read on")
        self._check_span((start, stop))
        if self._background is None:
            batch = self._reader.read((start, stop))
            return _pinned(batch) if self._pins else batch
        return self._background.fetch((start, stop), upcoming)

    def check_length(self) -> None:
        """Make sure that the data set has the length the run began with.

        Raises:
            UsageError: it has another, so positions would mean other samples.
        """
        length = len(self._source)
        if length != self.n:
            raise UsageError(
                f"the data set has {length} samples, but had {self.n} when the run began; it must "
                "keep its length, or samples would be missed and repeated. Make the change between "
                "runs"
            )

    def close(self) -> None:
        """End the loader processes. Harmless when called twice."""
        self._closed = True
        if self._background is not None:
            self._background.close()

    def __enter__(self) -> Draws:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_span(self, span: Span) -> None:
        start, stop = span
        if not 0 <= start < stop or (stop - 1) // self.n != start // self.n:
            raise ValueError(
                f"positions [{start}, {stop}) of epochs of {self.n} samples; a span is not empty "
                "and lies within one epoch"
            )


class _Feed:
    """What loader processes read next: the spans put here, or nothing when there are none.

    It never ends, so that the loader processes never do, and every answer taken sends one more
    request: the number under way stays the same.
    """

    def __init__(self) -> None:
        self.todo: deque[Span] = deque()
        self.under_way: deque[Span] = deque()

    def __iter__(self) -> Iterator[Span]:
        return self

    def __next__(self) -> Span:
        span = self.todo.popleft() if self.todo else NOTHING
        self.under_way.append(span)
        return span


class _Background:
    """Loader processes and what they have read ahead."""

    def __init__(
        self,
        reader: RemoteReader,
        *,
        processes: int,
        prefetch: int,
        pins: bool,
        user_init: Callable[[int], None] | None,
        context: str,
    ) -> None:
        if context not in multiprocessing.get_all_start_methods():
            raise UsageError(
                f"multiprocessing_context = {context!r}; here it is one of "
                f"{', '.join(multiprocessing.get_all_start_methods())}"
            )
        self._reader = reader
        self._processes = processes
        self._prefetch = prefetch
        self._pins = pins
        self._user_init = user_init
        self._context = context
        self._feed = _Feed()
        self._early: dict[Span, object] = {}
        self._answers: Iterator[tuple[Span, object]] | None = None
        self._children: list[BaseProcess] = []

    def fetch(self, span: Span, upcoming: Upcoming | None) -> object:
        ahead = islice(upcoming(), self._processes * self._prefetch) if upcoming else ()
        wanted = dict.fromkeys((span, *ahead))
        self._early = {s: batch for s, batch in self._early.items() if s in wanted}
        under_way = set(self._feed.under_way)
        self._feed.todo = deque(s for s in wanted if s not in under_way and s not in self._early)
        if self._answers is None:
            self._start()
        while span not in self._early:
            answered, batch = self._next_answer()
            sent = self._feed.under_way.popleft()
            assert answered == sent, f"asked for {sent}, got {answered}"
            if answered in wanted:
                self._early[answered] = batch
        batch = self._early.pop(span)
        if isinstance(batch, Failure):
            batch.reraise()
        return batch

    def _next_answer(self) -> tuple[Span, object]:
        assert self._answers is not None
        try:
            for child in self._children:
                if not child.is_alive():
                    raise RuntimeError(
                        f"loader process (pid {child.pid}) ended with {child.exitcode}; a negative "
                        "number is a signal, -9 most often for want of memory. Fewer num_workers or "
                        "a smaller prefetch take less"
                    )
            return next(self._answers)
        except BaseException:
            # A loader process is gone, or Ctrl-C came between: what is under way is unknown, so the
            # next fetch starts afresh.
            self.close()
            raise

    def _start(self) -> None:
        """Start the loader processes, which at once begin to read what is to do."""
        on_main = threading.current_thread() is threading.main_thread()
        loader = DataLoader(
            cast("torch.utils.data.Dataset[tuple[Span, object]]", self._reader),
            batch_size=None,
            sampler=self._feed,
            num_workers=self._processes,
            prefetch_factor=self._prefetch,
            collate_fn=_unchanged,
            pin_memory=self._pins,
            multiprocessing_context=self._context,
            # Without a generator of its own it would draw from the training process's.
            generator=torch.Generator(),
            worker_init_fn=LoaderProcessSetup(
                parent=os.getpid(),
                # The kernel's promise is about the thread that forks, which only for the main
                # thread means the process.
                dies_with_parent=self._context == "fork" and on_main,
                inherits=self._context == "fork",
                user=self._user_init,
            ),
        )
        before = set(multiprocessing.active_children())
        with warnings.catch_warnings():
            # Python 3.12 on warns of a fork among threads. None of them is needed in the loader
            # process, which runs the data set alone and ends without the interpreter's tidying up.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            self._answers = iter(loader)
        self._children = [p for p in multiprocessing.active_children() if p not in before]

    def close(self) -> None:
        answers, self._answers = self._answers, None
        self._early.clear()
        self._feed = _Feed()
        if answers is None:
            return
        # Dropping the iterator would do, but only once the last traceback that holds it is gone.
        getattr(answers, "_shutdown_workers", lambda: None)()
        del answers
        for child in self._children:
            child.join(timeout=1.0)
            if child.is_alive():
                child.kill()
                child.join()
        self._children = []


def _default_context() -> str:
    """Fork on Linux, whatever Python's own default is; elsewhere Python's own."""
    return "fork" if sys.platform.startswith("linux") else multiprocessing.get_start_method()


def _unchanged(answer: object) -> object:
    return answer


def _may_pin(asked: bool) -> bool:
    if asked and not torch.accelerator.is_available():
        warnings.warn(
            "pin_memory = True has no effect: page-locked memory is for copies to an accelerator, "
            "and torch finds none",
            stacklevel=3,
        )
        return False
    return asked


def _pinned(batch: object) -> object:
    """The batch with its tensors in page-locked memory, its structure kept."""
    if isinstance(batch, Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, Mapping):
        named = cast("Mapping[object, object]", batch)
        return {name: _pinned(member) for name, member in named.items()}
    if isinstance(batch, list):
        return [_pinned(member) for member in cast("list[object]", batch)]
    if isinstance(batch, tuple):
        members = cast("tuple[object, ...]", batch)
        make = cast("Callable[[list[object]], object]", getattr(members, "_make", tuple))
        return make([_pinned(member) for member in members])
    own = getattr(batch, "pin_memory", None)
    return own() if callable(own) else batch
