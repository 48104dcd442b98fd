"""No scaling: the learning rate does not follow the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shoal.scaling.checks import whole_number
from shoal.scaling.contract import At
from shoal.scaling.kinds import ANY_OPTIMIZER
from shoal.scaling.stateless import Nothing, Stateless


@dataclass(frozen=True, kw_only=True)
class Unscaled(Stateless):
    """Leave the learning rate alone, whatever the global batch is.

    Use it where the batch does not move (``batch_policy="constant"``), as a baseline, or with an
    optimizer for which no rule is known. With more workers an epoch then has fewer steps of the
    same size: on a small budget of samples that costs accuracy.

    ``m = 1``.

    Args:
        reference_batch: has no effect on the multiplier; kept so that every rule can be compared by
            the same ratio global_batch / reference_batch. In samples, >= 1.

    Source: the identity row of arXiv 1904.12043's baselines. Nothing is extrapolated, so the tested
        ratio is unbounded and every optimizer is allowed.
    """

    reference_batch: int = 1

    name = "unscaled"
    optimizers = ANY_OPTIMIZER
    tested_ratio = inf

    def __post_init__(self) -> None:
        """Check the argument.

        Raises:
            UsageError: ``reference_batch`` is no whole number >= 1.
        """
        whole_number("Unscaled", "reference_batch", self.reference_batch, at_least=1)

    def multiplier(self, state: Nothing, at: At) -> float:
        """1."""
        return 1.0

    def target(self, state: Nothing, at: At) -> float:
        """1."""
        return 1.0

    def ramp_end(self, state: Nothing, at: At) -> int | None:
        """None: there is no ramp."""
        return None
