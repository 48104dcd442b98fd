"""What a worker's process runs: the user's script, as ``python train.py`` would, and a clear end.

Run by path, not imported: it uses the standard library alone, so that a worker pays nothing for it.

    python worker_main.py train.py [arguments]

Besides running the script it dies with its parent, and turns an uncaught error of shoal into one
line and the exit status of its class; every other error keeps its traceback and status 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import runpy
import signal
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "SHOAL_PARENT_PID"
# Ends that say all there is to say; any other error, of shoal's too, is a defect and is traced.
ONE_LINE_ERRORS = ("UsageError", "DivergedError", "ResumableStop")
RESUMABLE = 75
# To the supervisor a non-finite loss, which all workers stop for, is not any failure; it exits with 1.
DIVERGED = 65


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux).

    As :func:`shoal.children.die_with_parent`, which cannot be imported here.
    """
    parent = int(os.environ.pop(PARENT_VARIABLE))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def own_error(error: BaseException) -> int | None:
    """The exit status of an error that ends in one line, None for one that needs a traceback."""
    for kind in type(error).__mro__:
        if kind.__module__ == "shoal.errors" and kind.__name__ in ONE_LINE_ERRORS:
            if kind.__name__ == "DivergedError":
                return DIVERGED
            return int(getattr(error, "exit_code", 1))
    return None


def was_turned_back() -> bool:
    """Whether the supervisor asked this worker to leave before it took part in a run that goes on."""
    try:
        # Whatever raised an error of shoal's has imported it, and this is on the standard library alone.
        from shoal.errors import ShoalError
        from shoal.world.elastic.endpoint import ControlClient
    except ImportError:
        return False
    name = os.environ["SHOAL_WORKER"]
    try:
        client = ControlClient(os.environ["SHOAL_CONTROL"], os.environ["SHOAL_TOKEN"])
        news = client.call("watch", {"name": name, "seen": -1})
        client.close()
    except (OSError, ShoalError):
        return False
    return news.get("turned_back") is True


def below_this_file(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that start the script."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in (__file__, runpy.__file__, "<frozen runpy>"):
            return trace
        trace = trace.tb_next
    return None


class Output(io.FileIO):
    """Standard output or error of a worker: a disk that is full costs the text, not the training."""

    def write(self, data: Buffer) -> int:
        """Write all of it, or say so."""
        rest = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[super().write(rest) or 0 :]
        return memoryview(data).nbytes


def keep_printing() -> None:
    """Let nothing that is printed end this process."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        raw = Output(old.fileno(), "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True))


def main(script: str, arguments: list[str]) -> int:
    """Run the script and return the exit status; ``SystemExit`` passes through."""
    die_with_parent()
    keep_printing()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        status = own_error(error)
        sys.stdout.flush()
        if status is None:
            trace = below_this_file(error.__traceback__)
            traceback.print_exception(type(error), error, trace)
            return 1
        if status == RESUMABLE and was_turned_back():
            print("shoal: asked to leave before this worker took part", file=sys.stderr, flush=True)
            return 0
        print(f"shoal: {error}", file=sys.stderr, flush=True)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
