"""Handles of reductions under way, as the fleet waits for them."""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import ExchangeFailed
from shoal.world.elastic.groups import Pending


class Reduction:
    """A reduction in a group.

    Args:
        pending: the group's own handle.
        fail: told of the first error; gives what is to be raised.
    """

    __slots__ = ("_fail", "_pending")

    def __init__(self, pending: Pending, fail: Callable[[BaseException], ExchangeFailed]):
        self._pending = pending
        self._fail = fail

    def wait(self) -> None:
        """Block until the tensor holds the sum.

        Raises:
            ExchangeFailed: a peer was lost, or the time limit passed.
        """
        try:
            self._pending.wait()
        except RuntimeError as error:
            raise self._fail(error) from error


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
