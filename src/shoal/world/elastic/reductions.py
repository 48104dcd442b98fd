"""Handles of reductions under way, as the fleet waits for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from shoal.errors import ExchangeFailed
from shoal.world.elastic.groups import Group, Pending

_LOOK = timedelta(seconds=0.25)


class Reduction:
    """A reduction in a group.

    Gloo has a gap: a reduction that was about to send when its peer's connection closed can wait for
    its whole time limit, although nobody is there. So a wait that lasts looks at the connections
    from time to time, and leaves a reduction that cannot end any more to itself. It holds its own
    reference to the tensor, and writes nothing without a connection.

    Args:
        pending: torch's handle.
        group: the group in which it runs.
        fail: told of the first error; gives what is to be raised.
    """

    __slots__ = ("_fail", "_group", "_pending")

    def __init__(
        self, pending: Pending, group: Group, fail: Callable[[BaseException], ExchangeFailed]
    ):
        self._pending = pending
        self._group = group
        self._fail = fail

    def wait(self) -> None:
        """Block until the tensor holds the sum.

        Raises:
            ExchangeFailed: a peer was lost, or the time limit passed.
        """
        pending = self._pending
        broken = False
        while True:
            try:
                pending.wait(_LOOK)
                return
            except RuntimeError as error:
                # Broken twice in a row: what had arrived before the end has been worked off by now.
                if pending.is_completed() or broken:
                    raise self._fail(error) from error
                broken = self._group.broken()


class LostReduction:
    """A reduction that was never started, because its exchange had failed before."""

    __slots__ = ("_cause",)

    def __init__(self, cause: BaseException):
        self._cause = cause

    def wait(self) -> None:
        """Raise ExchangeFailed."""
        raise ExchangeFailed(f"a peer was lost during an exchange: {self._cause}")


class _Done:
    __slots__ = ()

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = _Done()
"""The reduction of a world of one: the tensor is its own sum."""
