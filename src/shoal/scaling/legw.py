"""LEGW: square-root scaling with a warm-up whose epochs grow with the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from shoal.scaling.checks import number_in, whole_number
from shoal.scaling.contract import At
from shoal.scaling.kinds import ADAM_FAMILY, SGD_FAMILY
from shoal.scaling.stateless import Nothing, Stateless


@dataclass(frozen=True, kw_only=True)
class Legw(Stateless):
    """Multiply the base learning rate by sqrt(k), after a linear warm-up of W k epochs.

    Use it instead of :class:`shoal.scaling.SquareRoot` where a large batch fails in its first
    steps. Give the schedule no warm-up of its own: both would be multiplied.

    With k = global_batch / reference_batch, W the warm-up epochs and N the samples of an epoch, the
    warm-up of W k epochs has W k N / (k reference_batch) steps. k cancels, so its progress is
    counted in optimizer steps t and a change of the batch moves its height, not its position::

        T = ceil(W N / reference_batch)         m = sqrt(k) min(1, (t + 1) / T)

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.
        warmup_epochs: warm-up W in epochs at the reference batch, in [0, 10^6]; 0 equals
            ``SquareRoot``. It has no default because it is part of the tuned recipe.

    Source: You et al. 2019 (arXiv 1901.08256), sections 3 and 4 as read in AdaptDL's code; its
        abstract reports ratios up to 64, which is the tested ratio.
    Deviates: the first step has 1 / T of the rate, not 0. AdaptDL counts the warm-up in effective
        steps estimated from gradient noise; here it is plain optimizer steps, which is the
        published rule wherever the batch does not change.
    """

    reference_batch: int
    warmup_epochs: float

    name = "legw"
    optimizers = SGD_FAMILY | ADAM_FAMILY
    tested_ratio = 64.0

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            UsageError: an argument outside its range.
        """
        whole_number("Legw", "reference_batch", self.reference_batch, at_least=1)
        number_in("Legw", "warmup_epochs", self.warmup_epochs, low=0.0, high=1e6)

    def warmup_steps(self, at: At) -> int:
        """T, the optimizer steps of the warm-up; the same at every global batch."""
        return ceil(self.warmup_epochs * at.epoch_samples / self.reference_batch)

    def multiplier(self, state: Nothing, at: At) -> float:
        """sqrt(k) min(1, (t + 1) / T)."""
        steps = self.warmup_steps(at)
        if at.step + 1 >= steps:
            return self.target(state, at)
        return self.target(state, at) * (at.step + 1) / steps

    def target(self, state: Nothing, at: At) -> float:
        """sqrt(k)."""
        return sqrt(at.global_batch / self.reference_batch)

    def ramp_end(self, state: Nothing, at: At) -> int | None:
        """Step T - 1, the last of the warm-up and the first at the target; None from then on."""
        end = self.warmup_steps(at) - 1
        return end if at.step < end else None
