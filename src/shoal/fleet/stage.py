"""The batch that the user's loop holds, and what the loop has done with it so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import UsageError


class Stage:
    """drawn -> backward (``failed`` while it runs, or if it does not end well) -> exchange -> done."""

    def __init__(self) -> None:
        self._piece: tuple[int, int, bool] | None = None
        self._name = "idle"

    @property
    def held(self) -> bool:
        """Whether the loop's body holds a batch now."""
        return self._piece is not None

    @property
    def step_done(self) -> bool:
        """Whether the body is through with the last batch of a step."""
        return self._piece is not None and self._piece[2] and self._name == "done"

    @property
    def failed(self) -> bool:
        """Whether the batch's backward did not come to its end."""
        return self._name == "failed"

    def hand_out(self, start: int, stop: int, last: bool) -> None:
        """Positions [start, stop) go to the body now; ``last``: of the step's batches here."""
        self._piece, self._name = (start, stop, last), "drawn"

    def take_back(self) -> None:
        """The body is through with the batch.

        Raises:
            UsageError: it has left something out.
        """
        if self._name != "done":
            missing = "backward() and step()" if self._name == "drawn" else "step()"
            raise UsageError(
                f"fleet.{missing} was not called for the last batch; call it in the loop"
            )
        self._piece = None

    def drop(self) -> None:
        """The body has been left."""
        self._piece = None

    def backward_due(self) -> tuple[int, int, bool]:
        """The batch whose backward comes now, as (start, stop, whether it is the step's last).

        Raises:
            UsageError: there is none.
        """
        if self._piece is None or self._name != "drawn":
            raise UsageError(
                "fleet.backward() was called "
                + (
                    "twice for one batch; add the losses up and call it once"
                    if self._piece
                    else "outside of fleet.batches(); call it inside the loop"
                )
            )
        return self._piece

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around a backward pass: once it is done step() may follow; one that fails ends the step."""
        self._name = "failed"
        yield
        self._name = "exchange"

    def between(self, what: str) -> bool:
        """Make sure that backward has been called and step has not; True for a step's last batch.

        Raises:
            UsageError: otherwise.
        """
        if self._piece is None or self._name != "exchange":
            raise UsageError(
                f"fleet.{what}() comes once for each batch, after fleet.backward(loss) and inside the loop "
                "over fleet.batches(); call backward first"
            )
        return self._piece[2]

    def step_called(self) -> bool:
        """The body calls step(); True for a step's last batch.

        Raises:
            UsageError: it is not its turn.
        """
        last = self.between("step")
        self._name = "done"
        return last
