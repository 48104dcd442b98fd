"""How the learning rate of a study's trial falls: not at all, or linearly over its own number of steps.

In a study the batch is fixed, so a decay is counted in optimizer steps, and its length and end are
searched like the learning rate itself. A length derived from the budget would make the steps to a goal
follow the budget.

Source: the schedules of Shallue et al. 2019 as restated in sections 1.6 and 9.1 of the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

ScheduleName = Literal["constant", "linear_decay"]

SCHEDULE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "linear_decay": ("decay_steps", "end_factor"),
}
"""By schedule, the parameters that a curve must search or fix for it."""


@overload
def linear_decay(step: int, decay_steps: float, end_factor: float) -> float: ...
@overload
def linear_decay(step: int | Tensor, decay_steps: Tensor, end_factor: Tensor) -> Tensor: ...
def linear_decay(
    step: int | Tensor, decay_steps: float | Tensor, end_factor: float | Tensor
) -> float | Tensor:
    """The factor of the learning rate, 1 - (1 - a) t / T for t <= T and a beyond.

    Args:
        step: t, updates done before this one, >= 0; a tensor gives each trial its own.
        decay_steps: T, > 0; per trial when a tensor.
        end_factor: a, in [0, 1] as a rule; per trial when a tensor.

    Returns:
        A number, or a tensor of the tensors' shape.
    """
    if isinstance(decay_steps, Tensor):
        done = torch.as_tensor(step, dtype=decay_steps.dtype, device=decay_steps.device)
        return 1 - (1 - end_factor) * (done / decay_steps).clamp(max=1)
    return 1 - (1 - end_factor) * min(1.0, float(step) / decay_steps)


def lr_factor(schedule: str, step: int, parameters: Mapping[str, float]) -> float:
    """The factor of one trial's learning rate at the update after ``step`` done ones.

    Args:
        schedule: a name of :data:`SCHEDULE_PARAMETERS`.
        step: updates done, >= 0.
        parameters: the trial's, with those of the schedule among them.
    """
    if schedule == "constant":
        return 1.0
    assert schedule == "linear_decay", schedule
    return linear_decay(step, parameters["decay_steps"], parameters["end_factor"])


@dataclass(frozen=True, kw_only=True)
class Decay:
    """The range of a linear decay's length in steps, as a study searches it.

    Args:
        low: shortest.
        high: longest.
        is_log: whether it is drawn log-uniformly.
        is_fixed: whether it is not searched at all.
    """

    low: float
    high: float
    is_log: bool
    is_fixed: bool = False

    def warnings(self, budget_steps: int) -> list[str]:
        """What to say about this range in a study with ``budget_steps`` steps, before anything runs.

        A trial cannot be better than its schedule lets it: where the steps to the goal come near the
        shortest length, they measure the range and not the batch size.
        """
        if self.is_fixed:
            return [
                f"decay_steps is fixed at {self.low:g}: steps to the goal near it measure the schedule; "
                "search it log-uniformly"
            ]
        found = []
        if not self.is_log:
            found.append(
                f"decay_steps is drawn uniformly from {self.low:g} to {self.high:g}: most draws are long, "
                "and large batches look flat; draw it log-uniformly (scale = 'log')"
            )
        if self.low > budget_steps / 20:
            found.append(
                f"decay_steps begins at {self.low:g}, which ties steps to the goal to the budget of "
                f"{budget_steps}: wherever they come out below {2 * self.low:g} they are void (a false "
                "plateau); lower it below half the fewest steps expected"
            )
        return found
