"""Local steps of virtual workers: what is to be done, and by whom.

Between two rounds workers do not touch each other, so their steps may be computed in any order. The plain
loop (:mod:`shoal.world.virtual.loop`) takes one worker after another and is the reference;
:mod:`shoal.world.virtual.vectorised` takes neighbouring rows through a step together. Both work on the same
rows; they agree to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from shoal.data.order import Indices
from shoal.study.engines.update import Floats, Settings
from shoal.world.virtual.faults import Faults
from shoal.world.virtual.stack import Optimizer


@dataclass(frozen=True, kw_only=True)
class Work:
    """Steps of one worker.

    Args:
        row: its row.
        samples: of each step, shape (steps, local_batch).
        lr: of each step, shape (steps,).
        first: the worker's own number of the first of them; where its faults begin counts by it.
        faults: of the worker.
    """

    row: int
    samples: Indices
    lr: Floats
    first: int = 0
    faults: Faults = field(default_factory=lambda: Faults(worker=0))

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.samples)

    def part(self, first: int, last: int) -> Work:
        """Some of its steps."""
        return replace(
            self,
            samples=self.samples[first:last],
            lr=self.lr[first:last],
            first=self.first + first,
        )


class Training(Protocol):
    """Advances rows of a stack."""

    @property
    def name(self) -> str:
        """``loop``, ``layers`` or ``vmap``."""
        ...

    def advance(self, work: Sequence[Work]) -> Mapping[int, Floats]:
        """Do steps of several workers, at most one entry per row.

        Returns:
            By row, the loss of each step's batch before its update.
        """
        ...

    def gradients(self, work: Sequence[Work]) -> tuple[Tensor, Mapping[int, Floats]]:
        """Gradients of one step of rows 0, 1, ..., each at its own weights; nothing is updated.

        Args:
            work: one step of every row, in order.

        Returns:
            ``[rows, numbers]``, valid until the next call, and by row the loss, shape (1,).
        """
        ...

    def update(self, work: Sequence[Work], gradients: Tensor) -> None:
        """The optimizer step of rows 0, 1, ... with given gradients.

        Args:
            work: as :meth:`gradients` was given.
            gradients: ``[rows, numbers]`` or an expanded row.
        """
        ...


def settings_of(optimizer: Optimizer, lr: Floats) -> Settings:
    """The optimizer's numbers for an update of one row.

    Args:
        optimizer: of all workers.
        lr: of each step.
    """
    return Settings(
        lr=lambda start, steps: lr,
        momentum=0.0 if optimizer.kind in ("sgd", "adamw") else optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        eps=optimizer.eps,
    )
