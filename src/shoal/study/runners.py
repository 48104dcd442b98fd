"""The runner processes of one machine: started, replaced when they are killed, stopped in order.

Each is one single-threaded process that claims one search after another. The parent only looks on; it
writes nothing that they write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.errors import ShoalError, UsageError

STOPPED = 75
FULL_DISK = 74
_POLL_SECONDS = 0.2
_MOST_FAILURES = 3
_SOON_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0


class RunnersFailed(ShoalError):
    """Runner processes failed again and again; what they had measured is kept."""


class DiskFull(ShoalError):
    """The study's disk took no more; what had been measured is kept."""


class RunnersStopped(ShoalError):
    """The runners were stopped in order; the same command goes on."""

    exit_code = STOPPED


@dataclass(kw_only=True)
class _Runner:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float


class Runners:
    """Runner processes on one study directory, as a context: they end with it.

    Args:
        directory: the study's.
        processes: how many, >= 1.
    """

    def __init__(self, directory: Path, *, processes: int) -> None:
        if processes < 1:
            raise UsageError(f"processes = {processes}; a study needs at least 1 runner process")
        self._directory = directory
        self._count = processes
        self._runners: list[_Runner] = []
        self._failures = 0
        self._signalled: int | None = None

    def __enter__(self) -> Runners:
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> int:
        """How many are at work."""
        return sum(runner.process.poll() is None for runner in self._runners)

    def wait(self, look: Callable[[], None]) -> None:
        """Wait until all have ended because nothing is left to do.

        Args:
            look: called several times a second.

        Raises:
            RunnersStopped: a runner was told to stop, and did.
            UsageError: a runner ended on a user's mistake; its one line is the text.
            DiskFull: the disk took no more.
            RunnersFailed: they failed again and again.
        """
        while self._runners:
            look()
            time.sleep(_POLL_SECONDS)
            for runner in list(self._runners):
                status = runner.process.poll()
                if status is not None:
                    self._runners.remove(runner)
                    self._ended(runner, status)

    def stop(self) -> None:
        """Tell all to put aside what they are at and end; kill those that do not within a minute."""
        for runner in self._runners:
            with contextlib.suppress(ProcessLookupError):
                runner.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + _PATIENCE_SECONDS
        for runner in self._runners:
            try:
                runner.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                runner.process.kill()
                runner.process.wait()
        self._runners = []

    def _start(self) -> None:
        name = uuid.uuid4().hex[:12]
        log = self._directory / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "shoal.study.runner", str(self._directory)]
        command += ["--runner", name, "--parent", str(os.getpid())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                # Ctrl-C goes to the parent alone, which stops its runners in order.
                start_new_session=True,
            )  # fmt: skip
        self._runners.append(_Runner(name=name, process=process, log=log, began=time.monotonic()))

    def _ended(self, runner: _Runner, status: int) -> None:
        if status == 0:
            return
        last = _last_line(runner.log)
        if status == 2:
            raise UsageError(last)
        if status == STOPPED:
            raise RunnersStopped("stopped in order; the same command goes on where it was")
        if status == FULL_DISK:
            # Said here, since the runner's own words may have found no room either.
            raise DiskFull(
                f"{self._directory}: no space left on the disk, or a limit on size was met; everything "
                "measured so far is kept; make room and run the same command again"
            )
        # Killed runners are replaced for ever: spot machines do that. Those that fail, or crash as soon as
        # they begin, are not.
        soon = time.monotonic() - runner.began < _SOON_SECONDS
        self._failures += status > 0 or (soon and status != -signal.SIGKILL)
        if status < 0:
            name = signal.Signals(-status).name
            print(
                f"shoal study: a runner was ended by {name}; another one takes its place",
                file=sys.stderr,
                flush=True,
            )
        if self._failures >= _MOST_FAILURES:
            raise RunnersFailed(
                f"{self._failures} runner processes failed; the last one said: {last}; everything "
                f"measured is kept; the whole text is in {runner.log}"
            )
        self._start()


def is_full_disk(error: OSError) -> bool:
    """Whether writing failed for want of room: a full disk, a quota, or a limit on a file's size."""
    # The journal and safetensors have no number of their own for it.
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    told = str(error)
    return error.errno in numbers or "No space left" in told or "disk full" in told


def _last_line(log: Path) -> str:
    file: IO[str]
    with log.open(errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1].removeprefix("shoal study: ") if lines else "nothing"
