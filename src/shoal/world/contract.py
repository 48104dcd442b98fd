"""What a world is: who is there, and how they talk.

The fleet walks through one exchange (a training step, or a round of evaluation) like this:

    membership = world.start_step()      # known before any sample is drawn; may heal this worker
    ... draw this worker's share, forward, backward ...
    world.write_flags(header_slots)      # what this worker wants to tell the others
    work = world.all_reduce(bucket)      # several of them, SUM, in the same order on every worker
    work.wait()                          # raises ExchangeFailed when a peer was lost
    world.settle(flags)                  # reduced flags, or None when the exchange failed

A worker *commits* an exchange when all its own reductions succeeded: there is no vote. Where only some
members saw a failure, the next ``start_step`` makes those that lag adopt the state of those that
committed. So an exchange is committed if any surviving worker committed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# What travels to a joining worker and into a checkpoint: tensors, numbers, strings, None, and lists and
# dicts of them. Dict keys are strings or integers.
Tree = (
    Tensor
    | int
    | float
    | str
    | bool
    | None
    | Sequence["Tree"]
    | Mapping[str, "Tree"]
    | Mapping[int, "Tree"]
)


@dataclass(frozen=True)
class Membership:
    """Who takes part in the coming exchange.

    Args:
        names: the workers' names in rank order; its length is the number of workers.
        ranks: the ranks this process plays: one in a real world, all of them in the virtual world.
        token: the same string on all members, different whenever the membership was formed anew.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    token: str = ""

    @property
    def workers(self) -> int:
        """Number of workers, >= 1."""
        return len(self.names)


@dataclass(frozen=True)
class Change:
    """One change of membership, as the surviving workers saw it.

    ``kind`` is ``join``, ``leave`` (announced) or ``kill`` (lost without a word); ``names`` are the workers
    that came or went.
    """

    kind: str
    workers_before: int
    workers_after: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Position:
    """How far a worker's state has come: its committed exchanges and the history that led there.

    ``commits`` is -1 for a blank worker, one that has not taken part in anything yet. Two workers hold the
    same state exactly when both fields agree. ``offer`` is the step of the newest checkpoint a blank
    worker could load, -1 if there is none: among blank workers the one with the largest offer starts the
    run.
    """

    commits: int
    lineage: str
    offer: int = -1


class StateHolder(Protocol):
    """The side of the fleet that a world sees."""

    def position(self) -> Position:
        """Where this worker's state stands now."""
        ...

    def bootstrap(self) -> None:
        """Called on the one worker that starts a run: load the newest checkpoint, or begin as it is."""
        ...

    def snapshot(self) -> dict[str, Tree]:
        """A copy of everything at the last commit point; later steps do not change it."""
        ...

    def restore(self, tree: dict[str, Tree]) -> None:
        """Take over a peer's snapshot, whole. The tensors given are writable and this worker's own."""
        ...


class Work(Protocol):
    """One reduction under way."""

    def wait(self) -> None:
        """Block until the tensor holds the sum. Raises ExchangeFailed when a peer was lost."""
        ...


class World(Protocol):
    """Who is there and how they talk; one instance per process and run."""

    @property
    def flag_slots(self) -> int:
        """How many float32 slots of the exchange's header the world uses now (0: none).

        Fixed between ``start_step`` and ``settle``; the same on all members.
        """
        ...

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet; called once, before the first ``start_step``."""
        ...

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """Make sure of the membership for the next exchange and return it.

        Calling it again before ``settle`` returns the same membership. Heals this worker when it lags or
        is blank (``holder.restore``), or starts the run with it (``holder.bootstrap``). With ``shrink_only``
        (evaluation) nobody new is let in.

        Raises:
            ResumableStop: fewer workers than the run's minimum for longer than its patience.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` over the members, in place, in the background (float32/64, bfloat16 or int64)."""
        ...

    def write_flags(self, slots: Tensor) -> None:
        """Write this worker's flags into ``slots`` (float32, ``flag_slots`` long, zeroed)."""
        ...

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange: the summed flags on the CPU, or None if this worker saw it fail."""
        ...

    def request_leave(self) -> None:
        """Announce in the next exchange that this worker leaves after it. Safe in a signal handler."""
        ...

    @property
    def left(self) -> bool:
        """Whether an exchange that carried this worker's leave has been settled."""
        ...

    @property
    def survivors(self) -> int:
        """Once ``left``: how many workers go on without this one; 0 when all left together."""
        ...

    def take_changes(self) -> list[Change]:
        """Changes of membership since the last call, oldest first."""
        ...

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Tell the supervisor, if there is one, where this worker is. Never blocks; the latest wins."""
        ...

    def event(self, row: Mapping[str, object]) -> None:
        """Hand a JSON-able event to the supervisor, if there is one. Never blocks; none is lost in order."""
        ...

    def close(self) -> None:
        """Free sockets, threads and process groups. Harmless when called twice."""
        ...
