"""Real supervisors with tiny workers, for the tests of ``shoal run``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import shoal
from shoal.errors import UsageError
from shoal.fleet.supervisor.rundir import find_control
from shoal.ledger.journal import read
from shoal.world.elastic.endpoint import ControlClient

# Neither the supervisor nor these workers need torch: without the package's own __init__ they start
# in a fifth of a second instead of several.
PRELUDE = f"""
import sys, types
shoal = types.ModuleType("shoal")
shoal.__path__ = [{str(Path(shoal.__file__).parent)!r}]
shoal.__version__ = {shoal.__version__!r}
sys.modules["shoal"] = shoal
"""

# Works until told: leaves when asked, finishes when the file appears.
WORKER = (
    PRELUDE
    + """
import os, time
from pathlib import Path
from shoal.world.elastic.endpoint import ControlClient
from shoal.world.elastic.link import connect

here = Path(__file__).parent
link = connect()
link.leave_on_signals()
link.ready()
link.event({"kind": "through", "trained": link.trained(), "joins": link.joins()})

def leave():
    link.close()
    client = ControlClient(os.environ["SHOAL_CONTROL"], os.environ["SHOAL_TOKEN"])
    sys.exit(75 if client.call("status")["stopping"] else 0)

def report(step, phase="compute"):
    row = {"step": step, "samples": 10 * step, "commits": step, "phase": phase}
    link.report({**row, "phase_seconds": 0.0, "workers": 2, "global_batch": 20, "lr": 0.1})

def work(step):
    report(step)

def train():
    step = 0
    while not (here / "finish").exists():
        if link.leave_requested():
            leave()
        step += 1
        work(step)
        time.sleep(0.02)
    link.event({"kind": "finish"})
    link.close()
"""
)
TRAIN = WORKER + "\ntrain()\n"
SECONDS = 60.0


def until(condition, what, seconds=SECONDS):
    """Wait for a condition; fail with ``what`` when it does not come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def is_running(pid):
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Run:
    """One ``shoal run`` as a process of its own; ended, with all it started, by :meth:`close`."""

    def __init__(self, directory, script, *options, run_dir=None, environment=None, piped=False):
        self.directory = directory
        self.run_dir = Path(run_dir or directory / "run")
        train = directory / "train.py"
        train.write_text(script)
        main = PRELUDE + "from shoal.cli import main; sys.exit(main())"
        place = [] if "--join" in options else ["--no-report"]
        command = [sys.executable, "-c", main, "run", "--run-dir", str(self.run_dir), *place]
        self._out = (directory / f"out-{self.run_dir.name}").open("w+")
        self._err = (directory / f"err-{self.run_dir.name}").open("w+")
        # Through a pipe what it prints comes here, whatever its own files may hold.
        self._reader = None
        if piped:
            self._reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=self._out)
        self.process = subprocess.Popen(
            [*command, *options, str(train)],
            stdout=self._reader.stdin if self._reader else self._out,
            stderr=self._err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def out(self):
        """What it printed so far."""
        return Path(self._out.name).read_text()

    @property
    def err(self):
        """What it complained of so far."""
        return Path(self._err.name).read_text()

    def events(self, kind=None):
        """Event rows so far, of one kind if asked."""
        path = self.run_dir / "events.jsonl"
        rows = read(path) if path.exists() else []
        return [row for row in rows if kind is None or row["kind"] == kind]

    def until_events(self, kind, count):
        """Wait for so many events of a kind, and return them."""
        return until(
            lambda: found if len(found := self.events(kind)) >= count else None,
            f"{count} x {kind}; events {self.events()}; out {self.out} err {self.err}",
        )

    def until_at_work(self, *names):
        """Wait until these workers have reported a step."""

        def at_work():
            try:
                members = {m["name"]: m for m in self.control("status")["members"]}
            except (UsageError, OSError):
                return False  # not up yet
            return all(members.get(name, {}).get("commits", 0) > 0 for name in names)

        until(at_work, f"{names} at work; {self.process.poll()} out {self.out} err {self.err}")

    def control(self, verb, **body):
        """Ask the run's control endpoint."""
        address, token = find_control(str(self.run_dir))
        client = ControlClient(address, token)
        try:
            return client.call(verb, body)
        finally:
            client.close()

    def pids(self):
        """Process ids of the workers by name."""
        return {row["worker"]: row["pid"] for row in self.events("worker_started")}

    def finish(self):
        """Let the workers finish."""
        (self.directory / "finish").touch()

    def wait(self, seconds=SECONDS):
        """Its exit status."""
        status = self.process.wait(seconds)
        if self._reader is not None:
            self._reader.stdin.close()
            self._reader.wait(seconds)
        return status

    def close(self):
        """End it, and make sure that nothing is left."""
        self.process.kill()
        self.process.wait()
        if self._reader is not None:
            self._reader.stdin.close()
            self._reader.wait()
        self._out.close()
        self._err.close()
        for pid in self.pids().values():
            until(lambda pid=pid: not is_running(pid), f"end of worker {pid}")


def stop(pid):
    """SIGKILL for one process, from outside."""
    os.kill(pid, signal.SIGKILL)
