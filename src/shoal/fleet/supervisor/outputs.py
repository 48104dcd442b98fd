"""What a run leaves and shows: event rows, the summary, the report, lines on the screen."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from shoal.errors import UsageError
from shoal.fleet.supervisor import summary
from shoal.fleet.supervisor.follow import LogFollower
from shoal.fleet.supervisor.kept import KeptJournal
from shoal.fleet.supervisor.rundir import log_file
from shoal.fleet.supervisor.screen import View, event_line, open_screen
from shoal.fleet.supervisor.settings import Settings

SILENT_KINDS = ("describe",)  # long, and many: one for each change of the membership


class Outputs:
    """The only writer of ``events.jsonl``, ``run.json``, ``summary.json`` and ``report.html``.

    Also of the metrics of workers on other machines, which write them there first. A disk that fails
    costs the files, each with one line, and not the run.

    Args:
        settings: of the run.
        stream: where lines or the live table go.
        is_new_dir: whether this start made the run directory.

    Attributes:
        summary: the document of a run that has ended; None before, and where nothing is left of it.
        summary_path: where it was written; None if it could not be.

    Raises:
        UsageError: ``events.jsonl`` cannot be written.
    """

    def __init__(self, settings: Settings, stream: TextIO, *, is_new_dir: bool) -> None:
        self._settings, self._is_new_dir = settings, is_new_dir
        self._run_dir = settings.run_dir
        self._said: set[str] = set()
        self._journal = KeptJournal(self._run_dir / "events.jsonl", self.line)
        try:
            self._journal.open()
            self._journal_start = self._journal.path.stat().st_size
        except OSError as error:
            raise UsageError(
                f"{self._journal.path}: cannot be written: {error.strerror or error}; give another "
                "--run-dir"
            ) from None
        self.summary: dict[str, object] | None = None
        self.summary_path: Path | None = None
        title = f"shoal run {settings.train_script.name} · {self._run_dir}"
        self._screen = open_screen(stream, title)
        self._follower = LogFollower(self._screen.line)
        self._logs: dict[str, Path] = {}
        self._metrics: dict[str, KeptJournal] = {}

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self._logs.setdefault(name, log_file(self._run_dir, name))

    def line(self, text: str) -> None:
        """Show a line."""
        self._screen.line(text)

    def trouble(self, what: str, error: OSError) -> None:
        """Show that something could not be done, once."""
        if what not in self._said:
            self._said.add(what)
            self.line(f"{what}: {error.strerror or error}")

    def record(self, kind: str, **fields: object) -> None:
        """Write an event row and show its line."""
        row = {"kind": kind, "time": time.time(), **fields}
        self._journal.append(row)
        if kind not in SILENT_KINDS:
            self._screen.line(event_line(row))

    def metrics(self, rows: Iterable[tuple[str, Mapping[str, object]]]) -> None:
        """Store rows of metrics that workers on other machines wrote there."""
        for name, row in rows:
            if name not in self._metrics:
                path = self._run_dir / "metrics" / f"{name}.jsonl"
                self._metrics[name] = KeptJournal(path, self.line)
            self._metrics[name].append(row)

    def show(self, view: View, leading: str | None) -> None:
        """Show the present state, and what the leading worker printed."""
        self._screen.show(view)
        if leading is not None:
            self._follower.follow(self.log(leading))

    def ended(self, name: str) -> None:
        """A worker ended: show what it still printed, if it was the leading one."""
        self._follower.finish(self.log(name))

    def describe(self, row: dict[str, object]) -> None:
        """Write ``run.json``: what the workers say about the run, and the command."""
        settings = self._settings
        described = {key: value for key, value in row.items() if key not in ("kind", "time")}
        command = [settings.python, str(settings.train_script), *settings.arguments]
        document = {**described, "command": command, "workers": settings.workers_text}
        try:
            summary.write_json(self._run_dir / "run.json", document)
        except OSError as error:
            self.trouble("run.json cannot be written", error)

    def close_screen(self) -> None:
        """Leave the terminal as it was; later lines are printed as they come."""
        self._screen.close()

    def finish(self, exit_code: int, total_samples: int | None) -> None:
        """Complete the files of a run that has ended; ``total_samples`` are those it was to train."""
        self.record("end", exit_code=exit_code, total_samples=total_samples)
        for journal in (self._journal, *self._metrics.values()):
            journal.close()
        self._write_summary(exit_code)
        if self._settings.report:
            self._write_report()

    def _write_summary(self, exit_code: int) -> None:
        path = self._run_dir / "summary.json"
        try:
            self.summary = summary.build(self._run_dir, exit_code, self._journal.unwritten)
            summary.write_json(path, self.summary)
            self.summary_path = path
        except (OSError, UsageError) as error:
            self.line(f"no summary.json: {error}")
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # that of an earlier start says something else

    def leave_nothing(self) -> None:
        """A mistake that showed before anything was trained leaves the directory as it was."""
        self._journal.close()
        try:
            self._undo()
        except OSError as error:
            self.trouble(f"{self._run_dir} could not be left as it was", error)

    def _undo(self) -> None:
        if self._is_new_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            return
        if self._journal_start == 0:
            self._journal.path.unlink()
        else:
            os.truncate(self._journal.path, self._journal_start)
        for log in self._logs.values():
            log.unlink(missing_ok=True)

    def _write_report(self) -> None:
        # The report needs matplotlib, and a run must not fail at its very end for want of a picture.
        try:
            from shoal.report import write_run_report

            write_run_report(self._run_dir)
        except ImportError as error:
            self._screen.line(
                f"no report.html: {error}; pip install 'shoal[report]', then shoal report"
            )
        except Exception as error:
            self._screen.line(f"no report.html: {type(error).__name__}: {error}")
