"""Square-root scaling: the learning rate grows with the root of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from shoal.scaling.checks import whole_number
from shoal.scaling.contract import At
from shoal.scaling.kinds import ADAM_FAMILY, SGD_FAMILY
from shoal.scaling.stateless import Nothing, Stateless


@dataclass(frozen=True, kw_only=True)
class SquareRoot(Stateless):
    """Multiply the base learning rate by sqrt(global_batch / reference_batch), at once.

    The usual rule for Adam and AdamW, whose step is already divided by the gradient's root mean
    square. With SGD it is the cautious choice: it keeps the variance of a step constant, but on a
    small budget of samples it makes less progress than linear scaling.

    ``m = sqrt(k)``, k = global_batch / reference_batch.

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.

    Source: the square-root row of arXiv 1904.12043's baselines; tested there and in ``shoal
        reproduce dynamic`` up to a ratio of 16 (with SGD: level with the others at 30 epochs, 9
        points behind linear scaling at 4).
    Deviates: weight decay is untouched; some tools multiply it by the same root.
    """

    reference_batch: int

    name = "square_root"
    optimizers = SGD_FAMILY | ADAM_FAMILY
    tested_ratio = 16.0

    def __post_init__(self) -> None:
        """Check the argument.

        Raises:
            UsageError: ``reference_batch`` is no whole number >= 1.
        """
        whole_number("SquareRoot", "reference_batch", self.reference_batch, at_least=1)

    def multiplier(self, state: Nothing, at: At) -> float:
        """sqrt(global_batch / reference_batch)."""
        return sqrt(at.global_batch / self.reference_batch)

    def target(self, state: Nothing, at: At) -> float:
        """sqrt(global_batch / reference_batch)."""
        return sqrt(at.global_batch / self.reference_batch)

    def ramp_end(self, state: Nothing, at: At) -> int | None:
        """None: there is no ramp."""
        return None
