"""What every engine keeps of a trial besides its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.study.engines.contract import SavedTrial
from shoal.study.engines.order import TrialOrder
from shoal.study.engines.task import Task
from shoal.study.engines.update import Settings
from shoal.study.records import Trial


@dataclass(kw_only=True)
class Held:
    """A trial in memory.

    Args:
        trial: which one.
        settings: its optimizer's numbers.
        order: its batches.
        step: optimizer steps done.
        first_loss: of step 0; NaN before it.
        recent_loss: mean over the steps of the last call of ``advance``; NaN before it.
    """

    trial: Trial
    settings: Settings
    order: TrialOrder
    step: int = 0
    first_loss: float = math.nan
    recent_loss: float = math.nan
    _sum: float = 0.0
    _steps: int = 0

    def begin(self) -> None:
        """A call of ``advance`` begins."""
        self._sum, self._steps = 0.0, 0

    def record(self, losses: Sequence[float]) -> None:
        """Note the losses of the steps just done. Added one by one: the sum does not depend on the portions."""
        if self.step == 0:
            self.first_loss = losses[0]
        for loss in losses:
            self._sum += loss
        self._steps += len(losses)
        self.step += len(losses)
        self.recent_loss = self._sum / self._steps

    def saved(self, tensors: Mapping[str, Tensor]) -> SavedTrial:
        """Everything about it; ``tensors`` are copied."""
        return SavedTrial(
            step=self.step,
            tensors={name: _copy(tensor) for name, tensor in tensors.items()},
            first_loss=self.first_loss,
            recent_loss=self.recent_loss,
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class HeldTrials:
    """The trials an engine holds, by id."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}

    def _hold(self, trial: Trial, saved: SavedTrial | None, task: Task) -> Held:
        if trial.id in self._held:
            raise ValueError(f"trial {trial.id} is in already; release it first")
        held = Held(trial=trial, settings=task.settings(trial), order=task.order(trial))
        if saved is not None:
            held.step = saved.step
            held.first_loss, held.recent_loss = saved.first_loss, saved.recent_loss
        self._held[trial.id] = held
        return held

    def step(self, trial: int) -> int:
        """Optimizer steps the trial has done."""
        return self._held[trial].step

    def losses(self, trial: int) -> tuple[float, float]:
        """(first_loss, recent_loss) as in ``SavedTrial``."""
        held = self._held[trial]
        return held.first_loss, held.recent_loss

    def outputs(self, trials: Sequence[int], inputs: Tensor) -> Tensor | None:
        """No quicker way than one model after another."""
        return None
