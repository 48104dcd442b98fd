"""What a worker's end means for the run. Pure: a status, what was known of the worker, a last line."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from shoal.fleet.supervisor.roster import Member

SUCCESS, FAILURE, USER_ERROR, RESUMABLE = 0, 1, 2, 75
# Signals a process raises by failing itself; any other came from outside.
_OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a worker ended and what follows.

    Args:
        reason: one of ``finished left script hang stopped user-error diverged resumable killed crash``.
        replace: whether a new worker should take its place.
        stop_code: the run stops with this exit status; None when it goes on.
    """

    reason: str
    replace: bool = False
    stop_code: int | None = None

    @property
    def is_crash(self) -> bool:
        """It failed by itself: nobody killed it and nobody asked it to leave."""
        return self.reason == "crash"


def classify(member: Member, code: int, log_line: str, *, stopping: bool) -> Ending:
    """What the end of a worker means.

    Args:
        member: what was known of it.
        code: exit status, negative for the signal that ended it.
        log_line: the last line of its log.
        stopping: whether the whole run is being stopped.
    """
    if member.killed == "hang":
        return Ending(reason="hang", replace=not stopping)
    if member.killed is not None:
        return Ending(reason=member.killed)
    if stopping and code != USER_ERROR:
        return Ending(
            reason="stopped" if code in (SUCCESS, RESUMABLE, -signal.SIGTERM) else "crash"
        )
    if code == USER_ERROR:
        return Ending(reason="user-error", stop_code=USER_ERROR)
    if code == SUCCESS:
        return Ending(reason="finished" if member.leave is None else "left")
    if member.leave is not None and code == RESUMABLE:
        return Ending(reason="left")
    if code == RESUMABLE:
        return Ending(reason="resumable", stop_code=RESUMABLE)
    if code == FAILURE and log_line.startswith("shoal: "):
        # Of the errors that end in one line only a non-finite loss has this status.
        return Ending(reason="diverged", stop_code=FAILURE)
    if code < 0 and -code not in _OWN_SIGNALS:
        # Killed from outside. One that was leaving anyway is not missed.
        return Ending(reason="killed", replace=member.leave is None)
    return Ending(reason="crash", replace=member.leave is None)
