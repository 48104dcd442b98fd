"""What follows a worker's end: its row, a replacement, or the end of the run."""

from __future__ import annotations

import signal

from shoal.fleet.supervisor.endings import (
    FAILURE,
    RESUMABLE,
    SUCCESS,
    Ending,
    Survivors,
    classify,
)
from shoal.fleet.supervisor.member import Member
from shoal.fleet.supervisor.outputs import Outputs
from shoal.fleet.supervisor.processes import last_line, last_traceback
from shoal.fleet.supervisor.replacements import Replacements
from shoal.fleet.supervisor.roster import Roster
from shoal.fleet.supervisor.settings import Settings
from shoal.fleet.supervisor.stopping import Stop
from shoal.fleet.supervisor.worker_main import DIVERGED

# After a failure the others have so long to end by themselves.
FAILURE_DRAIN_SECONDS = 10.0


class Aftermath:
    """Decides over replacements and over the run, and carries it out on the roster.

    Args:
        settings: of the run.
        roster: who is there.
        out: takes the event rows, and has the workers' logs.
        end: how the run comes to its end.
    """

    def __init__(self, settings: Settings, roster: Roster, out: Outputs, end: Stop) -> None:
        self._settings, self._roster, self._out, self._end = settings, roster, out, end
        self._survivors = Survivors()
        self._replacements = Replacements(settings.max_restarts, settings.restart_window_seconds)
        self._owed: list[float] = []  # when replacements may start
        self._best_commits = -1.0
        self._succeeded = 0

    def owed(self, now: float) -> int:
        """How many replacements are still to wait; none of a run that ends."""
        if self._roster.stopping or self._roster.finishing:
            self._owed.clear()
        self._owed = [due for due in self._owed if due > now]
        return len(self._owed)

    def stop(self, code: int, seconds: float) -> None:
        """Ask everybody to leave; whoever is there after ``seconds`` is killed."""
        self._end.begin(code, seconds)
        self._owed.clear()
        self._roster.stop()

    def fail(self, code: int, message: str) -> None:
        """End the run with this status and message, unless it has failed already."""
        if not self._end.fail(code, message, already_stopping=self._roster.stopping):
            return
        seconds = self._settings.drain_seconds if code == RESUMABLE else FAILURE_DRAIN_SECONDS
        self.stop(code, min(seconds, self._settings.drain_seconds))

    def hung(self, member: Member) -> None:
        """A worker is killed for hanging."""
        commits = max(m.commits for m in self._roster.members())
        member.killed = "hang"
        member.is_victim = self._survivors.hung(commits)
        self._roster.touch()

    def ended(self, member: Member, code: int, now: float) -> None:
        """A worker of this machine has ended."""
        roster, log = self._roster, self._out.log(member.name)
        self._out.ended(member.name)
        stopping = roster.stopping
        others_train = any(m.commits > 0 and m.killed is None for m in roster.alive())
        ending = classify(member, code, stopping=stopping, others_train=others_train)
        self.record(member, ending.reason)
        self._succeeded += code == SUCCESS
        if ending.reason == "finished":
            roster.grow(-1)
        if ending.stop_code is not None:
            self.fail(ending.stop_code, last_line(log))
        elif roster.finishing and ending.reason in ("crash", "killed"):
            self._fail_after_finish(member, ending)
        elif ending.replace and not stopping:
            self._replace(member, ending, now)
        elif ending.reason == "user-error":
            roster.grow(-1)
            self._out.record("note", text=f"{member.name} is not replaced: {last_line(log)}")

    def unstarted(self, member: Member, error: OSError, now: float) -> None:
        """A worker could not be started: like a death that nothing excuses."""
        text = f"{member.name} could not be started: {error.strerror or error}"
        self._out.record("note", text=text)
        self._replace(member, Ending(reason="unstarted", replace=True), now, text)

    def ended_elsewhere(self, member: Member, *, alone: bool) -> None:
        """A worker of another machine has ended; ``alone`` says that this one has no workers."""
        if member.code != DIVERGED:
            self.record(member, "elsewhere")
            return
        self.record(member, "diverged")
        if alone:  # else a worker here says the same, and where
            self.fail(
                FAILURE, f"{member.name} on {member.host}: a non-finite loss; see its log there"
            )

    def record(self, member: Member, reason: str) -> None:
        """Write the row of a worker's end."""
        fields: dict[str, object] = {"host": member.host} if member.host else {}
        if member.code is not None and member.code < 0:
            fields["signal"] = signal.Signals(-member.code).name
        in_training = not self._roster.stopping and not self._roster.finishing
        if in_training and self._survivors.counts(member, reason):
            fields["survivor"] = True
        self._out.record(
            "worker_exited",
            worker=member.name,
            pid=member.pid,
            code=member.code,
            reason=reason,
            **fields,
        )

    def _fail_after_finish(self, member: Member, ending: Ending) -> None:
        """The training was over, but what comes after it in the user's script failed."""
        self._roster.grow(-1)
        if self._end.exit_code is None and (ending.is_crash or not self._succeeded):
            message = last_traceback(self._out.log(member.name))
            self._end.fail(FAILURE, message, already_stopping=False)

    def _replace(self, member: Member, ending: Ending, now: float, why: str = "") -> None:
        roster, settings = self._roster, self._settings
        hopeless = self._replacements.is_hopeless(
            by_exception=ending.is_crash, ever_committed=roster.ever_committed
        )
        self._best_commits = max([self._best_commits, *(m.commits for m in roster.members())])
        due = self._replacements.died(
            now, took_part=member.commits > 0, fleet_commits=self._best_commits
        )
        if due is not None and not hopeless:
            self._owed.append(due)
            self._out.record("respawn", worker=member.name, delay_seconds=due - now)
            return
        roster.grow(-1)
        left = len(roster.staying())
        if not hopeless and roster.ever_committed and left >= settings.minimum:
            self._out.record(
                "note", text=f"{member.name} is not replaced: too many deaths (--max-restarts)"
            )
        elif ending.is_crash:
            self.fail(FAILURE, last_traceback(self._out.log(member.name)))
        else:
            self.fail(
                RESUMABLE if roster.ever_committed else FAILURE,
                why
                or f"workers were killed more often than --max-restarts {settings.max_restarts} allows",
            )
