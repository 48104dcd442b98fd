"""A world of one worker: no network, no threads, no copies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.world.contract import Change, Membership, StateHolder


class Done:
    """A reduction that needed no waiting."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class AloneWorld:
    """One worker by itself; what :func:`shoal.init` uses outside ``shoal run``."""

    def __init__(self, name: str = "alone", *, started: bool = False) -> None:
        self._membership = Membership(names=(name,), ranks=(0,), token=name)
        self._holder: StateHolder | None = None
        self._started = started
        self._leaving = False
        self._left = False

    @property
    def flag_slots(self) -> int:
        """No flags: there is nobody to tell."""
        return 0

    @property
    def left(self) -> bool:
        """Whether a requested leave has taken effect."""
        return self._left

    @property
    def survivors(self) -> int:
        """Nobody goes on without the only worker."""
        return 0

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet."""
        self._holder = holder

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """The membership of one; the first call starts the run."""
        assert self._holder is not None, "attach() comes first"
        if not self._started:
            self._started = True
            self._holder.bootstrap()
        return self._membership

    def all_reduce(self, tensor: Tensor) -> Done:
        """The sum over one worker is the tensor itself."""
        return DONE

    def write_flags(self, slots: Tensor) -> None:
        """Nothing to write."""

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange."""
        self._left = self._leaving

    def request_leave(self) -> None:
        """Leave after the present exchange."""
        self._leaving = True

    def take_changes(self) -> list[Change]:
        """A world of one never changes."""
        return []

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """No supervisor to tell."""

    def event(self, row: Mapping[str, object]) -> None:
        """No supervisor to tell."""

    def close(self) -> None:
        """Nothing to free."""
