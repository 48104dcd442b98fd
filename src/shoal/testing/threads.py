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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.errors import ExchangeFailed
from shoal.world.contract import Change, Membership, Position, StateHolder

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class ThreadScript:
    """What happens to a fleet of threads. Exchanges are counted from 0, evaluation rounds among them.

    Args:
        failures: exchange -> the workers that see it fail, though the others see it succeed.
        leaves: worker -> the exchange in which it announces that it leaves.
        kills: worker -> the exchange in which it dies without a word.
        joins: worker -> the first exchange it may take part in; others are there from the start.
    """

    failures: Mapping[int, Collection[int]] = field(default_factory=dict[int, Collection[int]])
    leaves: Mapping[int, int] = field(default_factory=dict[int, int])
    kills: Mapping[int, int] = field(default_factory=dict[int, int])
    joins: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class Ended:
    """A worker's result when its function did not return.

    ``how`` is ``killed``; ``left`` with the exit code; or ``late``: it joined when the others had ended.
    """

    how: str
    code: int | None = None


class Mismatch(AssertionError):
    """The workers did not make the same reductions in the same order."""


class _Over(BaseException):
    """Raised in a worker that the script kills, or that comes when all others have ended."""


class _Aborted(BaseException):
    """Raised in a worker because another one failed."""


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
            except _Over as over:
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


class Meeting:
    """Where the threads meet: memberships, reductions, and whose turn it is."""

    def __init__(self, workers: int, script: ThreadScript, timeout_seconds: float) -> None:
        self.script = script
        self.turn = threading.Condition(threading.RLock())
        self.deadline = time.monotonic() + timeout_seconds
        self.error: BaseException | None = None
        self.exchange = -1
        self.members: tuple[int, ...] = ()
        self.token = ""
        self.gone: dict[int, str] = {}
        self._begun = 0
        self._workers = workers
        self._waiting: dict[int, bool] = {}
        self._positions: dict[int, Position] = {}
        self._snapshot: dict[str, Any] | None = None
        self._donor: int | None = None
        self._ready: set[int] = set()
        self._changes: list[Change] = []
        self._sums: dict[int, dict[int, Tensor]] = {}
        self._torn: set[int] = set()

    # -- turns ------------------------------------------------------------------------------------

    def take_turn(self, number: int) -> None:
        """Wait until all threads run, so that their order does not depend on how fast they start."""
        self._begun += 1
        self.turn.notify_all()
        self.wait(lambda: self._begun == self._workers, f"worker {number} waits for all to start")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready``."""
        state = torch.get_rng_state()
        while not ready():
            self._check()
            if not self.turn.wait(timeout=max(0.0, self.deadline - time.monotonic())):
                self.abort(TimeoutError(f"{what}; nobody answers"))
        self._check()
        torch.set_rng_state(state)

    def abort(self, error: BaseException) -> None:
        """Stop all workers; the first error counts."""
        if self.error is None and not isinstance(error, _Aborted):
            self.error = error
        self.turn.notify_all()

    def _check(self) -> None:
        if self.error is not None:
            raise _Aborted

    # -- memberships ------------------------------------------------------------------------------

    def arrive(self, number: int, shrink_only: bool, holder: StateHolder) -> list[Change]:
        """Wait for the members of the coming exchange and heal whoever lags."""
        before = self.exchange
        self._waiting[number] = shrink_only
        self._positions[number] = holder.position()
        self.turn.notify_all()
        self.wait(
            lambda: self._met(number, before),
            f"worker {number} waits for the others to start exchange {before + 1}",
        )
        if number not in self.members:
            raise _Over("late")
        self._heal(number, holder)
        return self._changes

    def _met(self, number: int, before: int) -> bool:
        """Whether ``number`` need not wait any more: it is a member, or there is nobody left to join."""
        self._form()
        if number in self.members:
            return self.exchange > before
        return bool(self.members) and all(n in self.gone for n in self.members)

    def _form(self) -> bool:
        """Make the next membership if everybody who must be there is; False otherwise."""
        following = self.exchange + 1
        joins = self.script.joins
        living = [n for n in range(self._workers) if n not in self.gone]
        expected = [n for n in living if n in self.members or (not self.members and n not in joins)]
        if not expected or any(n not in self._waiting for n in expected):
            return False
        closed = any(self._waiting[n] for n in expected)
        new = [
            n
            for n in living
            if n in self._waiting and n not in expected and joins.get(n, 0) <= following
        ]
        chosen = tuple(sorted(expected if closed else [*expected, *new]))
        if chosen != self.members or not self.token:
            self.token = f"threads-{following}"
        self._changes = self._difference(chosen)
        self.members = chosen
        self.exchange = following
        self._waiting = {n: mode for n, mode in self._waiting.items() if n not in chosen}
        self._donor = self._elect()
        self._snapshot, self._ready = None, set()
        self._sums, self._torn = {}, set()
        self.turn.notify_all()
        return True

    def _difference(self, chosen: tuple[int, ...]) -> list[Change]:
        if not self.members:
            return []
        changes: list[Change] = []
        workers = len(self.members)
        for kind in ("leave", "kill"):
            lost = [n for n in self.members if n not in chosen and self.gone.get(n) == kind]
            if lost:
                names = tuple(f"t{n}" for n in lost)
                changes.append(Change(kind, workers, workers - len(lost), names))
                workers -= len(lost)
        fresh = [n for n in chosen if n not in self.members]
        if fresh:
            names = tuple(f"t{n}" for n in fresh)
            changes.append(Change("join", workers, workers + len(fresh), names))
        return changes

    def _elect(self) -> int:
        """Who has come furthest; among blank workers who has the newest checkpoint."""

        def worth(number: int) -> tuple[int, int, int]:
            at = self._positions[number]
            return at.commits, at.offer if at.commits < 0 else 0, -number

        return max(self.members, key=worth)

    def _gave_up(self, number: int) -> bool:
        """Whether ``number`` hands in nothing any more in this exchange."""
        return number in self.gone or number in self._waiting or number in self._torn

    def tear(self, number: int) -> None:
        """``number`` saw the exchange fail and hands in nothing more of it."""
        self._torn.add(number)
        self.turn.notify_all()

    def torn(self, number: int) -> bool:
        """Whether ``number`` saw the present exchange fail."""
        return number in self._torn

    def _heal(self, number: int, holder: StateHolder) -> None:
        assert self._donor is not None
        if number == self._donor:
            if self._positions[number].commits < 0:
                holder.bootstrap()
            self._positions[number] = holder.position()
            own = self._positions[number]
            peers = [self._positions[n] for n in self.members]
            if any((p.commits, p.lineage) != (own.commits, own.lineage) for p in peers):
                self._snapshot = holder.snapshot()
            self._ready.add(number)
            self.turn.notify_all()
            return
        donor = self._donor
        self.wait(
            lambda: donor in self._ready or donor in self.gone,
            f"worker {number} waits for the state of worker {donor}",
        )
        own, its = self._positions[number], self._positions[donor]
        if self._snapshot is not None and (own.commits, own.lineage) != (its.commits, its.lineage):
            holder.restore(_copied(self._snapshot))

    def leave(self, number: int, how: str) -> None:
        """``number`` takes part no more."""
        self.gone.setdefault(number, how)
        self.turn.notify_all()

    # -- reductions -------------------------------------------------------------------------------

    def contribute(self, number: int, place: int, tensor: Tensor) -> None:
        """Hand in the worker's part of the ``place``-th reduction of the exchange."""
        parts = self._sums.setdefault(place, {})
        for other, part in parts.items():
            if (part.shape, part.dtype) != (tensor.shape, tensor.dtype):
                self.abort(
                    Mismatch(
                        f"exchange {self.exchange}, reduction {place}: worker {other} sends "
                        f"{tuple(part.shape)} of {part.dtype}, worker {number} {tuple(tensor.shape)} "
                        f"of {tensor.dtype}"
                    )
                )
                raise _Aborted
        parts[number] = tensor.detach().clone()
        self.turn.notify_all()

    def total(self, number: int, place: int) -> Tensor | None:
        """The sum of all parts in rank order; None when somebody will not hand in its part."""
        exchange, members = self.exchange, self.members
        parts = self._sums[place]
        self.wait(
            lambda: all(n in parts or self._gave_up(n) for n in members),
            f"worker {number} waits in reduction {place} of exchange {exchange}",
        )
        if any(n not in parts for n in members):
            return None
        total = parts[members[0]].clone()
        for n in members[1:]:
            total += parts[n]
        return total


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
            raise _Over("killed")
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


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
