"""k virtual workers inside one process, by exact accumulation.

The process plays every rank: it draws all shares of a step, one after the other, and its gradients add up
to what an all-reduce over k workers would give. Joins, leaves and kills follow a script, at the same
boundaries and with the same consequences as in a real fleet: a killed worker takes its step with it,
whose samples are drawn again by those that are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.errors import ExchangeFailed, ResumableStop, UsageError
from shoal.world.alone import DONE, Done
from shoal.world.contract import Change, Membership, StateHolder

KINDS = ("join", "leave", "kill")


@dataclass(frozen=True, kw_only=True)
class VirtualEvent:
    """``workers`` workers ``kind`` (join, leave or kill) once the fleet has come that far.

    Args:
        kind: ``join`` and ``leave`` take effect before the first step at or past the mark; ``kill``
            interrupts that step, which is not committed.
        workers: how many, >= 1.
        at_step: the mark in committed steps, >= 0; or
        at_samples: the mark in committed samples, >= 0. Exactly one of the two.
    """

    kind: str
    workers: int = 1
    at_step: int | None = None
    at_samples: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"event kind = {self.kind!r}; known are {', '.join(KINDS)}")
        if self.workers < 1:
            raise UsageError(f"event workers = {self.workers}; at least one worker comes or goes")
        marks = [m for m in (self.at_step, self.at_samples) if m is not None]
        if len(marks) != 1 or marks[0] < 0:
            raise UsageError(
                f"event at_step = {self.at_step}, at_samples = {self.at_samples}; exactly one of them, "
                "and not negative, says when it happens"
            )

    def due(self, step: int, samples: int) -> bool:
        """Whether the mark is reached."""
        if self.at_step is not None:
            return step >= self.at_step
        return samples >= (self.at_samples or 0)


class Holder(StateHolder, Protocol):
    """What the virtual world asks of the fleet beyond any world."""

    def mark(self) -> tuple[int, int]:
        """(committed steps, committed samples)."""
        ...


class _Broken:
    def wait(self) -> None:
        raise ExchangeFailed("a virtual worker was killed in this exchange")


class VirtualWorld:
    """``workers`` virtual workers and a script of events.

    Args:
        workers: workers at the start, >= 1.
        events: in any order; they happen in the order of their marks, ties as given.

    Raises:
        UsageError: no worker at the start.
    """

    def __init__(self, workers: int, events: Sequence[VirtualEvent] = ()) -> None:
        if workers < 1:
            raise UsageError(f"workers = {workers}; a virtual world starts with at least one")
        self._names = [f"v{i}" for i in range(workers)]
        self._born = workers
        self._events = list(events)
        self._holder: Holder | None = None
        self._dying: tuple[str, ...] = ()
        self._changes: list[Change] = []
        self._formed = 0
        self._started = False
        self._leaving = self._left = False

    @property
    def flag_slots(self) -> int:
        """No flags: the script knows."""
        return 0

    @property
    def left(self) -> bool:
        """Whether a requested leave has taken effect."""
        return self._left

    @property
    def survivors(self) -> int:
        """The process plays all workers, so nobody goes on without it."""
        return 0

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet."""
        self._holder = holder  # type: ignore[assignment]

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """The membership by the script.

        Raises:
            ResumableStop: the script has removed the last worker.
        """
        assert self._holder is not None, "attach() comes first"
        if not self._started:
            self._started = True
            self._holder.bootstrap()
        step, samples = self._holder.mark()
        while not shrink_only and not self._dying:
            event = self._next(step, samples)
            if event is None:
                break
            self._events.remove(event)
            self._happen(event)
        if not self._names:
            raise ResumableStop("the script has removed the last virtual worker")
        return Membership(
            names=tuple(self._names),
            ranks=tuple(range(len(self._names))),
            token=f"virtual-{self._formed}",
        )

    def all_reduce(self, tensor: Tensor) -> Done | _Broken:
        """All shares are in the tensor already."""
        return _Broken() if self._dying else DONE

    def write_flags(self, slots: Tensor) -> None:
        """Nothing to write."""

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange; those killed in it are gone now."""
        if self._dying:
            dead, self._dying = self._dying, ()
            self._change("kill", dead, [n for n in self._names if n not in dead])
        self._left = self._leaving

    def request_leave(self) -> None:
        """Leave after the present exchange."""
        self._leaving = True

    def take_changes(self) -> list[Change]:
        """Changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """No supervisor to tell."""

    def event(self, row: Mapping[str, object]) -> None:
        """No supervisor to tell."""

    def close(self) -> None:
        """Nothing to free."""

    def _next(self, step: int, samples: int) -> VirtualEvent | None:
        due = [event for event in self._events if event.due(step, samples)]
        return min(due, key=lambda e: (e.at_step or 0, e.at_samples or 0)) if due else None

    def _happen(self, event: VirtualEvent) -> None:
        if event.kind == "join":
            new = tuple(f"v{self._born + i}" for i in range(event.workers))
            self._born += event.workers
            self._change("join", new, [*self._names, *new])
            return
        going = tuple(self._names[-event.workers :])
        if event.kind == "kill" and len(going) < len(self._names):
            self._dying = going
        else:
            self._change(event.kind, going, self._names[: -len(going)])

    def _change(self, kind: str, who: tuple[str, ...], names: list[str]) -> None:
        self._changes.append(
            Change(kind=kind, workers_before=len(self._names), workers_after=len(names), names=who)
        )
        self._names = names
        self._formed += 1
