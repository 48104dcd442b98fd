"""A study begun or gone on with, by runner processes of this machine or in this process.

The directory decides: what is finished there stays finished, what was put aside is taken up, and a killed
run goes on with the same command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.errors import UsageError
from shoal.study.confirm import FEWEST_SEEDS
from shoal.study.directory import FORMAT, StudyDirectory
from shoal.study.runners import STOPPED, Runners, RunnersStopped
from shoal.study.spec import StudySpec
from shoal.study.spec_file import load_spec, spec_from_canonical

Look = Callable[["Running"], None]


@dataclass(frozen=True, kw_only=True)
class Running:
    """What those who look on are told.

    Args:
        directory: of the study.
        spec: of the study.
        processes: runners at work on this machine; 1 in the user's own process.
    """

    directory: StudyDirectory
    spec: StudySpec
    processes: int


def run_study(
    spec: StudySpec | Path | str,
    out: Path | str,
    *,
    processes: int = 1,
    confirm_seeds: int = FEWEST_SEEDS,
    look: Look | None = None,
) -> StudyDirectory:
    """Carry a study out, from its start or from where it is.

    Args:
        spec: the study, or its TOML file. A spec that holds a ``Workload`` rather than the name of one is
            carried out in this process, since others could not make it.
        out: the study's directory.
        processes: runner processes of this machine, one thread each, >= 1.
        confirm_seeds: fresh seeds with which winners are run again; 0 leaves that out.
        look: called several times a second while runner processes work.

    Returns:
        The finished study's directory.

    Raises:
        UsageError: a directory of another study (the difference is named), or a workload that cannot be
            trained; before anything is written, where that can be known.
        RunnersStopped: it was interrupted and has put its work aside.
        RunnersFailed: runner processes failed again and again.
    """
    if isinstance(spec, Path | str):
        spec = load_spec(spec)
    if processes < 1:
        raise UsageError(f"processes = {processes}; a study needs at least 1 runner process")
    if processes > 1 and not isinstance(spec.workload, str):
        raise UsageError(
            f"processes = {processes} with a Workload made here; other processes cannot make it; give it "
            "by name, as file.py:function, or use processes = 1"
        )
    directory = StudyDirectory(Path(out))
    begin(directory, spec, confirm_seeds=confirm_seeds)
    if isinstance(spec.workload, str):
        _in_processes(directory, spec, processes, look)
    else:
        _in_this_process(directory, spec)
    return directory


def begin(directory: StudyDirectory, spec: StudySpec, *, confirm_seeds: int) -> None:
    """Make sure that ``directory`` is of this study, and begin it there if it is empty.

    A study may grow: more curves, batch sizes or repeats are taken over, and so is another number of
    confirming seeds; anything else is another study.

    Raises:
        UsageError: it is of another study; the text lists the differences.
    """
    if confirm_seeds < 0:
        raise UsageError(f"confirm_seeds = {confirm_seeds}; a number of seeds, 0 for none")
    # Reads the data and refuses what cannot be trained, before anything is written.
    canonical = spec.canonical()
    content: dict[str, object] = {
        "hash": spec.hash,
        "confirm_seeds": confirm_seeds,
        "train_samples": spec.resolved.samples("train"),
        "spec": canonical,
    }
    if spec.base is not None:
        # Relative to the directory, so that both can be moved together.
        content["base"] = os.path.relpath(spec.base, directory.path)
    if directory.begin(content):
        return
    there: Any = directory.spec()
    other = spec_from_canonical(there["spec"])
    if there["spec"] == canonical or other.grows_into(spec):
        if there["spec"] != canonical or there["confirm_seeds"] != confirm_seeds:
            directory.replace_spec(content)
        return
    lines = "; ".join(spec.difference(other))
    raise UsageError(
        f"out = {directory.path}, which holds another study ({lines}); take another directory for this one, "
        "or the spec that began that one"
    )


def open_study(path: Path | str) -> tuple[StudyDirectory, StudySpec]:
    """A study's directory and spec; neither data nor the user's code is needed.

    Raises:
        UsageError: there is no study.
    """
    directory = StudyDirectory(Path(path))
    content: Any = directory.spec()
    base = directory.path / content["base"] if "base" in content else None
    return directory, spec_from_canonical(content["spec"], base=base)


def _in_processes(
    directory: StudyDirectory, spec: StudySpec, processes: int, look: Look | None
) -> None:
    running = Running(directory=directory, spec=spec, processes=processes)
    with (
        _interruptible() as interrupted,
        Runners(directory.path, processes=processes) as runners,
    ):

        def looking() -> None:
            if interrupted():
                raise RunnersStopped("interrupted; the same command goes on where it was")
            if look is not None:
                look(running)

        runners.wait(looking)


def _in_this_process(directory: StudyDirectory, spec: StudySpec) -> None:
    from shoal.study.runner import Runner

    with _interruptible() as interrupted:
        runner = Runner(directory, spec, name=uuid.uuid4().hex[:12], stopped=interrupted)
        if not runner.work():
            raise RunnersStopped("interrupted; the same command goes on where it was")


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT and SIGTERM are noted instead of raised; a second SIGINT is raised."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:
        # Not the main thread: signals are somebody else's business.
        pass
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["FORMAT", "STOPPED", "Running", "begin", "open_study", "run_study"]
