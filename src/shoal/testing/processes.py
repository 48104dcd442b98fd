"""Real processes for tests, from a fork server that has torch imported already.

Importing torch takes seconds on busy cores; a process forked from a server that has done so starts
in some milliseconds. The server itself never runs tensors or threads, so forking it is safe.

    from shoal.testing import processes

    def worker(steps):                        # a module-level function of an importable module
        processes.tell({"pid": os.getpid()})  # to the test; processes.hear(timeout) listens to it
        return steps * 2

    with processes.Herd(tmp_path) as herd:
        child = herd.start(worker, 3, name="w0")
        child.message(timeout=10)             # {"pid": ...}
        child.result(timeout=10)              # 6; ChildFailed, with its log, if it raised or died

``child.kill()`` is SIGKILL, ``child.suspend()`` SIGSTOP, ``child.proceed()`` SIGCONT. Standard
output and error go to ``DIRECTORY/NAME.log``. Leaving the ``with`` block kills whatever still runs;
on Linux the children also die with the fork server, which dies with the test process.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from types import TracebackType

from shoal.children import die_with_parent

# The first optimizer of a process imports torch._dynamo, which takes longer than all the rest.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "shoal",
    "shoal.fleet.init",
    "shoal.testing.processes",
)
_OPTIONAL_PRELOAD = ("torchft.coordination", "shoal.world.elastic.world")

_pipe: Connection | None = None


class ChildFailed(AssertionError):
    """A child raised, died or stayed silent; the text has the end of its log."""


def context() -> ForkServerContext:
    """The multiprocessing context of the fork server, with torch to be imported in it."""
    chosen = multiprocessing.get_context("forkserver")
    assert isinstance(chosen, ForkServerContext)
    # A name that cannot be imported is passed over by the server.
    chosen.set_forkserver_preload([*PRELOAD, *_OPTIONAL_PRELOAD])
    return chosen


@functools.cache
def _server_is_up() -> None:
    """Wait for the server's imports once, so that no test's time limit has to allow for them."""
    first = context().Process(target=os.getpid, name="first", daemon=True)
    first.start()
    first.join()


def tell(message: object) -> None:
    """In a child: send ``message`` (picklable) to the test; ``Child.message`` reads it there."""
    assert _pipe is not None, "tell() works only in a process started by a Herd"
    _pipe.send(("message", message))


def hear(timeout: float | None = None) -> object:
    """In a child: wait for what the test sends with ``Child.send``.

    Args:
        timeout: seconds to wait; None waits without end.

    Raises:
        TimeoutError: nothing came in time.
    """
    assert _pipe is not None, "hear() works only in a process started by a Herd"
    if not _pipe.poll(timeout):
        raise TimeoutError(f"nothing heard from the test in {timeout} s")
    return _pipe.recv()


def _run(
    pipe: Connection,
    log: str,
    path: list[str],
    environment: Mapping[str, str],
    target: str,
    function: bytes,
) -> None:
    """What a child does from its first instruction on."""
    global _pipe
    die_with_parent()
    os.environ.update(environment)
    sys.path[:] = path
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    _pipe = pipe
    try:
        import torch

        torch.set_num_threads(1)
        call, arguments, keywords = pickle.loads(function)
        outcome = ("result", call(*arguments, **keywords))
    except SystemExit as stop:
        outcome = ("exit", stop.code)
    except BaseException as error:
        traceback.print_exc()
        outcome = ("error", f"{target}: {type(error).__name__}: {error}")
    pipe.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that a test left behind must not keep the process: its work is done.
    os._exit(
        0 if outcome[0] == "result" else 1 if outcome[0] == "error" else _exit_code(outcome[1])
    )


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


class Child:
    """One process started by a :class:`Herd`."""

    def __init__(self, name: str, process: ForkServerProcess, pipe: Connection, log: Path):
        self.name = name
        self.log_path = log
        self._process = process
        self._pipe = pipe
        self._messages: deque[object] = deque()
        self._outcome: tuple[str, object] | None = None

    @property
    def pid(self) -> int:
        """Process id, valid also after its end."""
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs (a suspended one does)."""
        return self._process.is_alive()

    @property
    def exitcode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._process.exitcode

    @property
    def log(self) -> str:
        """What the child has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def send(self, message: object) -> None:
        """Send ``message`` to the child, which reads it with :func:`hear`."""
        self._pipe.send(message)

    def signal(self, number: int) -> None:
        """Send a signal to this child, unless it has ended."""
        # It may end between the look and the signal; the fork server has then reaped it already.
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._process.join()

    def suspend(self) -> None:
        """SIGSTOP: alive, but doing nothing."""
        self.signal(signal.SIGSTOP)

    def proceed(self) -> None:
        """SIGCONT after :meth:`suspend`."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM; the child may handle it."""
        self.signal(signal.SIGTERM)

    def message(self, timeout: float = 30.0) -> object:
        """The next message the child told.

        Raises:
            ChildFailed: it ended, or said nothing, within ``timeout`` seconds.
        """
        deadline = monotonic() + timeout
        while not self._messages:
            self._receive(deadline, "a message")
            if self._outcome is not None and not self._messages:
                raise ChildFailed(
                    f"{self.name} ended without a message: {self._outcome}{self._tail()}"
                )
        return self._messages.popleft()

    def messages(self) -> list[object]:
        """All messages that have come and were not taken yet; does not wait."""
        while self._outcome is None and self._pipe.poll(0):
            self._receive(monotonic(), "a message")
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def result(self, timeout: float = 60.0) -> object:
        """What the function returned.

        Raises:
            ChildFailed: it raised, was killed, or took longer than ``timeout`` seconds.
        """
        deadline = monotonic() + timeout
        while self._outcome is None:
            self._receive(deadline, "a result")
        kind, value = self._outcome
        if kind != "result":
            raise ChildFailed(f"{self.name}: {kind} {value}{self._tail()}")
        return value

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end of the process; its exit status.

        Raises:
            ChildFailed: it still runs after ``timeout`` seconds.
        """
        deadline = monotonic() + timeout
        # A child whose last words fill the pipe can only end once they are read.
        while self._outcome is None and self.alive:
            self._receive(deadline, "its end")
        self._process.join(max(0.0, deadline - monotonic()))
        if self.exitcode is None:
            raise ChildFailed(f"{self.name} still runs after {timeout} s{self._tail()}")
        return self.exitcode

    def _receive(self, deadline: float, awaited: str) -> None:
        """Take one item from the pipe: a message, or how the child ended."""
        if not self._pipe.poll(max(0.0, deadline - monotonic())):
            raise ChildFailed(f"{self.name}: waited in vain for {awaited}{self._tail()}")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            self._outcome = ("died", f"with exit status {self.exitcode}")
            return
        if kind == "message":
            self._messages.append(value)
        else:
            self._outcome = (kind, value)

    def _tail(self, lines: int = 30) -> str:
        return f"\n--- end of {self.log_path.name}:\n" + "\n".join(self.log.splitlines()[-lines:])


class Herd:
    """Starts children and never leaves one behind.

    Args:
        directory: where the log files go.
        environment: variables set in every child before its function runs.
    """

    def __init__(self, directory: Path | str, environment: Mapping[str, str] | None = None):
        self._directory = Path(directory)
        self._environment = dict(environment or {})
        self._context = context()
        _server_is_up()
        self.children: list[Child] = []

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        name: str = "",
        **keywords: object,
    ) -> Child:
        """Run ``function(*arguments, **keywords)`` in a new process.

        Args:
            function: a module-level function; it is found by its module's name in the child.
            arguments: picklable arguments.
            name: name of the child and of its log file; must not repeat in this herd.
            keywords: picklable keyword arguments.

        Returns:
            The child; its process is running.
        """
        name = name or f"{function.__name__}-{len(self.children)}"
        if any(child.name == name for child in self.children):
            raise ValueError(f"name = {name!r} is taken in this herd; give each child its own name")
        mine, theirs = self._context.Pipe()
        log = self._directory / f"{name}.log"
        call = bytes(ForkingPickler.dumps((function, arguments, keywords)))
        process = self._context.Process(
            target=_run,
            args=(theirs, str(log), list(sys.path), self._environment, function.__name__, call),
            name=name,
            daemon=True,
        )
        process.start()
        # Our copy of its end must go, or its death would never be seen as an end of file.
        theirs.close()
        child = Child(name, process, mine, log)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Kill whatever still runs, and wait for it."""
        for child in self.children:
            child.kill()

    def __enter__(self) -> Herd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
