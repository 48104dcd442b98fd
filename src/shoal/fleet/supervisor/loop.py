"""The supervisor's loop: one thread that starts, watches, replaces and ends a run's processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from shoal.fleet.supervisor import script
from shoal.fleet.supervisor.aftermath import Aftermath
from shoal.fleet.supervisor.control import Verbs
from shoal.fleet.supervisor.crew import Crew
from shoal.fleet.supervisor.endings import FAILURE, RESUMABLE, USER_ERROR
from shoal.fleet.supervisor.member import number
from shoal.fleet.supervisor.notice import NoticeFile
from shoal.fleet.supervisor.outputs import Outputs
from shoal.fleet.supervisor.premises import Premises
from shoal.fleet.supervisor.roster import Roster
from shoal.fleet.supervisor.screen import Progress
from shoal.fleet.supervisor.script_watch import ScriptWatch
from shoal.fleet.supervisor.scripted import ScriptPlayer
from shoal.fleet.supervisor.settings import Settings
from shoal.fleet.supervisor.signals import Signals
from shoal.fleet.supervisor.stopping import Stop
from shoal.fleet.supervisor.watchdog import LENIENCY, Watchdog

TICK_SECONDS = 0.1


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
        with contextlib.ExitStack() as undo:
            undo.callback(self._signals.close)
            verbs = Verbs(self.roster, self._status, self._joined)
            self._premises = Premises(settings, verbs)
            undo.callback(self._premises.abandon)
            self._out = Outputs(settings, stream, is_new_dir=self._premises.is_new_dir)
            undo.pop_all()
        self._premises.nursery.say = self._out.line
        self._coordinator = self._premises.coordinator
        self.roster.reserve_names(self._premises.names_used)
        self.roster.coordinator = self._coordinator.address
        self._crew = Crew(
            settings, self._premises.nursery, self._premises.address, self._premises.token
        )
        self._end = Stop()
        self._aftermath = Aftermath(settings, self.roster, self._out, self._end)
        self._watchdog = Watchdog(settings.hang_seconds, LENIENCY * settings.hang_seconds)
        self._player = ScriptPlayer(
            settings.events,
            self.roster,
            self._crew.processes,
            self._coordinator.kill,
            self._out.record,
        )
        self._notice = NoticeFile(settings.notice_file)
        self._script = ScriptWatch(settings.train_script)
        self._progress = Progress()
        self._thin_since: float | None = None

    @property
    def summary(self) -> tuple[Path | None, dict[str, object] | None]:
        """Where the summary of the ended run lies, and the document; None for what there is not."""
        return self._out.summary_path, self._out.summary

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
                script_sha256=self._script.sha256,
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
        self._restart_coordinator()
        self._obey_notice()
        self._watch_script(now)
        self._player.play()
        self._dismiss_unstarted()
        self._kill_hung(now)
        self._kill_overdue(now)
        self._start_missing(now)
        self._check_minimum(now)
        alive = self.roster.alive()
        leading = next((m.name for m in alive if m.name in self._crew), None)
        self._out.show(self._progress.view(alive, now), leading)
        ending = self.roster.stopping or self.roster.finishing or self._missing() <= 0
        return not alive and not self._aftermath.owed(now) and ending

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
            with contextlib.suppress(OSError):
                print(self._end.message, file=sys.stderr, flush=True)
        return code

    # ---- signals, notices, events --------------------------------------------------------------

    def _obey_signals(self) -> None:
        for number_ in self._signals.take():
            if self._end.exit_code is None and not self.roster.stopping:
                self._out.record("drain", signal=signal.Signals(number_).name)
                self._stop()
            elif number_ == signal.SIGINT:
                self._end.interrupt()

    def _obey_notice(self) -> None:
        names = self._notice.take()
        if names is None or self.roster.stopping:
            return
        self._out.record("notice", names=names)
        if not names:
            self._stop()
        for name in names:
            self.roster.ask_to_leave(name)

    def _stop(self) -> None:
        """Ask everybody to leave, for the run can be resumed."""
        self._aftermath.stop(RESUMABLE, self.settings.drain_seconds)

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
            if member.commits <= 0 and member.name in self._crew:
                self.roster.ask_to_leave(member.name)
                self._crew.terminate(member.name)

    # ---- processes -----------------------------------------------------------------------------

    def _reap(self, now: float) -> None:
        for name, code in self._crew.take_ended():
            self._take_events()  # what it said before it ended comes first
            member = self.roster.ended(name, code)
            assert member is not None
            self._aftermath.ended(member, code, now)
        for member in self.roster.take_ended_elsewhere():
            self._aftermath.ended_elsewhere(member, alone=not self._crew.processes)
        for member in self.roster.alive():
            lost = member.heard or member.started
            if member.host and now - lost > 2 * self.settings.hang_seconds:
                self.roster.ended(member.name, -signal.SIGKILL)
                self.roster.take_ended_elsewhere()
                self._aftermath.record(member, "lost")
        if not self.roster.stopping and not self.roster.finishing:
            self._note_lost_fleet()

    def _note_lost_fleet(self) -> None:
        """Once per loss: whoever is started next goes on from the newest checkpoint."""
        if self.roster.lost_everybody():
            self._out.record("fleet_lost")

    def _restart_coordinator(self) -> None:
        try:
            if self._coordinator.restart_if_dead():
                self._out.record("coordinator_restarted", address=self._coordinator.address)
        except OSError as error:
            self._out.trouble("the coordinator cannot be started again yet", error)

    def _dismiss_unstarted(self) -> None:
        """End those that are to leave before they have said hello: they have no state to save."""
        for member in self.roster.alive():
            if member.is_unneeded:
                self._crew.terminate(member.name)

    def _kill_hung(self, now: float) -> None:
        for hang in self._watchdog.look(self.roster.alive(), now):
            member = self.roster.get(hang.name)
            assert member is not None
            self._out.record("hang", worker=hang.name, phase=hang.phase, seconds=hang.seconds)
            self._aftermath.hung(member)
            self._crew.kill(hang.name)

    def _kill_overdue(self, now: float) -> None:
        """End whoever was asked to leave and does not."""
        limit = self.settings.drain_seconds
        for member in self.roster.alive():
            alone = member.leave is not None and now - member.leave > limit
            if (alone or self._end.is_overdue(now)) and member.killed is None:
                member.killed = "drain"
                self._end.killed()
                self._out.record("kill_overdue", worker=member.name)
                if not self._crew.kill(member.name):
                    self.roster.ended(member.name, -signal.SIGKILL)  # the machine there is silent

    def _missing(self) -> int:
        """Workers wanted on this machine that are not there."""
        # One that was killed for hanging is dealt with when it has ended, like any other death.
        here = [m for m in self.roster.alive() if not m.host and m.leave is None]
        local = sum(m.killed in (None, "hang") for m in here)
        return self.roster.wanted_local - local

    def _start_missing(self, now: float) -> None:
        if self.roster.stopping or self.roster.finishing:
            return
        for _ in range(self._missing() - self._aftermath.owed(now)):
            self._watch_script(now, at_once=True)
            member = self.roster.add()
            try:
                member.pid = self._crew.start(member.name)
            except OSError as error:
                self.roster.ended(member.name, FAILURE)
                self._aftermath.unstarted(member, error, now)
            else:
                self._out.record("worker_started", worker=member.name, pid=member.pid)

    def _watch_script(self, now: float, *, at_once: bool = False) -> None:
        change = self._script.change(now, at_once=at_once)
        if change is not None:
            self._out.record("script_changed", **change)

    def _check_minimum(self, now: float) -> None:
        """Workers wait below the minimum by themselves; this catches a fleet that cannot."""
        settings = self.settings
        enough = len(self.roster.staying()) >= settings.minimum or self.roster.finishing
        if enough or self.roster.stopping or self._missing() > 0:
            self._thin_since = None
        elif self._thin_since is None:
            self._thin_since = now
        elif now - self._thin_since > settings.patience_seconds + settings.drain_seconds:
            self._aftermath.fail(RESUMABLE, f"fewer than {settings.minimum} workers for too long")

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
                {
                    "name": m.name,
                    "host": m.host,
                    "pid": m.pid,
                    "code": m.code,
                    "at_barrier": m.at_barrier,
                    **m.row,
                }
                for m in members
            ],
        }

    def _joined(self) -> dict[str, object]:
        settings = self.settings
        return {"resume": settings.resume, "checkpoint_seconds": settings.checkpoint_seconds}
