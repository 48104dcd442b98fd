"""Which epoch the body of the user's loop is for, and which bodies have come to their end.

The cursor alone says how far the training is, not how far the loop: at an epoch's last step the body
goes on to evaluate. So the state counts the bodies that are completed, too. A run that was stopped
between an epoch's last step and the end of its body enters that body again; there is nothing left to
train in it, and whatever follows in it is done again.
"""

from __future__ import annotations

from shoal.errors import UsageError
from shoal.fleet.state import Progress


class Bodies:
    """Follows one worker through the bodies of ``fleet.epochs``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._epoch: int | None = None
        self._drawn = False
        self._over = False

    def enter(self) -> int:
        """A body begins; the epoch that it is for."""
        self._epoch, self._drawn, self._over = self._progress.bodies, False, False
        return self._epoch

    def adopt(self) -> None:
        """This worker was healed by a fleet that is in the same part of a body, maybe a later one's."""
        if self._epoch is not None:
            self._epoch = self._progress.bodies

    def complete(self) -> None:
        """The body has come to its end; on all workers between the same two exchanges.

        A worker that missed its last exchange may have been told already, or have been healed since.

        Raises:
            UsageError: it has drawn no batches.
        """
        assert self._epoch is not None
        if not self._drawn:
            raise UsageError(
                "fleet.epochs: the loop's body drew no batches; iterate over fleet.batches(...) in it"
            )
        self._progress.bodies = max(self._progress.bodies, self._epoch + 1)
        self._epoch = None

    def end(self) -> None:
        """There are no more epochs."""
        self._epoch, self._over = None, True

    def draw(self) -> bool:
        """Batches are asked for; whether this body's epoch has any left.

        Raises:
            UsageError: this body has drawn its epoch before, or the last epoch is over.
        """
        if self._over:
            raise UsageError(
                "fleet.batches = called after fleet.epochs has ended; each epoch is drawn in the body of "
                "that loop; call it there, with more epochs if more are to be trained"
            )
        if self._epoch is None:
            return True  # a loop of the user's own, in place of fleet.epochs
        if self._drawn:
            raise UsageError(
                "fleet.batches = called twice in one epoch; a body of fleet.epochs draws its epoch once, "
                "each sample exactly once; go through the data again in the next epoch"
            )
        self._drawn = True
        return self._progress.epoch <= self._epoch

    def drawn(self) -> None:
        """In a loop of the user's own there is no body beside the batches."""
        if self._epoch is None:
            self._progress.bodies = self._progress.epoch
