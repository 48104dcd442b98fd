"""AdaScale: the learning rate follows the gain that the measured gradient noise allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from shoal.errors import UsageError
from shoal.scaling.checks import state_from_dict, state_to_dict, whole_number
from shoal.scaling.contract import At, GradientNoise
from shoal.scaling.kinds import SGD_FAMILY

SMALLEST_NOISE = 1e-6
"""Lower bound of the averaged gradient variance at the reference batch."""

MEMORY_STEPS = 1000.0
"""The averages forget over this many steps at the reference batch."""


@dataclass(frozen=True, kw_only=True)
class AdaScaleState:
    """What was measured, and the progress made.

    Args:
        noise: average of sigma^2, the variance of one sample's gradient.
        signal: average of |G|^2, the squared norm of the true gradient.
        measured: committed steps that taught something.
        reference_steps: progress tau, in steps of the reference batch.
    """

    noise: float
    signal: float
    measured: int
    reference_steps: float


def estimate(noise: GradientNoise) -> tuple[float, float] | None:
    """Variance and squared norm of the gradient, from one step's micro-batches of any sizes.

    With W samples in c pieces of n_i samples, E[sum n_i |g_i|^2] = W |G|^2 + c sigma^2 and
    E|g|^2 = |G|^2 + sigma^2 / W, so both estimates below are unbiased::

        sigma^2 = (sum n_i |g_i|^2 - W |g|^2) / (c - 1)         |G|^2 = |g|^2 - sigma^2 / W

    Args:
        noise: the sums of one committed step.

    Returns:
        (sigma^2 of one sample, |G|^2); the second may be negative. None where nothing can be
        learnt: fewer than two pieces, or numbers that are not finite.

    Example:
        >>> estimate(GradientNoise(weighted_squares=20.0, pieces=2, samples=4, mean_square=4.0))
        (4.0, 3.0)
    """
    if noise.pieces < 2:
        return None
    per_sample = (noise.weighted_squares - noise.samples * noise.mean_square) / (noise.pieces - 1)
    squared_norm = noise.mean_square - per_sample / noise.samples
    if not (isfinite(per_sample) and isfinite(squared_norm)):
        return None
    return per_sample, squared_norm


@dataclass(frozen=True, kw_only=True)
class AdaScale:
    """Multiply the base learning rate by the gain r that the gradient's noise allows.

    Between no scaling (all signal, r = 1) and linear scaling (all noise, r = S). Use it with SGD
    where the useful batch is not known; it needs two micro-batches a step in the fleet as a whole
    to measure anything, and keeps r = 1 until it has. No warm-up is needed.

    With S = global_batch / reference_batch, sigma_ref^2 = sigma^2 / reference_batch and averages of
    sigma^2 and |G|^2 over committed steps (``estimate``)::

        r = (sigma_ref^2 + |G|^2) / (sigma_ref^2 / S + |G|^2)
        tau <- tau + r
        theta = max(1 - S / 1000, 0), a plain mean while t < 1 / (1 - theta)

    The schedule stands at tau * reference_batch samples: its own progress, slower than samples
    where r < S. sigma^2 is kept per sample, so a change of S needs no correction.

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.

    Source: Johnson et al. 2020 (AdaScale SGD), algorithm 1, as transcribed in the notes on arXiv
        1904.12043, section 5; tested up to a ratio of 128, the largest of its ImageNet table.
    Deviates: pieces may have unequal sizes. The averages are clipped (sigma_ref^2 >= 1e-6,
        |G|^2 >= 0) when read, not each estimate before it is averaged, which would bias |G|^2
        upwards. The schedule is read at tau, not floor(tau). A run's length is counted in samples
        or epochs, not in tau, so a schedule as long as the run is left unfinished where r < S: give
        it a shorter ``total_samples``, or train longer. S < 1 is allowed, then r is in [S, 1] and S
        before anything is measured. A short last batch advances tau as a full one.
    """

    reference_batch: int

    name = "adascale"
    optimizers = SGD_FAMILY
    tested_ratio = 128.0
    needs_noise = True

    def __post_init__(self) -> None:
        """Check the argument.

        Raises:
            UsageError: ``reference_batch`` is no whole number >= 1.
        """
        whole_number("AdaScale", "reference_batch", self.reference_batch, at_least=1)

    def init(self, at: At) -> AdaScaleState:
        """State at the start of a run: nothing measured, no progress."""
        return AdaScaleState(noise=0.0, signal=0.0, measured=0, reference_steps=0.0)

    def advance(self, state: AdaScaleState, at: At) -> AdaScaleState:
        """The same state: a change of the batch is seen in ``at`` itself."""
        return state

    def multiplier(self, state: AdaScaleState, at: At) -> float:
        """The gain r, between 1 and S."""
        scale = at.global_batch / self.reference_batch
        if state.measured == 0:
            return min(1.0, scale)
        variance = max(state.noise / self.reference_batch, SMALLEST_NOISE)
        signal = max(state.signal, 0.0)
        gain = (variance + signal) / (variance / scale + signal)
        return min(max(gain, min(1.0, scale)), max(1.0, scale))

    def target(self, state: AdaScaleState, at: At) -> float:
        """The gain r: there is no ramp."""
        return self.multiplier(state, at)

    def ramp_end(self, state: AdaScaleState, at: At) -> int | None:
        """None: there is no ramp."""
        return None

    def progress(self, state: AdaScaleState, at: At) -> float:
        """tau * reference_batch, in samples."""
        return state.reference_steps * self.reference_batch

    def momentum_factor(self, state: AdaScaleState, at: At) -> float:
        """1: the buffer is never touched."""
        return 1.0

    def commit(self, state: AdaScaleState, at: At, noise: GradientNoise | None) -> AdaScaleState:
        """Add the gain of the step to the progress and the step's noise to the averages.

        Raises:
            UsageError: ``noise`` is None.
        """
        if noise is None:
            raise UsageError(
                "noise = None; AdaScale learns from every committed step; "
                "hand commit the GradientNoise of the step (the rule declares needs_noise)"
            )
        moved = replace(state, reference_steps=state.reference_steps + self.multiplier(state, at))
        learnt = estimate(noise)
        if learnt is None:
            return moved
        scale = at.global_batch / self.reference_batch
        weight = max(1.0 / (state.measured + 1), min(1.0, scale / MEMORY_STEPS))
        return replace(
            moved,
            noise=state.noise + weight * (learnt[0] - state.noise),
            signal=state.signal + weight * (learnt[1] - state.signal),
            measured=state.measured + 1,
        )

    def to_dict(self, state: AdaScaleState) -> dict[str, float | int | None]:
        """The state as plain numbers."""
        return state_to_dict(state)

    def from_dict(self, values: dict[str, float | int | None]) -> AdaScaleState:
        """The inverse of :meth:`to_dict`, bit for bit."""
        return state_from_dict(AdaScaleState, values, rule=self.name)
