"""The run directory: its default name, its lock, and how a running fleet is found by it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from shoal.errors import UsageError
from shoal.fleet.supervisor.summary import write_json
from shoal.ledger.journal import read

RUNS = Path("runs")
CONTROL_FILE = "control.json"
LOCK_FILE = ".supervisor.lock"


def default_dir(train_script: Path, runs: Path = RUNS) -> Path:
    """``runs/NAME-N`` for the first N that is free."""
    number = 1
    while (runs / f"{train_script.stem}-{number}").exists():
        number += 1
    return runs / f"{train_script.stem}-{number}"


def latest_dir(train_script: Path, runs: Path = RUNS) -> Path:
    """``runs/NAME-N`` with the largest N: what ``--resume`` without ``--run-dir`` goes on with.

    Raises:
        UsageError: there is none.
    """
    prefix = f"{train_script.stem}-"
    found = [
        (int(path.name[len(prefix) :]), path)
        for path in runs.glob(f"{prefix}*")
        if path.name[len(prefix) :].isdigit()
    ]
    if not found:
        raise UsageError(f"--resume: no run of {train_script.name} in {runs}/; give its --run-dir")
    return max(found)[1]


def check_writable(directory: Path, option: str = "--run-dir") -> None:
    """Try whether files can be made and written in ``directory``, which need not exist yet.

    Nothing is left of the attempt.

    Args:
        directory: where something is to be written.
        option: how the user names it.

    Raises:
        UsageError: that is not so.
    """
    made: list[Path] = []
    probe = directory / f".probe.{os.getpid()}"
    try:
        try:
            for place in reversed((directory, *directory.parents)):
                with contextlib.suppress(FileExistsError):
                    place.mkdir()
                    made.append(place)
            with probe.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            for place in (probe, *reversed(made)):
                with contextlib.suppress(OSError):
                    place.unlink() if place is probe else place.rmdir()
    except OSError as error:
        raise UsageError(
            f"{option} {directory}: cannot be written: {error.strerror or error}; make room or give "
            f"another {option}"
        ) from None


class RunLock:
    """Held by the one supervisor of a run directory, until its process ends.

    Args:
        run_dir: made when missing.

    Raises:
        UsageError: another supervisor holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise UsageError(
                f"{run_dir}: another supervisor runs in this directory; wait for it, change its "
                f"workers with `shoal resize {run_dir} N`, or give another --run-dir"
            ) from None

    def release(self) -> None:
        """Let go."""
        os.close(self._fd)


def check_fresh(run_dir: Path, resume: bool) -> int:
    """Whether the directory fits the wish to start or to resume; how many names were used in it.

    Raises:
        UsageError: it holds a run and ``resume`` was not asked, or it holds none and was.
    """
    events = run_dir / "events.jsonl"
    try:
        rows = read(events) if events.exists() else []
    except OSError as error:
        raise UsageError(
            f"{events}: cannot be read: {error.strerror or error}; give another --run-dir"
        ) from None
    if rows and not resume:
        raise UsageError(
            f"{run_dir}: holds a run already; go on with it by --resume, or give another --run-dir"
        )
    if resume and not rows:
        raise UsageError(
            f"{run_dir}: holds no run to resume; leave --resume out to start one there"
        )
    kinds = ("worker_started", "worker_joined")
    names = [str(row["worker"]) for row in rows if row.get("kind") in kinds]
    return 1 + max((int(n[1:]) for n in names if n[1:].isdigit()), default=-1)


def log_file(run_dir: Path, name: str) -> Path:
    """Where what a worker, or the coordinator, prints is kept."""
    return run_dir / "logs" / f"{name}.log"


def is_shared(run_dir: Path, token: str) -> bool:
    """Whether this is the directory of the run with that token, seen from a machine that joined it."""
    try:
        return json.loads((run_dir / CONTROL_FILE).read_text())["token"] == token
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_joined(run_dir: Path) -> None:
    """Whether a machine that joins a run may keep its workers' files in ``run_dir``.

    Raises:
        UsageError: it holds checkpoints, which workers would take for the run's own.
    """
    if any((run_dir / "checkpoints").glob("step-*")):
        raise UsageError(
            f"--run-dir {run_dir}: holds checkpoints of another run or another start; give --join a "
            "fresh directory, or leave the option out"
        )


def write_control(run_dir: Path, host: str, port: int, token: str) -> None:
    """Leave the control endpoint's address and token, readable by the owner alone."""
    document = {"host": host, "port": port, "token": token, "pid": os.getpid()}
    write_json(run_dir / CONTROL_FILE, document, mode=0o600)


def remove_control(run_dir: Path) -> None:
    """The run is over: its endpoint cannot be found any more."""
    with contextlib.suppress(OSError):  # who finds it all the same finds nobody there
        (run_dir / CONTROL_FILE).unlink()


def find_control(run: str) -> tuple[str, str]:
    """Address and token of a running fleet, by its directory or its name under ``runs/``.

    Raises:
        UsageError: no such run, or it is not running.
    """
    candidates = [Path(run), RUNS / run]
    run_dir = next((path for path in candidates if os.path.isdir(path)), None)
    if run_dir is None:
        raise UsageError(f"RUN = {run}; no such run directory; give its path, e.g. runs/train-1")
    try:
        control = json.loads((run_dir / CONTROL_FILE).read_text())
        return f"{control['host']}:{control['port']}", str(control["token"])
    except FileNotFoundError:
        raise UsageError(
            f"{run_dir}: not running; start it with `shoal run --run-dir {run_dir}`"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{run_dir / CONTROL_FILE}: cannot be read: {error}") from None
