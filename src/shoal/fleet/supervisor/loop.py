"""The supervisor's loop: one thread that starts, watches, replaces and ends a run's processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TextIO

from shoal.fleet.supervisor import script
from shoal.fleet.supervisor.control import Verbs
from shoal.fleet.supervisor.endings import (
    FAILURE,
    RESUMABLE,
    SUCCESS,
    USER_ERROR,
    Ending,
    Survivors,
    classify,
)
from shoal.fleet.supervisor.environment import lowest_free, worker_environment
from shoal.fleet.supervisor.member import Member, number
from shoal.fleet.supervisor.notice import NoticeFile
from shoal.fleet.supervisor.outputs import Outputs
from shoal.fleet.supervisor.premises import Premises
from shoal.fleet.supervisor.processes import Process, last_line, last_traceback
from shoal.fleet.supervisor.replacements import Replacements
from shoal.fleet.supervisor.roster import Roster
from shoal.fleet.supervisor.screen import Progress
from shoal.fleet.supervisor.scripted import ScriptPlayer
from shoal.fleet.supervisor.settings import Settings
from shoal.fleet.supervisor.signals import Signals
from shoal.fleet.supervisor.stopping import Stop
from shoal.fleet.supervisor.watchdog import LENIENCY, Watchdog

TICK_SECONDS = 0.1
# After a failure the others have so long to end by themselves.
FAILURE_DRAIN_SECONDS = 10.0


class Supervisor:
    """One run of a fleet. Used once, from the main thread.

    Args:
        settings: what to run.
        stream: where lines or the live table go.

    Raises:
        UsageError: a port in use, another supervisor in the directory, a directory that does not
            fit; nothing was written then.
    """

    def __init__(self, settings: Settings, stream: TextIO) -> None:
        self.settings = settings
        script.check(settings.events, settings.start, settings.minimum, settings.maximum)
        self._signals = Signals()
        self.roster = Roster(
            start=settings.start,
            minimum=settings.minimum,
            maximum=settings.maximum,
            gather_seconds=settings.gather_seconds,
            patience_seconds=settings.patience_seconds,
            wake=self._signals.wake,
        )
        try:
            verbs = Verbs(self.roster, self._status, self._joined)
            self._premises = Premises(settings, verbs)
        except BaseException:
            self._signals.close()
            raise
        self._nursery, self._coordinator = self._premises.nursery, self._premises.coordinator
        self.roster.reserve_names(self._premises.names_used)
        self.roster.coordinator = self._coordinator.address
        self._out = Outputs(settings, stream, is_new_dir=self._premises.is_new_dir)
        self._processes: dict[str, Process] = {}
        self._slots: dict[str, int] = {}  # places on this machine
        self._survivors = Survivors()
        self._watchdog = Watchdog(settings.hang_seconds, LENIENCY * settings.hang_seconds)
        self._replacements = Replacements(settings.max_restarts, settings.restart_window_seconds)
        self._owed: list[float] = []  # when replacements may start
        self._player = ScriptPlayer(
            settings.events, self.roster, self._processes, self._coordinator.kill, self._out.record
        )
        self._notice = NoticeFile(settings.notice_file)
        self._progress = Progress()
        self._best_commits = -1.0
        self._end = Stop()
        self._thin_since: float | None = None
        self._succeeded = 0

    # ---- the run -------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the end and return the exit status; files are complete then."""
        settings = self.settings
        try:
            self._out.record(
                "start",
                train_script=str(settings.train_script),
                arguments=list(settings.arguments),
                workers=settings.workers_text,
                resume=settings.resume,
            )
            while not self._tick():
                self._signals.wait(TICK_SECONDS)
            self._take_events()
        finally:
            self._tear_down()
        return self._finish()

    def _tick(self) -> bool:
        """One round of everything there is to look after; whether the run is over."""
        now = time.monotonic()
        self._obey_signals()
        self._take_events()
        self._reap(now)
        if self._coordinator.restart_if_dead():
            self._out.record("coordinator_restarted", address=self._coordinator.address)
        self._obey_notice()
        self._player.play()
        self._kill_hung(now)
        self._kill_overdue(now)
        self._start_missing(now)
        self._check_minimum(now)
        alive = self.roster.alive()
        leading = next((m.name for m in alive if m.name in self._processes), None)
        self._out.show(self._progress.view(alive, now), leading)
        ending = self.roster.stopping or self.roster.finishing or self._missing() <= 0
        return not alive and not self._owed and ending

    def _tear_down(self) -> None:
        self._out.close_screen()
        self._premises.end_processes()
        self._signals.close()

    def _finish(self) -> int:
        """Write what a finished run leaves, or nothing for a user's mistake."""
        code = self._end.settle(self.roster.members())
        if code == USER_ERROR and not self.roster.ever_committed:
            self._out.leave_nothing()
        else:
            totals = [number(m.row, "total_samples", 0) for m in self.roster.members()]
            self._out.finish(code, int(max(totals, default=0)) or None)
        self._premises.release()
        if self._end.message:
            print(self._end.message, file=sys.stderr, flush=True)
        return code

    # ---- signals, notices, events --------------------------------------------------------------

    def _obey_signals(self) -> None:
        for number_ in self._signals.take():
            if self._end.exit_code is None and not self.roster.stopping:
                self._out.record("drain", signal=signal.Signals(number_).name)
                self._stop(RESUMABLE, self.settings.drain_seconds)
            elif number_ == signal.SIGINT:
                self._end.interrupt()

    def _obey_notice(self) -> None:
        names = self._notice.take()
        if names is None or self.roster.stopping:
            return
        self._out.record("notice", names=names)
        if not names:
            self._stop(RESUMABLE, self.settings.drain_seconds)
        for name in names:
            self.roster.ask_to_leave(name)

    def _stop(self, code: int, seconds: float) -> None:
        """Ask everybody to leave; whoever is there after ``seconds`` is killed."""
        self._end.begin(code, seconds)
        self._owed.clear()
        self.roster.stop()
        for member in self.roster.alive():
            if member.hello is None and member.name in self._processes:
                self._processes[member.name].send(signal.SIGTERM)  # it has no state to save

    def _take_events(self) -> None:
        for name, row in self.roster.take_events():
            kind = str(row.get("kind", "note"))
            self._out.record(kind, **{k: v for k, v in row.items() if k != "kind"}, worker=name)
            if kind == "finish" and not self.roster.finishing:
                self.roster.finishing = True
                self._turn_back()
            if kind == "describe":
                self._out.describe(row)
        self._out.metrics(self.roster.metrics())

    def _turn_back(self) -> None:
        """The run is over: whoever was still on its way would train it again, or end it twice."""
        for member in self.roster.alive():
            if member.commits <= 0 and member.name in self._processes:
                self.roster.ask_to_leave(member.name)
                self._processes[member.name].send(signal.SIGTERM)

    # ---- processes -----------------------------------------------------------------------------

    def _reap(self, now: float) -> None:
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            self._nursery.forget(process)
            del self._processes[name], self._slots[name]
            self._take_events()  # what it said before it ended comes first
            member = self.roster.ended(name, code)
            assert member is not None
            self._after_end(member, code, now)
        for member in self.roster.take_ended_elsewhere():
            self._record_end(member, "elsewhere")
        for member in self.roster.alive():
            lost = member.heard or member.started
            if member.host and now - lost > 2 * self.settings.hang_seconds:
                self.roster.ended(member.name, -signal.SIGKILL)
                self.roster.take_ended_elsewhere()
                self._record_end(member, "lost")
        if not self.roster.stopping and not self.roster.finishing:
            self._note_lost_fleet()

    def _note_lost_fleet(self) -> None:
        """Once per loss: whoever is started next goes on from the newest checkpoint."""
        if self.roster.lost_everybody():
            self._out.record("fleet_lost")

    def _after_end(self, member: Member, code: int, now: float) -> None:
        log = self._out.log(member.name)
        self._out.ended(member.name)
        stopping = self.roster.stopping
        others_train = any(m.commits > 0 and m.killed is None for m in self.roster.alive())
        ending = classify(member, code, stopping=stopping, others_train=others_train)
        self._record_end(member, ending.reason)
        self._succeeded += code == SUCCESS
        if ending.reason == "finished":
            self.roster.grow(-1)
        if ending.stop_code is not None:
            self._fail(ending.stop_code, last_line(log), stopping)
        elif self.roster.finishing and ending.reason in ("crash", "killed"):
            self._fail_after_finish(member, ending)
        elif ending.replace and not stopping:
            self._replace(member, ending, now)
        elif ending.reason == "user-error":
            self.roster.grow(-1)
            self._out.record("note", text=f"{member.name} is not replaced: {last_line(log)}")

    def _record_end(self, member: Member, reason: str) -> None:
        fields: dict[str, object] = {"host": member.host} if member.host else {}
        if member.code is not None and member.code < 0:
            fields["signal"] = signal.Signals(-member.code).name
        in_training = not self.roster.stopping and not self.roster.finishing
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

    def _fail(self, code: int, message: str, already_stopping: bool) -> None:
        if not self._end.fail(code, message, already_stopping=already_stopping):
            return
        seconds = self.settings.drain_seconds if code == RESUMABLE else FAILURE_DRAIN_SECONDS
        self._stop(code, min(seconds, self.settings.drain_seconds))

    def _fail_after_finish(self, member: Member, ending: Ending) -> None:
        """The training was over, but what comes after it in the user's script failed."""
        self.roster.grow(-1)
        if self._end.exit_code is None and (ending.is_crash or not self._succeeded):
            message = last_traceback(self._out.log(member.name))
            self._end.fail(FAILURE, message, already_stopping=False)

    def _replace(self, member: Member, ending: Ending, now: float) -> None:
        hopeless = self._replacements.is_hopeless(
            by_exception=ending.is_crash, ever_committed=self.roster.ever_committed
        )
        self._best_commits = max([self._best_commits, *(m.commits for m in self.roster.members())])
        due = self._replacements.died(
            now, took_part=member.commits > 0, fleet_commits=self._best_commits
        )
        if due is not None and not hopeless:
            self._owed.append(due)
            self._out.record("respawn", worker=member.name, delay_seconds=due - now)
            return
        self.roster.grow(-1)
        left = len(self.roster.staying())
        if not hopeless and self.roster.ever_committed and left >= self.settings.minimum:
            self._out.record(
                "note", text=f"{member.name} is not replaced: too many deaths (--max-restarts)"
            )
        elif ending.is_crash:
            self._fail(FAILURE, last_traceback(self._out.log(member.name)), self.roster.stopping)
        else:
            self._fail(
                RESUMABLE if self.roster.ever_committed else FAILURE,
                f"workers were killed more often than --max-restarts {self.settings.max_restarts} allows",
                self.roster.stopping,
            )

    def _kill_hung(self, now: float) -> None:
        for hang in self._watchdog.look(self.roster.alive(), now):
            member = self.roster.get(hang.name)
            assert member is not None
            self._out.record("hang", worker=hang.name, phase=hang.phase, seconds=hang.seconds)
            member.killed = "hang"
            member.is_victim = self._survivors.hung(max(m.commits for m in self.roster.members()))
            self.roster.touch()
            if hang.name in self._processes:
                self._processes[hang.name].kill()

    def _kill_overdue(self, now: float) -> None:
        """End whoever was asked to leave and does not."""
        limit = self.settings.drain_seconds
        for member in self.roster.alive():
            alone = member.leave is not None and now - member.leave > limit
            if (alone or self._end.is_overdue(now)) and member.killed is None:
                member.killed = "drain"
                self._end.killed()
                self._out.record("kill_overdue", worker=member.name)
                if member.name in self._processes:
                    self._processes[member.name].kill()
                else:
                    self.roster.ended(member.name, -signal.SIGKILL)  # the machine there is silent

    def _missing(self) -> int:
        """Workers wanted on this machine that are not there."""
        # One that was killed for hanging is dealt with when it has ended, like any other death.
        here = [m for m in self.roster.alive() if not m.host and m.leave is None]
        local = sum(m.killed in (None, "hang") for m in here)
        return self.roster.wanted_local - local

    def _start_missing(self, now: float) -> None:
        if self.roster.stopping or self.roster.finishing:
            self._owed.clear()
            return
        self._owed = [due for due in self._owed if due > now]
        for _ in range(self._missing() - len(self._owed)):
            self._start_worker()

    def _start_worker(self) -> None:
        settings, premises, member = self.settings, self._premises, self.roster.add()
        slot = lowest_free(self._slots.values())
        process = self._nursery.start(
            "worker_main.py",
            [str(settings.train_script), *settings.arguments],
            worker_environment(settings, member.name, slot, premises.address, premises.token),
            self._out.log(member.name),
        )
        member.pid = process.pid
        self._processes[member.name], self._slots[member.name] = process, slot
        self._out.record("worker_started", worker=member.name, pid=process.pid)

    def _check_minimum(self, now: float) -> None:
        """Workers wait below the minimum by themselves; this catches a fleet that cannot."""
        settings = self.settings
        enough = len(self.roster.staying()) >= settings.minimum or self.roster.finishing
        if enough or self.roster.stopping or self._missing() > 0:
            self._thin_since = None
        elif self._thin_since is None:
            self._thin_since = now
        elif now - self._thin_since > settings.patience_seconds + settings.drain_seconds:
            self._fail(RESUMABLE, f"fewer than {settings.minimum} workers for too long", False)

    # ---- what others ask for -------------------------------------------------------------------

    def _status(self) -> dict[str, object]:
        members = self.roster.members()
        alive = [m for m in members if m.alive]
        return {
            "run_dir": str(self.settings.run_dir),
            "pid": os.getpid(),
            "workers": len(self.roster.staying()),
            "stopping": self.roster.stopping,
            "step": max((number(m.row, "step", 0) for m in alive), default=0),
            "members": [
                {"name": m.name, "host": m.host, "pid": m.pid, "code": m.code, **m.row}
                for m in members
            ],
        }

    def _joined(self) -> dict[str, object]:
        settings = self.settings
        return {
            "resume": settings.resume,
            "checkpoint_seconds": settings.checkpoint_seconds,
        }


def supervise(settings: Settings, stream: TextIO | None = None) -> int:
    """Run a fleet to its end; the exit status of ``shoal run``.

    Args:
        settings: what to run.
        stream: where lines or the live table go; standard output by default.

    Raises:
        UsageError: it could not start as asked; nothing was written.
    """
    return Supervisor(settings, stream or sys.stdout).run()
