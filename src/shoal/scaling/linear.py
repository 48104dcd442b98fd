"""Linear scaling: the learning rate is proportional to the global batch, at once."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.scaling.checks import flag, state_from_dict, state_to_dict, whole_number
from shoal.scaling.contract import At, GradientNoise
from shoal.scaling.kinds import SGD_FAMILY


@dataclass(frozen=True, kw_only=True)
class LinearState:
    """``applied``: the multiplier of the last committed step (of the first one, at the start)."""

    applied: float


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Multiply the base learning rate by global_batch / reference_batch, at once.

    The usual rule for a batch that stays as it is. When the batch grows during training it
    multiplies the noise already in the momentum along with the learning rate;
    :class:`shoal.scaling.Dynamic` is the remedy.

    ``m = k = global_batch / reference_batch``. In velocity form the two variants are, at a change::

        with correction:     v' = mu * (lr_new / lr_old) * v + lr_new * g   (equals the buffer form)
        without correction:  v' = mu * v + lr_new * g

    PyTorch keeps the buffer u with v = lr * u, in which the correction happens by itself; to leave
    it out, the buffer is multiplied by m_old / m_new before the first step at the new multiplier
    (``momentum_factor``).

    Args:
        reference_batch: global batch in samples at which the base learning rate was tuned, >= 1.
        momentum_correction: False leaves the correction out. Without momentum it changes nothing.

    Source: Goyal et al. 2017, sections 2.1 and 3 (remark 2: momentum correction); arXiv 1904.12043,
        eq. 5. The tested ratio, 16, is the largest at which the latter compares the rule during
        training (and where it loses: 20.2 against 30.1 mAP on COCO), as does ``shoal reproduce
        dynamic``.
    Deviates: without correction, only changes of the multiplier are left uncorrected; changes that
        the schedule makes stay in buffer form.
    """

    reference_batch: int
    momentum_correction: bool = True

    name = "linear"
    optimizers = SGD_FAMILY
    tested_ratio = 16.0
    needs_noise = False

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            UsageError: an argument outside its range.
        """
        whole_number("Linear", "reference_batch", self.reference_batch, at_least=1)
        flag("Linear", "momentum_correction", self.momentum_correction)

    def init(self, at: At) -> LinearState:
        """State at the start of a run."""
        return LinearState(applied=at.global_batch / self.reference_batch)

    def advance(self, state: LinearState, at: At) -> LinearState:
        """The same state: a change is seen in ``at`` itself."""
        return state

    def multiplier(self, state: LinearState, at: At) -> float:
        """k = global_batch / reference_batch."""
        return at.global_batch / self.reference_batch

    def target(self, state: LinearState, at: At) -> float:
        """k = global_batch / reference_batch."""
        return at.global_batch / self.reference_batch

    def ramp_end(self, state: LinearState, at: At) -> int | None:
        """None: there is no ramp."""
        return None

    def progress(self, state: LinearState, at: At) -> float:
        """Samples committed so far."""
        return float(at.samples)

    def momentum_factor(self, state: LinearState, at: At) -> float:
        """1 with correction; without it m_old / m_new in the first step at a new multiplier."""
        return 1.0 if self.momentum_correction else state.applied / self.multiplier(state, at)

    def commit(self, state: LinearState, at: At, noise: GradientNoise | None) -> LinearState:
        """Remember the multiplier that was used."""
        return LinearState(applied=self.multiplier(state, at))

    def to_dict(self, state: LinearState) -> dict[str, float | int | None]:
        """The state as plain numbers."""
        return state_to_dict(state)

    def from_dict(self, values: dict[str, float | int | None]) -> LinearState:
        """The inverse of :meth:`to_dict`, bit for bit."""
        return state_from_dict(LinearState, values, rule=self.name)
