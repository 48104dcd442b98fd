"""Where threads that play workers meet: memberships, healing, reductions, and whose turn it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.world.contract import Change, Position, StateHolder


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


class Mismatch(AssertionError):
    """The workers did not make the same reductions in the same order."""


class Over(BaseException):
    """Raised in a worker that the script kills, or that comes when all others have ended."""


class Aborted(BaseException):
    """Raised in a worker because another one failed."""


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
        if self.error is None and not isinstance(error, Aborted):
            self.error = error
        self.turn.notify_all()

    def _check(self) -> None:
        if self.error is not None:
            raise Aborted

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
            raise Over("late")
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
                raise Aborted
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


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
