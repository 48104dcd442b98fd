"""Several workers of one fleet as threads of one process, for tests.

Each thread runs an ordinary training loop on its own replica with its own :class:`ThreadWorld`. The
worlds share a meeting point, so empty shares, gathers, synchronised statistics, failures seen by one
member only, joins, leaves and kills take the same way through the fleet as with real processes, without
sockets, ports or timing: failures are scripted by the number of the exchange.

Only one thread runs at a time; it hands over where it waits for the others, and takes its state of
torch's global random generator along. So a test gives the same result every time, and two threads
never mix their dropout.

Example:
    >>> import torch, shoal
    >>> def worker(world):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with shoal.init(model, optimizer, world=world) as fleet:
    ...         for epoch in fleet.epochs(1):
    ...             for x in fleet.batches(torch.ones(8, 2), local_batch=2):
    ...                 fleet.backward(model(x).mean())
    ...                 done = fleet.step()
    ...     return fleet.step_count
    >>> run_workers(2, worker)
    [2, 2]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.errors import ExchangeFailed
from shoal.testing.meeting import Meeting, Mismatch, Over, ThreadScript
from shoal.world.contract import Change, Membership, StateHolder

__all__ = ["Ended", "Mismatch", "ThreadScript", "ThreadWorld", "run_workers"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Ended:
    """A worker's result when its function did not return.

    ``how`` is ``killed``; ``left`` with the exit code; or ``late``: it joined when the others had ended.
    """

    how: str
    code: int | None = None


def run_workers(
    workers: int,
    function: Callable[[ThreadWorld], ResultT],
    script: ThreadScript | None = None,
    *,
    timeout_seconds: float = 60.0,
) -> list[ResultT | Ended]:
    """Run ``function(world)`` in as many threads, and return what each returned, by worker.

    Args:
        workers: threads, >= 1, those that join later included.
        function: one worker's whole life; called with its world.
        script: failures, leaves, kills and joins.
        timeout_seconds: after this the whole fleet is aborted.

    Returns:
        The results; :class:`Ended` for a worker that was killed or left by SystemExit.

    Raises:
        BaseException: whatever the first failing worker raised; the others are stopped.
        TimeoutError: the workers wait for each other in vain.
    """
    meeting = Meeting(workers, script or ThreadScript(), timeout_seconds)
    results: list[Any] = [None] * workers

    def life(number: int) -> None:
        world = ThreadWorld(meeting, number)
        with meeting.turn:
            try:
                meeting.take_turn(number)
                results[number] = function(world)
            except Over as over:
                results[number] = Ended(str(over))
            except SystemExit as left:
                results[number] = Ended("left", int(left.code or 0))
            except BaseException as error:
                meeting.abort(error)
            finally:
                world.close()

    threads = [
        threading.Thread(target=life, args=(n,), name=f"shoal-worker-{n}", daemon=True)
        for n in range(workers)
    ]
    state = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(0.1, meeting.deadline + 5.0 - time.monotonic()))
    torch.set_rng_state(state)
    if meeting.error is not None:
        raise meeting.error
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"workers still run after {timeout_seconds:g} s")
    return results


class ThreadWorld:
    """One thread's world; implements :class:`shoal.world.contract.World`."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.number = number
        self._meeting = meeting
        self._holder: StateHolder | None = None
        self._membership: Membership | None = None
        self._open = False
        self._place = 0
        self._failed = False
        self._leaving = False
        self._left = False
        self._survivors = 0
        self._closed = False
        self._changes: list[Change] = []
        self.events: list[dict[str, object]] = []

    @property
    def flag_slots(self) -> int:
        """One slot a worker, for leaving."""
        assert self._membership is not None, "start_step comes first"
        return self._membership.workers

    @property
    def exchange(self) -> int:
        """Number of the present exchange."""
        return self._meeting.exchange

    @property
    def left(self) -> bool:
        """Whether this worker's leave was announced."""
        return self._left

    @property
    def survivors(self) -> int:
        """Workers that go on without this one."""
        return self._survivors

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet."""
        self._holder = holder

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """Meet the others; the same membership again until the exchange is settled."""
        assert self._holder is not None, "attach() comes first"
        assert not self._left and not self._closed, "a worker that has left starts no exchange"
        if self._open:
            assert self._membership is not None
            return self._membership
        self._changes += self._meeting.arrive(self.number, shrink_only, self._holder)
        members = self._meeting.members
        self._membership = Membership(
            names=tuple(f"t{n}" for n in members),
            ranks=(members.index(self.number),),
            token=self._meeting.token,
        )
        self._open, self._place = True, 0
        script, exchange = self._meeting.script, self._meeting.exchange
        self._failed = self.number in script.failures.get(exchange, ())
        if script.leaves.get(self.number, exchange + 1) <= exchange:
            self._leaving = True
        return self._membership

    def all_reduce(self, tensor: Tensor) -> _Sum:
        """Sum over the members, in rank order."""
        assert self._open, "a reduction comes between start_step and settle"
        script, exchange = self._meeting.script, self._meeting.exchange
        if script.kills.get(self.number, exchange + 1) <= exchange:
            raise Over("killed")
        place, self._place = self._place, self._place + 1
        if not self._meeting.torn(self.number):
            self._meeting.contribute(self.number, place, tensor)
        return _Sum(self, place, tensor)

    def finish(self, place: int, tensor: Tensor) -> None:
        """Put the sum into ``tensor``."""
        torn = self._meeting.torn(self.number)
        total = None if torn else self._meeting.total(self.number, place)
        if total is None or self._failed:
            self._meeting.tear(self.number)
            raise ExchangeFailed("the script, or a worker that is gone, made this exchange fail")
        with torch.no_grad():
            tensor.copy_(total)

    def write_flags(self, slots: Tensor) -> None:
        """Announce a leave."""
        assert self._membership is not None
        if self._leaving:
            slots[self._membership.ranks[0]] = 1.0

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange."""
        assert self._open and self._membership is not None, "settle() ends what start_step() began"
        self._open = False
        if flags is None:
            return
        assert len(flags) == self._membership.workers
        leaving = [n for n, flag in zip(self._meeting.members, flags.tolist(), strict=True) if flag]
        if self.number in leaving:
            self._left = True
            self._survivors = self._membership.workers - len(leaving)
            self._meeting.leave(self.number, "leave")

    def request_leave(self) -> None:
        """Leave after the next exchange."""
        self._leaving = True

    def take_changes(self) -> list[Change]:
        """Changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Nobody listens."""

    def event(self, row: Mapping[str, object]) -> None:
        """Keep the event for the test."""
        self.events.append(dict(row))

    def close(self) -> None:
        """Without a leave before, the others see a lost worker."""
        if not self._closed:
            self._closed = True
            with self._meeting.turn:
                self._meeting.leave(self.number, "kill")


class _Sum:
    """One reduction of one worker."""

    def __init__(self, world: ThreadWorld, place: int, tensor: Tensor) -> None:
        self._world, self._place, self._tensor = world, place, tensor

    def wait(self) -> None:
        """Block until the tensor holds the sum. Raises ExchangeFailed when the exchange failed."""
        self._world.finish(self._place, self._tensor)
