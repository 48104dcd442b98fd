"""How a run comes to its end: with which status, by when, and whether in order."""

from __future__ import annotations

import time
from collections.abc import Iterable

from shoal.fleet.supervisor.endings import FAILURE, INTERRUPTED, RESUMABLE, SUCCESS, USER_ERROR
from shoal.fleet.supervisor.member import Member


class Stop:
    """The end of one run.

    A run that was asked to stop exits with 75, "stopped in order, can be resumed", also when some worker
    had to be killed for being late, as long as another one left in order: the last of those has written
    a checkpoint. When none did, the run was cut short: the status is 130 after a second interrupt, which
    kills at once, and 1 after the time for leaving in order was over.

    Attributes:
        exit_code: of the run; None until something has decided it.
        message: what is printed last, on standard error.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.message = ""
        self._kill_at: float | None = None
        self._begun_at: float | None = None
        self._cut_short: int | None = None

    def begin(self, code: int, seconds: float) -> None:
        """Workers are asked to leave now and have ``seconds`` for it; the first code stands."""
        now = time.monotonic()
        if self.exit_code is None:
            self.exit_code = code
        self._begun_at = self._begun_at or now
        self._kill_at = min(self._kill_at or float("inf"), now + seconds)

    def fail(self, code: int, message: str, *, already_stopping: bool) -> bool:
        """Something has failed; whether it is what the run is to end with (the first failure is)."""
        if already_stopping and self.exit_code not in (None, RESUMABLE):
            return False
        if self.exit_code in (None, RESUMABLE) or code == USER_ERROR:
            self.exit_code, self.message = code, message
        return True

    def interrupt(self) -> None:
        """A second interrupt: nobody waits for an orderly leave any more."""
        self._kill_at, self._cut_short = 0.0, INTERRUPTED

    def is_overdue(self, now: float) -> bool:
        """Whether whoever is still there is to be killed."""
        return self._kill_at is not None and now >= self._kill_at

    def killed(self) -> None:
        """A worker was killed because it did not leave in time."""
        self._cut_short = self._cut_short or FAILURE

    def settle(self, members: Iterable[Member]) -> int:
        """The exit status, once all workers have ended."""
        code = SUCCESS if self.exit_code is None else self.exit_code
        if code != RESUMABLE or self._cut_short is None:
            return code
        since = self._begun_at or 0.0
        if any(m.code == RESUMABLE and m.ended is not None and m.ended >= since for m in members):
            return code
        self.message = self.message or (
            "workers were killed before they had left in order; --resume goes on from the last "
            "checkpoint"
        )
        return self._cut_short
