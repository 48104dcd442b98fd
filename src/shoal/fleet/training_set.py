"""The training set of a run: its loader, and whether it is the one the run was begun on."""

from __future__ import annotations

import sys
from typing import Any

from shoal.data.draws import Draws
from shoal.errors import UsageError
from shoal.fleet.data_mark import data_mark, marks_agree
from shoal.fleet.state import Progress


class TrainingSet:
    """Keeps the loader from epoch to epoch while the loop asks for the same one."""

    def __init__(self, progress: Progress, *, pin_memory: bool) -> None:
        self._progress = progress
        self._pin_memory = pin_memory
        self._draws: Draws | None = None
        self._asked: tuple[Any, ...] = ()
        self._marked: tuple[Any, list[float]] | None = None

    def open(self, dataset: Any, num_workers: int, collate: Any) -> Draws:
        """The loader of ``dataset``.

        Raises:
            UsageError: a data set without samples, or one that cannot be read by index.
        """
        # The data set itself is held and compared: another one may get its id once it is gone.
        held = self._draws
        if held and self._asked[0] is dataset and self._asked[1:] == (num_workers, collate):
            return held
        try:
            draws = Draws(
                dataset,
                seed=self._progress.seed,
                num_workers=num_workers,
                collate=collate,
                pin_memory=self._pin_memory,
            )
        except TypeError as error:
            raise UsageError(str(error)) from error
        self.close()
        self._draws, self._asked = draws, (dataset, num_workers, collate)
        return draws

    def check(self, samples: int, *, resumed: bool) -> None:
        """Tie the run to this data set.

        Args:
            samples: its length.
            resumed: the run has just come from a checkpoint.

        Raises:
            UsageError: another length than the run's, or other values after a resume in mid-epoch.
        """
        progress = self._progress
        if progress.samples is None:
            progress.samples = samples
        elif progress.samples != samples:
            raise UsageError(
                f"dataset = {samples:,} samples, but this run was begun on {progress.samples:,}; positions "
                "would mean other samples; pass the same training set, or start a new run directory"
            )
        mark = self._mark()
        if resumed and not marks_agree(progress.mark, mark):
            if progress.cursor % samples:
                raise UsageError(
                    f"dataset = other values than those this run was begun on, at step {progress.step} in "
                    "the middle of an epoch; some samples would be missed and others repeated; pass the "
                    "same training set, or start a new run directory"
                )
            print(
                "shoal: dataset = other values than those this run was begun on; it goes on with them",
                file=sys.stderr,
                flush=True,
            )
        progress.mark = mark

    def close(self) -> None:
        """End the loader processes."""
        if self._draws is not None:
            self._draws.close()

    def _mark(self) -> list[float]:
        dataset = self._asked[0]
        if self._marked is None or self._marked[0] is not dataset:
            self._marked = (dataset, data_mark(dataset))
        return self._marked[1]
