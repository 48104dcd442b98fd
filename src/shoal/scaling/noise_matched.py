"""Noise-matched scaling: the learning rate rises as fast as old momentum noise fades."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from shoal.scaling.checks import number_in, state_from_dict, state_to_dict, whole_number
from shoal.scaling.contract import At, GradientNoise
from shoal.scaling.dynamic import noise_matched_steps
from shoal.scaling.kinds import SGD_FAMILY


@dataclass(frozen=True, kw_only=True)
class NoiseMatchedState:
    """The fading noise since the last change.

    Args:
        global_batch: nominal global batch since that change, in samples.
        noise: variance of the momentum at that change, in units of its steady state at the
            reference batch (so a steady state at multiplier k is 1 / k).
        start_step: step of that change.
        momentum: the optimizer's momentum coefficient then, in [0, 1).
        length: steps after which the noise counts as steady.
    """

    global_batch: int
    noise: float
    start_step: int
    momentum: float
    length: int


@dataclass(frozen=True, kw_only=True)
class NoiseMatched:
    """Linear scaling, held back just so much that no step is noisier than the new steady state.

    An alternative to the straight ramp of :class:`shoal.scaling.Dynamic`: shorter, but its first
    step already jumps by the root of the ratio, which leaves part of the spike in the loss.

    With k = global_batch / reference_batch, s the steps since the change, mu the momentum and V the
    variance of the momentum in units of its steady state at the reference batch::

        V(s) = 1 / k + (V(0) - 1 / k) mu^(2 s)         m(s) = min(k, sqrt(k / V(s)))

    After a change from 1 to k this is m(s) = k / sqrt(1 + (k - 1) mu^(2 s)), from m0 to k in
    general k / sqrt(1 + (k / m0 - 1) mu^(2 s)). A change during a ramp goes on from the V reached.
    When the batch shrinks the multiplier drops at once.

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.
        tolerance: relative excess of V over its steady state at which the ramp ends, in (0, 1]; the
            multiplier is then within half of it.

    Source: notes on arXiv 1904.12043, section 1.5 (our calculation, not the paper's); tested there,
        and in ``shoal reproduce dynamic``, up to a ratio of 16.
    Deviates: ends after finitely many steps, so that the multiplier becomes bit for bit k.
    """

    reference_batch: int
    tolerance: float = 0.001

    name = "noise_matched"
    optimizers = SGD_FAMILY
    tested_ratio = 16.0
    needs_noise = False

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            UsageError: an argument outside its range.
        """
        whole_number("NoiseMatched", "reference_batch", self.reference_batch, at_least=1)
        number_in("NoiseMatched", "tolerance", self.tolerance, low=0.0, high=1.0, open_low=True)

    def _noise(self, state: NoiseMatchedState, at: At) -> float:
        """V at the step of ``at``; exactly 1 / k once it counts as steady."""
        steady = self.reference_batch / state.global_batch
        steps = at.step - state.start_step
        if steps >= state.length:
            return steady
        return steady + (state.noise - steady) * state.momentum ** (2 * steps)

    def init(self, at: At) -> NoiseMatchedState:
        """State at the start of a run: steady."""
        return NoiseMatchedState(
            global_batch=at.global_batch,
            noise=self.reference_batch / at.global_batch,
            start_step=at.step,
            momentum=at.momentum,
            length=0,
        )

    def advance(self, state: NoiseMatchedState, at: At) -> NoiseMatchedState:
        """Go on from the noise reached if the nominal global batch has changed."""
        if at.global_batch == state.global_batch:
            return state
        noise = self._noise(state, at)
        excess = abs(noise * at.global_batch / self.reference_batch - 1.0)
        return NoiseMatchedState(
            global_batch=at.global_batch,
            noise=noise,
            start_step=at.step,
            momentum=at.momentum,
            length=noise_matched_steps(1.0 + excess, at.momentum, self.tolerance),
        )

    def multiplier(self, state: NoiseMatchedState, at: At) -> float:
        """min(k, sqrt(k / V)); bit for bit k once the ramp has ended."""
        target = state.global_batch / self.reference_batch
        if at.step - state.start_step >= state.length:
            return target
        return min(target, sqrt(target / self._noise(state, at)))

    def target(self, state: NoiseMatchedState, at: At) -> float:
        """k = global_batch / reference_batch."""
        return at.global_batch / self.reference_batch

    def ramp_end(self, state: NoiseMatchedState, at: At) -> int | None:
        """First step at which V counts as steady, or None when the multiplier is k already."""
        end = state.start_step + state.length
        is_held_back = state.noise * state.global_batch > self.reference_batch
        return end if is_held_back and at.step < end else None

    def progress(self, state: NoiseMatchedState, at: At) -> float:
        """Samples committed so far."""
        return float(at.samples)

    def momentum_factor(self, state: NoiseMatchedState, at: At) -> float:
        """1: the buffer is never touched."""
        return 1.0

    def commit(
        self, state: NoiseMatchedState, at: At, noise: GradientNoise | None
    ) -> NoiseMatchedState:
        """The same state: the noise is a function of the step alone."""
        return state

    def to_dict(self, state: NoiseMatchedState) -> dict[str, float | int | None]:
        """The state as plain numbers."""
        return state_to_dict(state)

    def from_dict(self, values: dict[str, float | int | None]) -> NoiseMatchedState:
        """The inverse of :meth:`to_dict`, bit for bit."""
        return state_from_dict(NoiseMatchedState, values, rule=self.name)
