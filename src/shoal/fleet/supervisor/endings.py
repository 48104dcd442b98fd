"""What a worker's end means for the run. Pure: a status, and what was known of the worker."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from shoal.fleet.supervisor.member import Member
from shoal.fleet.supervisor.worker_main import DIVERGED, RESUMABLE

SUCCESS, FAILURE, USER_ERROR = 0, 1, 2
# A second interrupt ends a run at once, as it ends any other command.
INTERRUPTED = 128 + signal.SIGINT
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


def classify(member: Member, code: int, *, stopping: bool, others_train: bool) -> Ending:
    """What the end of a worker means.

    Args:
        member: what was known of it.
        code: exit status, negative for the signal that ended it.
        stopping: whether the whole run is being stopped.
        others_train: whether another worker that has trained is alive. Then a worker that never took
            part cannot end the run: neither by its mistake (other versions, another model) nor by
            having waited too long.
    """
    if member.killed == "hang":
        return Ending(reason="hang", replace=not stopping)
    if member.killed is not None:
        return Ending(reason=member.killed)
    if code == DIVERGED:
        return Ending(reason="diverged", stop_code=FAILURE)
    newcomer = others_train and member.commits <= 0
    if stopping and code != USER_ERROR:
        return Ending(
            reason="stopped" if code in (SUCCESS, RESUMABLE, -signal.SIGTERM) else "crash"
        )
    if code == USER_ERROR:
        return Ending(reason="user-error", stop_code=None if newcomer else USER_ERROR)
    if code == SUCCESS:
        return Ending(reason="finished" if member.leave is None else "left")
    if member.leave is not None and code in (RESUMABLE, -signal.SIGTERM):
        return Ending(reason="left")
    if code == RESUMABLE:
        return Ending(
            reason="resumable", replace=newcomer, stop_code=None if newcomer else RESUMABLE
        )
    if code < 0 and -code not in _OWN_SIGNALS:
        # Killed from outside. One that was leaving anyway is not missed.
        return Ending(reason="killed", replace=member.leave is None)
    return Ending(reason="crash", replace=member.leave is None)


class Survivors:
    """Finds the ends that an elastic run must not have: of workers that nobody meant to end.

    Counted is every worker that had trained and then failed, or gave up, by itself. Not counted are
    those that a script, a resize or a stop meant, those killed from outside, those that hung (but
    their victims, should the watchdog take one for hung), and those that ended by agreement with all
    others: a non-finite loss, a user's mistake.
    """

    def __init__(self) -> None:
        self._stalled_at: float | None = None

    def hung(self, fleet_commits: float) -> bool:
        """A worker is killed for hanging; whether it is a victim rather than the one that hangs.

        Of several that are killed without a commit of the fleet in between at most one hung.

        Args:
            fleet_commits: the most commits that any worker has reported.
        """
        again = self._stalled_at == fleet_commits
        self._stalled_at = fleet_commits
        return again

    def counts(self, member: Member, reason: str) -> bool:
        """Whether the end of ``member`` counts; ``member.code`` is its exit status."""
        if member.commits <= 0 or member.leave is not None:
            return False
        if reason == "elsewhere":
            code = member.code or SUCCESS
            by_itself = code not in (SUCCESS, USER_ERROR, DIVERGED) and (
                code > 0 or -code in _OWN_SIGNALS
            )
            return by_itself and member.killed is None
        return reason in ("crash", "resumable") or (reason == "hang" and member.is_victim)
