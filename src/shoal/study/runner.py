"""A runner: claims one search after another until the study is finished.

Started as a process of its own by ``shoal study run``, or called in the user's own process. Any number of
them, started at any time and on any machine that sees the directory, work on one study.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.children import die_with_parent
from shoal.errors import ShoalError
from shoal.ledger.study_rows import StudyWriter
from shoal.study.claims import Claim, ClaimLost, Claims
from shoal.study.confirm import FEWEST_SEEDS, REACH, Confirmation
from shoal.study.design import confirmations, draws
from shoal.study.directory import StudyDirectory
from shoal.study.records import CONFIRM, Goal, SearchKey, Trial
from shoal.study.run import open_study
from shoal.study.runners import FULL_DISK, STOPPED, is_full_disk
from shoal.study.search import Search
from shoal.study.search_run import Making, SearchRun, Tools, Wanting
from shoal.study.spec import StudySpec
from shoal.study.workshop import Workshop

_LOOK_SECONDS = 0.5


class Runner:
    """Works on one study.

    Args:
        directory: of the study, begun already.
        spec: of the study.
        name: of this runner, unique among all that ever worked on it: letters, digits, ``_``, ``-``.
        workshop: makes engines and evaluators; of ``spec`` when None.
        stopped: asked often; True puts the work aside and ends.
    """

    def __init__(
        self,
        directory: StudyDirectory,
        spec: StudySpec,
        *,
        name: str,
        workshop: Making | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._name = name
        self._workshop: Making = workshop or Workshop(directory, spec)
        self._stopped = stopped
        self._claims = Claims(directory.claims, runner=name)
        self._seeds = confirm_seeds(directory)

    def work(self) -> bool:
        """Work until nothing is left to do.

        Returns:
            True when the study is finished, False when ``stopped`` said so first.

        Raises:
            UsageError: the workload cannot be trained.
            OSError: the disk is full; what was measured stays.
        """
        with StudyWriter(self._directory.rows(self._name)) as rows:
            while not self._stopped():
                open_keys = self._open()
                if not open_keys:
                    return True
                claim, key = self._claim(open_keys)
                if claim is None or key is None:
                    # Others are at what is left; one of them may yet be killed.
                    time.sleep(_LOOK_SECONDS)
                    continue
                try:
                    self._carry_out(key, claim, rows)
                except ClaimLost as lost:
                    _say(str(lost))
                finally:
                    claim.release()
        return False

    def _open(self) -> list[SearchKey]:
        """What is not finished: searches first, then the confirmations that they have made possible."""
        searches = self._spec.searches()
        left = [key for key in searches if self._directory.end_of(key) is None]
        unfinished = {(key.curve, key.global_batch) for key in left}
        points = dict.fromkeys((key.curve, key.global_batch) for key in searches)
        for curve, batch in points if self._seeds else ():
            key = SearchKey(curve=curve, global_batch=batch, repeat=CONFIRM)
            if (curve, batch) not in unfinished and self._is_to_confirm(key):
                left.append(key)
        return left

    def _is_to_confirm(self, key: SearchKey) -> bool:
        """Whether a point's winner was not confirmed yet, by so many seeds; a grown study may have another."""
        found = self._winner(key)
        if found is None:
            return False
        end: Any = self._directory.end_of(key)
        return end is None or end["seeds"] < self._seeds or end["setting"] != found[0].address

    def _claim(self, keys: Sequence[SearchKey]) -> tuple[Claim | None, SearchKey | None]:
        for key in keys:
            claim = self._claims.take(str(key))
            if claim is None:
                continue
            if key in self._open():
                return claim, key
            # Finished between looking and claiming.
            claim.release()
        return None, None

    def _carry_out(self, key: SearchKey, claim: Claim, rows: StudyWriter) -> None:
        wanting, trials = self._task(key)
        tools = Tools(
            trials=trials,
            wanting=wanting,
            engine=self._workshop.engine(key),
            measuring=self._workshop.measuring(key),
            rows=rows,
            directory=self._directory,
        )
        SearchRun(key, tools, claim=claim, stopped=self._stopped).go()

    def _task(self, key: SearchKey) -> tuple[Wanting, Callable[[int], Trial]]:
        spec = self._spec
        if key.repeat != CONFIRM:
            grid = spec.grid.points(spec.steps)
            return Search(spec.goals, spec.budget, grid), self._drawn(key)
        found = self._winner(key)
        assert found is not None
        winner, steps, goals = found
        seeds = confirmations(spec, winner, 0, self._seeds)
        grid = spec.grid.points(min(spec.steps, max(1, round(REACH * steps))))
        confirmation = Confirmation(
            goals=goals, seeds=self._seeds, grid=grid, setting=winner.address
        )
        return confirmation, seeds.__getitem__

    def _drawn(self, key: SearchKey) -> Callable[[int], Trial]:
        known: list[Trial] = []

        def trial(number: int) -> Trial:
            while len(known) <= number:
                known.extend(draws(self._spec, key, len(known), max(2 * len(known), 16)))
            return known[number]

        return trial

    def _winner(self, key: SearchKey) -> tuple[Trial, int, list[Goal]] | None:
        """The setting to confirm at a point: that of the fewest steps over its repeats.

        Returns:
            The winning trial, its steps, and the goals it is to meet; None where no goal was reached.
        """
        ends: list[tuple[SearchKey, Any]] = []
        for other in self._spec.searches():
            if (other.curve, other.global_batch) == (key.curve, key.global_batch):
                ends.append((other, self._directory.end_of(other)))
        goals = Search(self._spec.goals, self._spec.budget, self._spec.grid.points(1)).goals
        for hardest in range(len(goals) - 1, -1, -1):
            reached: list[tuple[int, int, SearchKey, int]] = []
            for other, end in ends:
                goal = end["goals"][hardest] if end else {}
                if goal.get("steps") is not None:
                    reached.append((goal["steps"], other.repeat, other, goal["winner"]))
            if reached:
                steps, _, search, winner = min(reached, key=lambda entry: entry[:2])
                trial = draws(self._spec, search, winner, winner + 1)[0]
                return trial, steps, list(goals[: hardest + 1])
        return None


def confirm_seeds(directory: StudyDirectory) -> int:
    """How many seeds confirm a winner in this study; 0 for none."""
    content: Any = directory.spec()
    return int(content.get("confirm_seeds", FEWEST_SEEDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """A runner process; see :class:`Runner`.

    Returns:
        0 when the study is finished, 75 when it was told to stop, 2 on a user's mistake, 74 on a full
        disk, where this process's last line may be lost with the rest, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runner", required=True)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args(arguments)
    if given.parent is not None:
        die_with_parent(given.parent)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    torch.set_num_threads(1)
    try:
        directory, spec = open_study(given.directory)
        finished = Runner(directory, spec, name=given.runner, stopped=stop.is_set).work()
    except ShoalError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        _say(
            f"{error}; everything measured so far is kept; make room and run the same command again"
        )
        return FULL_DISK if is_full_disk(error) else 1
    return 0 if finished else STOPPED


def _say(text: str) -> None:
    """A line on the standard error, if there is room: the log lies on the study's disk, which may be full."""
    # Not print: what it cannot write stays in its buffer, and changes the exit status at the end.
    with contextlib.suppress(OSError):
        os.write(2, f"shoal study: {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
