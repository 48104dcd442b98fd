"""What every scaling rule is: a pure function of its own small state.

A scaling rule says by which *multiplier* the base learning rate is multiplied when the global batch
differs from the reference batch. Learning rate = base lr x schedule(progress) x multiplier.

A rule owns no clock, no process and no file. The fleet calls, before every optimizer step,

    state = rule.advance(state, at)            # notices a changed nominal global batch
    m = rule.multiplier(state, at)             # the multiplier of this very step
    progress = rule.progress(state, at)        # where the schedule stands, in samples
    factor = rule.momentum_factor(state, at)   # what momentum buffers are multiplied by first, mostly 1

and, after the step was committed by the fleet,

    state = rule.commit(state, at, noise)      # noise is None unless rule.needs_noise

A step that is not committed is forgotten: the fleet goes back to the state before ``advance``.
``state`` is a frozen dataclass of numbers; ``to_dict``/``from_dict`` carry it through checkpoints and to
joining workers, free of world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class At:
    """The moment at which a rule is asked.

    Args:
        step: optimizer steps committed before this one (the paper's iteration counter t), >= 0.
        samples: samples committed before this step, >= 0.
        global_batch: the *nominal* global batch of the present membership, in samples, >= 1. A short
            last batch does not change it.
        momentum: the momentum coefficient of the optimizer's first group, in [0, 1); 0 if it has none.
        epoch_samples: samples in one epoch, >= 1.
    """

    step: int
    samples: int
    global_batch: int
    momentum: float
    epoch_samples: int


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Sums over the micro-batches of one committed step, from which noise rules estimate.

    With g_i the mean gradient of micro-batch i of n_i samples, and g = sum(n_i g_i) / sum(n_i):

    Args:
        weighted_squares: sum over i of n_i * |g_i|^2.
        pieces: number of micro-batches with at least one sample.
        samples: sum of n_i.
        mean_square: |g|^2, the squared norm of the step's gradient.
    """

    weighted_squares: float
    pieces: int
    samples: int
    mean_square: float


class Rule(Protocol[StateT]):
    """A scaling rule; see the module text for the order of calls."""

    @property
    def name(self) -> str:
        """The rule's name in events, tables and errors, e.g. ``"dynamic"``."""
        ...

    @property
    def reference_batch(self) -> int:
        """The global batch, in samples, at which the base learning rate was tuned; >= 1."""
        ...

    @property
    def optimizers(self) -> frozenset[str]:
        """Kinds of optimizer the rule is meant for: of ``sgd heavy_ball nesterov adam adamw any``."""
        ...

    @property
    def tested_ratio(self) -> float:
        """Largest global_batch / reference_batch (or its inverse) the rule was tested at."""
        ...

    @property
    def needs_noise(self) -> bool:
        """Whether ``commit`` needs a :class:`GradientNoise` (costs one copy of the gradient)."""
        ...

    def init(self, at: At) -> StateT:
        """State at the start of a run: the multiplier is at its target at once, without a ramp,
        unless the rule has a warm-up of its own, which ``ramp_end`` announces.
        """
        ...

    def advance(self, state: StateT, at: At) -> StateT:
        """State before the step at ``at``; anchors a ramp when ``at.global_batch`` has changed."""
        ...

    def multiplier(self, state: StateT, at: At) -> float:
        """The multiplier of the learning rate for the step at ``at`` (> 0)."""
        ...

    def target(self, state: StateT, at: At) -> float:
        """The multiplier the rule is heading for at the present global batch (> 0)."""
        ...

    def ramp_end(self, state: StateT, at: At) -> int | None:
        """First step at which the multiplier is the target, or None when no ramp is pending."""
        ...

    def progress(self, state: StateT, at: At) -> float:
        """The schedule's position in samples (``at.samples`` for most rules)."""
        ...

    def momentum_factor(self, state: StateT, at: At) -> float:
        """What momentum buffers (buffer form) are multiplied by before this step; 1.0 for most."""
        ...

    def commit(self, state: StateT, at: At, noise: GradientNoise | None) -> StateT:
        """State after the step at ``at`` was committed."""
        ...

    def to_dict(self, state: StateT) -> dict[str, float | int | None]:
        """The state as plain numbers."""
        ...

    def from_dict(self, values: dict[str, float | int | None]) -> StateT:
        """The inverse of :meth:`to_dict`, bit for bit."""
        ...


def optimizer_kind(optimizer: object) -> str:
    """The kind of an optimizer: ``sgd``, ``heavy_ball``, ``nesterov``, ``adam``, ``adamw``, or its class name.

    SGD with dampening is reported as ``sgd_with_dampening`` (the rules assume dampening 0).
    """
    name = type(optimizer).__name__.lower()
    if name != "sgd":
        return name
    groups = cast(list[dict[str, object]], getattr(optimizer, "param_groups"))  # noqa: B009
    group = groups[0]
    if group.get("momentum", 0) and group.get("dampening", 0):
        return "sgd_with_dampening"
    if group.get("nesterov"):
        return "nesterov"
    return "heavy_ball" if group.get("momentum", 0) else "sgd"
