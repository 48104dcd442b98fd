"""Dynamic mini-batch SGD: after a change the learning rate moves to its new value on a ramp."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from typing import Literal

from shoal.errors import UsageError
from shoal.scaling.checks import ceil_of_ratio, state_from_dict, state_to_dict, whole_number
from shoal.scaling.contract import At, GradientNoise
from shoal.scaling.kinds import SGD_FAMILY

NOISE_EXCESS = 0.1
"""Excess of the momentum's noise over its new steady state at which the ramp ``"auto"`` ends."""


def noise_matched_steps(ratio: float, momentum: float, excess: float = NOISE_EXCESS) -> int:
    """Steps after which old momentum noise is at most ``excess`` above its new steady state.

    ``T* = ln((r - 1) / eps) / (2 ln(1 / mu))``, rounded up, with r -> ``ratio``, mu ->
    ``momentum``, eps -> ``excess``. It is 0 where there is nothing to wait for: no momentum, or r
    <= 1 + eps.

    Args:
        ratio: new over old global batch, > 0.
        momentum: the optimizer's momentum coefficient, in [0, 1).
        excess: tolerated relative excess of the variance, > 0.

    Returns:
        Optimizer steps, >= 0.

    Source: notes on arXiv 1904.12043, 1.5: R(s) = 1 + (r - 1) mu^(2s) <= 1 + eps.

    Example:
        >>> [noise_matched_steps(k, 0.9) for k in (2, 4, 8, 16)]
        [11, 17, 21, 24]
    """
    if ratio <= 1.0 + excess or momentum <= 0.0:
        return 0
    return ceil(log((ratio - 1.0) / excess) / (2.0 * log(1.0 / momentum)))


@dataclass(frozen=True, kw_only=True)
class DynamicState:
    """The ramp in force.

    Args:
        global_batch: nominal global batch that ``target`` belongs to, in samples.
        start: multiplier m0 at the step of the last change.
        start_step: that step, t0.
        target: multiplier at the end of the ramp.
        length: steps T from t0 to the first step at the target; 0 if there is no ramp.
    """

    global_batch: int
    start: float
    start_step: int
    target: float
    length: int


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Linear scaling, reached by a straight ramp after the global batch has grown.

    Use it when workers come and go during training with SGD, with or without momentum. At a change
    the momentum buffer still holds gradients of the smaller batch; scaling the learning rate at
    once would multiply their noise too. The ramp lets them fade. No rule can promise linear scaling
    for ever: past a problem's useful batch a longer ramp does not help.

    With t0 the step of the change, m0 the multiplier in force there, k = global_batch /
    reference_batch and T the ramp's length (``ramp_steps``)::

        m[t] = m0 + (t - t0) / T * (k - m0)   if t - t0 < T,   else k

    so the first step after a change still uses the old learning rate and step t0 + T is the first
    with the new one. A change during a ramp anchors anew: m0 = the present multiplier, t0 = now.

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.
        ramp_steps: ``"8r"`` for ceil(8 r) steps with r = k / m0; a number of steps >= 0 for a fixed
            length (0 equals ``Linear``); ``"auto"`` for the steps in which the old momentum noise
            fades to 10% above its new steady state (see :func:`noise_matched_steps`), 0 without
            momentum. ``"8r"`` is the default since it removes the spike in the loss at every ratio,
            and a fixed 8 only at small ones.
        down: what happens when the global batch shrinks. ``"at_once"``: the multiplier drops in the
            very first step, because a large learning rate with a small batch does harm. ``"ramp"``:
            the equation taken literally, with the same ``ramp_steps``: ceil(8 r) steps (few, as r <
            1), or the fixed length.

    Source: arXiv 1904.12043 (Lin et al. 2019), eq. 6; tested up to a ratio of 16, the largest of
        the paper's tables (COCO, ADE20K: "16x") and of ``shoal reproduce dynamic``.
    Deviates: the paper's equation goes from 1 to k; starting from any m0, anchoring anew during a
        ramp, the length 8r and dropping at once are choices of ours (the paper's length and its
        scale-in are not known to us).

    Example:
        >>> rule = Dynamic(reference_batch=8)
        >>> def at(step: int, global_batch: int) -> At:
        ...     return At(
        ...         step=step, samples=0, global_batch=global_batch, momentum=0.9, epoch_samples=100
        ...     )
        >>> state = rule.advance(rule.init(at(0, 8)), at(5, 32))
        >>> [rule.multiplier(state, at(5 + offset, 32)) for offset in (0, 1, 16, 32)]
        [1.0, 1.09375, 2.5, 4.0]
    """

    reference_batch: int
    ramp_steps: int | Literal["8r", "auto"] = "8r"
    down: Literal["at_once", "ramp"] = "at_once"

    name = "dynamic"
    optimizers = SGD_FAMILY
    tested_ratio = 16.0
    needs_noise = False

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            UsageError: an argument outside its range.
        """
        whole_number("Dynamic", "reference_batch", self.reference_batch, at_least=1)
        if isinstance(self.ramp_steps, str):
            if self.ramp_steps not in ("8r", "auto"):
                raise UsageError(
                    f'ramp_steps = {self.ramp_steps!r}; Dynamic needs "8r", "auto" or a whole '
                    f'number of steps; write Dynamic(ramp_steps="8r")'
                )
        else:
            whole_number("Dynamic", "ramp_steps", self.ramp_steps, at_least=0)
        if self.down not in ("at_once", "ramp"):
            raise UsageError(
                f'down = {self.down!r}; Dynamic needs "at_once" or "ramp"; '
                f'write Dynamic(down="at_once")'
            )

    def ramp_length(self, ratio: float, momentum: float) -> int:
        """Steps T that a change takes.

        Args:
            ratio: r = new target over the multiplier in force, > 0.
            momentum: the optimizer's momentum, in [0, 1); read by ``"auto"`` only.

        Returns:
            Optimizer steps, >= 0.
        """
        if self.ramp_steps == "8r":
            return ceil_of_ratio(8.0 * ratio)
        if self.ramp_steps == "auto":
            return noise_matched_steps(ratio, momentum)
        return self.ramp_steps

    def init(self, at: At) -> DynamicState:
        """State at the start of a run: at the target, no ramp."""
        target = at.global_batch / self.reference_batch
        return DynamicState(
            global_batch=at.global_batch,
            start=target,
            start_step=at.step,
            target=target,
            length=0,
        )

    def advance(self, state: DynamicState, at: At) -> DynamicState:
        """Anchor a ramp at this step if the nominal global batch has changed."""
        if at.global_batch == state.global_batch:
            return state
        settled = self.init(at)
        present = self.multiplier(state, at)
        grows = settled.target > present
        if present == settled.target or not (grows or self.down == "ramp"):
            return settled
        return DynamicState(
            global_batch=at.global_batch,
            start=present,
            start_step=at.step,
            target=settled.target,
            length=self.ramp_length(settled.target / present, at.momentum),
        )

    def multiplier(self, state: DynamicState, at: At) -> float:
        """Equation 6 at the step of ``at``; bit for bit the target once the ramp has ended."""
        offset = at.step - state.start_step
        if offset >= state.length:
            return state.target
        return state.start + offset / state.length * (state.target - state.start)

    def target(self, state: DynamicState, at: At) -> float:
        """k = global_batch / reference_batch."""
        return at.global_batch / self.reference_batch

    def ramp_end(self, state: DynamicState, at: At) -> int | None:
        """t0 + T while that lies ahead, else None."""
        end = state.start_step + state.length
        return end if at.step < end else None

    def progress(self, state: DynamicState, at: At) -> float:
        """Samples committed so far."""
        return float(at.samples)

    def momentum_factor(self, state: DynamicState, at: At) -> float:
        """1: the buffer is never touched (u-form of the paper)."""
        return 1.0

    def commit(self, state: DynamicState, at: At, noise: GradientNoise | None) -> DynamicState:
        """The same state: the ramp is a function of the step alone."""
        return state

    def to_dict(self, state: DynamicState) -> dict[str, float | int | None]:
        """The state as plain numbers."""
        return state_to_dict(state)

    def from_dict(self, values: dict[str, float | int | None]) -> DynamicState:
        """The inverse of :meth:`to_dict`, bit for bit."""
        return state_from_dict(DynamicState, values, rule=self.name)
