"""Workers in threads, each with its own row only: what a rule may see in a real process.

Their collectives meet at a barrier and are computed by one :class:`~shoal.sync.stacked.Stacked` exchange, so
that a rule that gives other numbers here than on stacked rows has looked at rows that are not its own. Visits
to the server are made in the order of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoal.sync.stacked import Stacked

T = TypeVar("T")

PATIENCE_SECONDS = 20.0
"""After so long a worker that waits for another one gives up: some of them ask for different things."""


class _Meeting:
    """Where the workers' calls come together."""

    def __init__(self, workers: int) -> None:
        self.stacked = Stacked(workers)
        self.given: list[Any] = [None] * workers
        self.answer: Any = None
        self.turn = 0
        self.barrier = threading.Barrier(workers)
        self.changed = threading.Condition()


class OneRow:
    """The exchange of one worker among several threads.

    Args:
        meeting: shared by all.
        rank: of this worker.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._visit: set[str] = set()
        self.ranks = (rank,)
        self.workers = meeting.stacked.workers
        self.members = meeting.stacked.members
        self.group_of = meeting.stacked.group_of

    def mean(self, x: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :class:`~shoal.sync.contract.Exchange`."""

        def of_all(given: list[tuple[Tensor, Tensor | None]]) -> Tensor:
            shares = [share for _, share in given if share is not None]
            together = torch.cat([row for row, _ in given])
            return self._meeting.stacked.mean(
                together, weights=torch.cat(shares) if shares else None
            )

        return self._together((x, weights), of_all)

    def largest(self, x: Tensor) -> Tensor:
        """See :class:`~shoal.sync.contract.Exchange`."""
        return self._together(x, lambda given: self._meeting.stacked.largest(torch.cat(given)))

    def scores(self, own: Sequence[float]) -> list[float]:
        """See :class:`~shoal.sync.contract.Exchange`."""
        (score,) = own
        return self._together(score, self._meeting.stacked.scores)

    def from_workers(self, x: Tensor, sources: Sequence[int]) -> Tensor:
        """See :class:`~shoal.sync.contract.Exchange`."""
        rows = self._together(
            x, lambda given: self._meeting.stacked.from_workers(torch.cat(given), sources)
        )
        return rows[self._rank : self._rank + 1]

    def send(self, x: Tensor, targets: Sequence[int]) -> Tensor:
        """See :class:`~shoal.sync.contract.Exchange`."""
        rows = self._together(
            x, lambda given: self._meeting.stacked.send(torch.cat(given), targets)
        )
        return rows[self._rank : self._rank + 1]

    def place(self, value: Tensor) -> None:
        """See :class:`~shoal.sync.contract.Exchange`."""
        self._together(value, lambda given: self._meeting.stacked.place(given[0]))

    def fetch(self, row: int) -> Tensor:
        """See :class:`~shoal.sync.contract.Exchange`; waits for its turn among the ranks."""
        return self._in_turn("fetch", lambda: self._meeting.stacked.fetch(self._rank))

    def push(self, row: int, change: Tensor) -> None:
        """See :class:`~shoal.sync.contract.Exchange`; waits for its turn among the ranks."""
        self._in_turn("push", lambda: self._meeting.stacked.push(self._rank, change))

    def _together(self, given: object, compute: Callable[[Any], T]) -> T:
        meeting = self._meeting
        meeting.given[self._rank] = given
        if meeting.barrier.wait(PATIENCE_SECONDS) == 0:
            meeting.answer = compute(list(meeting.given))
        meeting.barrier.wait(PATIENCE_SECONDS)
        answer = meeting.answer
        meeting.barrier.wait(PATIENCE_SECONDS)
        return _own_copy(answer)

    def _in_turn(self, what: str, act: Callable[[], T]) -> T:
        """A visit is one fetch and one push, in either order; then it is the next rank's turn."""
        meeting = self._meeting
        with meeting.changed:
            if not meeting.changed.wait_for(lambda: meeting.turn == self._rank, PATIENCE_SECONDS):
                raise threading.BrokenBarrierError
            answer = act()
            self._visit.add(what)
            if len(self._visit) == 2:
                self._visit.clear()
                meeting.turn = (meeting.turn + 1) % self.workers
                meeting.changed.notify_all()
        return _own_copy(answer)


def _own_copy(answer: T) -> T:
    """An answer that no other worker can write into."""
    return cast(T, answer.clone()) if isinstance(answer, Tensor) else answer


def in_lockstep(workers: int, work: Callable[[OneRow], T]) -> list[T]:
    """Run ``work`` for each worker, each in a thread with an exchange of its own.

    Args:
        workers: how many, >= 1.
        work: what a worker does with its exchange.

    Returns:
        What each returned, by rank.

    Raises:
        Exception: what the first of them raised; the others are let go.
    """
    meeting = _Meeting(workers)
    results: list[Any] = [None] * workers
    failures: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(OneRow(meeting, rank))
        except threading.BrokenBarrierError as error:
            failures.append(error)
        except Exception as error:
            failures.insert(0, error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * PATIENCE_SECONDS)
    if failures:
        raise failures[0]
    return results
