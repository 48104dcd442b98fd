"""Starting processes so that none outlives the supervisor, and learning of their ends.

Every process gets a session of its own. Two things end it with its supervisor: the kernel's
parent-death signal, which reaches the process itself at once, and a guard process, which kills
whole groups and so the children that a worker had. Both work for a supervisor killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from shoal.fleet.supervisor.worker_main import PARENT_VARIABLE

HERE = Path(__file__).parent


class Process:
    """One child in a process group of its own."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Its exit status (negative: the signal that ended it), None while it runs.

        What is left of its group is killed before the status is taken: until then the number of the
        group belongs to nobody else.
        """
        if self._popen.returncode is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, flags) is None:
                return None
            self.kill()
        return self._popen.poll()

    def wait(self) -> None:
        """Block until it has ended."""
        self._popen.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process alone, if it is still there."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL for the whole group."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Nursery:
    """Starts children and keeps the guard informed. To be used from the main thread alone.

    The parent-death signal fires when the *thread* that started the child ends, so the starting
    thread must be one that lives as long as the process.

    Args:
        python: the interpreter for the children.

    Attributes:
        say: shows a line.
    """

    def __init__(self, python: str = sys.executable) -> None:
        assert threading.current_thread() is threading.main_thread()
        self._python = python
        self.say: Callable[[str], None] = lambda _text: None
        self._children: list[Process] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "guard_main.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Process:
        """Start ``program`` (a file beside this one) with both outputs appended to ``log``.

        Raises:
            OSError: no process can be started. A log that cannot be opened is said, and done without.
        """
        with self._open(log) as output:
            popen = subprocess.Popen(
                [self._python, str(HERE / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        process = Process(popen)
        self._children.append(process)
        self._tell("+", process.pid)
        return process

    def forget(self, process: Process) -> None:
        """The process has ended and its status was taken."""
        if process in self._children:
            self._children.remove(process)
            self._tell("-", process.pid)

    def close(self) -> None:
        """Kill every child that is left, and end the guard."""
        for process in list(self._children):
            process.kill()
            process.wait()
            self.forget(process)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()

    def _open(self, log: Path) -> IO[bytes]:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            return log.open("ab")
        except OSError as error:
            self.say(f"{log.name}: cannot be written ({error.strerror or error})")
            return open(os.devnull, "ab")

    def _tell(self, sign: str, group: int) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(f"{sign}{group}\n".encode())
            self._guard.stdin.flush()


def last_line(log: Path) -> str:
    """The last line with something on it, or an empty text."""
    lines = [line for line in _tail(log).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def last_traceback(log: Path) -> str:
    """The last traceback in a log, to the end of the log; its last lines where there is none."""
    text = _tail(log)
    start = text.rfind("Traceback (most recent call last):")
    # A chained exception has several headers: go back to the first of the chain.
    chain = ("another exception occurred:\n\n", "direct cause of the following exception:\n\n")
    while start > 0 and text[:start].endswith(chain):
        start = text.rfind("Traceback (most recent call last):", 0, start)
    if start >= 0:
        return text[start:].rstrip()
    return "\n".join(text.rstrip().splitlines()[-10:])


def _tail(log: Path, size: int = 1 << 16) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
