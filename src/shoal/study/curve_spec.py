"""One curve of a study: an optimizer, what is searched for it and what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.errors import UsageError
from shoal.study.schedule import SCHEDULE_PARAMETERS, ScheduleName
from shoal.study.space import LIMITS, Space

OptimizerName = Literal["sgd", "heavy_ball", "nesterov", "adamw"]

OPTIMIZERS: Mapping[str, Mapping[str, float | None]] = {
    "sgd": {"lr": None, "weight_decay": 0.0},
    "heavy_ball": {"lr": None, "momentum": None, "weight_decay": 0.0},
    "nesterov": {"lr": None, "momentum": None, "weight_decay": 0.0},
    "adamw": {"lr": None, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
}
"""By optimizer, its parameters and their values where neither searched nor fixed; None: must be given."""


@dataclass(frozen=True, kw_only=True)
class CurveSpec:
    """One curve: an optimizer, what is searched for it, and what is not.

    The optimizers are torch's: with g the gradient of the mean loss plus ``weight_decay`` w,

        sgd          w <- w - lr g
        heavy_ball   v <- momentum v + g,  w <- w - lr v
        nesterov     v <- momentum v + g,  w <- w - lr (g + momentum v)
        adamw        Adam with decoupled ``weight_decay``

    Args:
        optimizer: one of :data:`OPTIMIZERS`.
        space: what is searched, one space for all batch sizes.
        spaces: other spaces for single batch sizes, of the same parameters; to recentre one.
        schedule: ``"constant"``, or ``"linear_decay"`` with ``decay_steps`` and ``end_factor`` among the
            parameters.
        fixed: parameters that are not searched.

    Raises:
        UsageError: an optimizer, schedule or parameter that does not exist; one that is missing, given
            twice or outside its limits; spaces of different parameters.
    """

    optimizer: OptimizerName
    space: Space
    spaces: Mapping[int, Space] = field(default_factory=dict[int, Space])
    schedule: ScheduleName = "constant"
    fixed: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"optimizer = {self.optimizer!r}; known are {', '.join(OPTIMIZERS)}; choose one"
            )
        if self.schedule not in SCHEDULE_PARAMETERS:
            raise UsageError(
                f"schedule = {self.schedule!r}; known are {', '.join(SCHEDULE_PARAMETERS)}; choose one"
            )
        object.__setattr__(self, "fixed", dict(self.fixed))
        object.__setattr__(self, "spaces", dict(sorted(self.spaces.items())))
        for batch, space in self.spaces.items():
            if list(space) != list(self.space):
                raise UsageError(
                    f"spaces[{batch}] = parameters {list(space)}; every batch size searches the same "
                    f"parameters in the same order, here {list(self.space)}; list all of them"
                )
        self._check_parameters()

    @property
    def defaults(self) -> dict[str, float | None]:
        """Every parameter a trial of this curve has; None where it must be searched or fixed."""
        wanted: dict[str, float | None] = dict(OPTIMIZERS[self.optimizer])
        return wanted | dict.fromkeys(SCHEDULE_PARAMETERS[self.schedule])

    def space_at(self, global_batch: int) -> Space:
        """What is searched at one batch size."""
        return self.spaces.get(global_batch, self.space)

    def parameters(self, global_batch: int, unit: tuple[float, ...]) -> dict[str, float]:
        """All parameters of the trial at ``unit``: searched, fixed and default ones."""
        given = dict(self.fixed) | self.space_at(global_batch).parameters(unit)
        found = {name: given.get(name, value) for name, value in self.defaults.items()}
        return {name: value for name, value in found.items() if value is not None}

    def draws_as(self, other: CurveSpec, global_batches: Sequence[int]) -> bool:
        """Whether ``other`` has the same trials as this curve at all ``global_batches``."""
        alike = ("optimizer", "schedule", "fixed")
        return all(getattr(self, name) == getattr(other, name) for name in alike) and all(
            self.space_at(batch) == other.space_at(batch) for batch in global_batches
        )

    def canonical(self) -> dict[str, object]:
        """Plain values that make the same curve again."""
        facts: dict[str, object] = {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "fixed": {name: float(self.fixed[name]) for name in sorted(self.fixed)},
            "space": self.space.canonical(),
        }
        if self.spaces:
            facts["space_at"] = {str(b): space.canonical() for b, space in self.spaces.items()}
        return facts

    def _check_parameters(self) -> None:
        known = self.defaults
        for name in [*self.space, *self.fixed]:
            if name not in known:
                raise UsageError(
                    f"space = {name!r}; {self.optimizer} with the schedule {self.schedule} has "
                    f"{', '.join(known)}; remove it or choose another optimizer or schedule"
                )
        for name, value in self.fixed.items():
            if name in self.space:
                raise UsageError(
                    f"fixed = {name!r}, which is searched too; a parameter is either; remove one"
                )
            LIMITS[name].check(name, value, value)
        for name, value in known.items():
            if value is None and name not in self.space and name not in self.fixed:
                raise UsageError(
                    f"space = without {name!r}; {self.optimizer} with the schedule {self.schedule} needs "
                    f"it; give it a range in `space` or a value in `fixed`"
                )
