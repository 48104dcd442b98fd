"""What rules without a memory share: their multiplier is a function of the moment alone."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.scaling.checks import state_from_dict, state_to_dict
from shoal.scaling.contract import At, GradientNoise


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """The state of a rule that remembers nothing."""


class Stateless:
    """The part of the contract that is the same for every rule without a memory."""

    name: str
    needs_noise = False

    def init(self, at: At) -> Nothing:
        """State at the start of a run: empty."""
        return Nothing()

    def advance(self, state: Nothing, at: At) -> Nothing:
        """The same empty state."""
        return state

    def progress(self, state: Nothing, at: At) -> float:
        """Samples committed so far."""
        return float(at.samples)

    def momentum_factor(self, state: Nothing, at: At) -> float:
        """1: the buffer is never touched."""
        return 1.0

    def commit(self, state: Nothing, at: At, noise: GradientNoise | None) -> Nothing:
        """The same empty state."""
        return state

    def to_dict(self, state: Nothing) -> dict[str, float | int | None]:
        """No numbers."""
        return state_to_dict(state)

    def from_dict(self, values: dict[str, float | int | None]) -> Nothing:
        """The empty state; refuses what another rule has written."""
        return state_from_dict(Nothing, values, rule=self.name)
