"""What a study asks of an engine: trials of one curve and global batch, advanced side by side.

An engine holds trials in memory, each at its own step. It knows nothing of goals, grids and files: the
search says how far each trial goes, the evaluator reads its weights. Whatever an engine does, one trial's
weights are a function of that trial alone: not of its slot, of its neighbours, of how many there are, of
how its steps were cut into calls of :meth:`Engine.advance`, or of whether it was saved and restored.
``shoal.testing.engines`` checks all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.study.records import Trial


@dataclass(frozen=True, kw_only=True)
class SavedTrial:
    """Everything a paused trial needs to go on, bit for bit.

    Args:
        step: optimizer steps done.
        tensors: parameters ``p/NAME``, buffers ``b/NAME``, optimizer slots ``o/SLOT/NAME``; contiguous
            copies on the CPU, without the trial axis.
        first_loss: training loss of step 0's batch at the initial weights; NaN before the first step.
        recent_loss: mean training loss over the steps of the last call of ``advance``; NaN before it.
    """

    step: int
    tensors: Mapping[str, Tensor]
    first_loss: float
    recent_loss: float


class Engine(Protocol):
    """Trains trials of one workload, optimizer and global batch."""

    @property
    def name(self) -> str:
        """``pool``, ``vmap``, ...: stored with every trial it trains."""
        ...

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        """Take a trial in, at step 0 from its seed or where ``saved`` left it.

        Raises:
            ValueError: a trial of that id is in already.
        """
        ...

    def advance(self, targets: Mapping[int, int]) -> None:
        """Train trials, by id, to the given steps; one already there is left alone.

        A trial whose loss is not finite may stay as it is: its ``recent_loss`` is then not finite either.
        """
        ...

    def portions(self, trials: Sequence[int]) -> Sequence[Sequence[int]]:
        """Trials cut into groups that are best advanced by one call each: stacks, or one by one.

        Between two calls the caller evaluates, puts aside, or stops; so a portion is no larger than
        what pays.
        """
        ...

    def step(self, trial: int) -> int:
        """Optimizer steps the trial has done."""
        ...

    def losses(self, trial: int) -> tuple[float, float]:
        """(first_loss, recent_loss) as in :class:`SavedTrial`."""
        ...

    def weights(self, trial: int) -> Mapping[str, Tensor]:
        """Parameters and buffers by their names in the module; read only, valid until the next call."""
        ...

    def outputs(self, trials: Sequence[int], inputs: Tensor) -> Tensor | None:
        """What the models give for the same inputs, without a trace on the trials.

        Args:
            trials: their ids.
            inputs: samples along the first axis, on the engine's device.

        Returns:
            Shape (trials, samples, ...), valid until the next call; None where the engine has no quicker
            way than one model after another, or not for these trials.
        """
        ...

    def save(self, trial: int) -> SavedTrial:
        """A copy of everything, which later calls do not touch."""
        ...

    def release(self, trial: int) -> None:
        """Forget a trial; its slot becomes free."""
        ...
