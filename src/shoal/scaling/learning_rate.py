"""The learning rate of a step: base x schedule(progress) x multiplier, from one place only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shoal.scaling.contract import At, Rule
from shoal.scaling.schedules import Schedule

StateT = TypeVar("StateT")


class StepRate(NamedTuple, Generic[StateT]):
    """What one step uses.

    ``state`` is to be kept only if the step is committed; ``factor`` is the schedule's, in [0, 1];
    ``multiplier`` the rule's, > 0; momentum buffers are multiplied by ``momentum_factor`` before
    the step (1.0 mostly).
    """

    state: StateT
    factor: float
    multiplier: float
    momentum_factor: float

    def lr(self, base_lr: float) -> float:
        """The learning rate of a parameter group whose base is ``base_lr``."""
        return base_lr * self.factor * self.multiplier


@dataclass(frozen=True, kw_only=True)
class LearningRate(Generic[StateT]):
    """A scaling rule and a schedule, asked together once per step.

    Args:
        rule: the scaling rule.
        schedule: a resolved schedule (its length is known).
    """

    rule: Rule[StateT]
    schedule: Schedule

    def before_step(self, state: StateT, at: At) -> StepRate[StateT]:
        """Everything that the step at ``at`` needs; pure, so an uncommitted step leaves no trace.

        Args:
            state: the rule's state after the last committed step.
            at: the moment of the coming step.

        Returns:
            The rule's state for this step, the two factors and the momentum factor. Hand the state
            to ``rule.commit`` once the step is committed; otherwise forget it.
        """
        advanced = self.rule.advance(state, at)
        return StepRate(
            state=advanced,
            factor=self.schedule(self.rule.progress(advanced, at)),
            multiplier=self.rule.multiplier(advanced, at),
            momentum_factor=self.rule.momentum_factor(advanced, at),
        )

    def target_lr(self, state: StateT, at: At, base_lr: float) -> float:
        """Where the learning rate would stand now if no ramp were pending ("now -> target")."""
        return base_lr * self.schedule(self.rule.progress(state, at)) * self.rule.target(state, at)
