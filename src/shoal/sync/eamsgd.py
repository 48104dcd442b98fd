"""EAMSGD: elastic averaging of workers that step with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import number_in, whole_number
from shoal.sync.contract import Exchange, Outcome, Signals, SyncRule
from shoal.sync.easgd import elastic_alone
from shoal.sync.states import PER_ROW, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class EAMSGDState(Counters):
    """What EAMSGD remembers.

    Args:
        velocity: ``[rows, d]``, v.
        before: ``[rows, d]``, x before the step now being made; None between steps.
    """

    velocity: Tensor = field(metadata=PER_ROW)
    before: Tensor | None = field(default=None, metadata=PER_ROW)


@dataclass(frozen=True, kw_only=True)
class EAMSGD(SyncRule[EAMSGDState]):
    """Asynchronous elastic averaging with Nesterov momentum inside the rule.

    The optimizer must be plain SGD *without* momentum of its own, or there are two. In every step, with x
    the weights, v the velocity and delta -> ``momentum``::

        v <- delta v - lr g(x + delta v);   x <- x + v;   and in a round   x <- x - alpha (x_old - x~)

    The gradient is taken at x + delta v, where ``before_step`` puts the weights; plain SGD from there
    arrives at x + v, and v is the difference. The center x~ moves by alpha (x_old - x~).

    Args:
        sync_every: optimizer steps between a worker's rounds, >= 1.
        beta: how far the center moves per round of all workers, in [0, 1].
        alpha: how far a worker moves per round, in [0, 1]; None: beta / p.
        momentum: delta, in [0, 1).

    Raises:
        UsageError: an argument outside its range.

    Source: Zhang, Choromanska and LeCun 2015, as in section 5 of the notes on Teng et al. 2019; delta 0.99,
        beta 0.9.
    Deviates: a round falls in the last step of its period, as in :class:`~shoal.sync.easgd.EASGD`. With a
        learning rate that changes, v keeps what it was, as in theirs.
    """

    sync_every: int = 64
    beta: float = 0.9
    alpha: float | None = None
    momentum: float = 0.99

    name = "eamsgd"
    alone = "Nesterov SGD tied to its own lagging average"
    is_plain_alone = False
    state_type = EAMSGDState

    def __post_init__(self) -> None:
        whole_number("EAMSGD", "sync_every", self.sync_every, at_least=1)
        number_in("EAMSGD", "beta", self.beta, low=0, high=1)
        if self.alpha is not None:
            number_in("EAMSGD", "alpha", self.alpha, low=0, high=1)
        number_in("EAMSGD", "momentum", self.momentum, low=0, high=1 - 1e-9)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> EAMSGDState:
        """At rest, the center at the mean of the starting weights."""
        exchange.place(exchange.mean(x).clone())
        return EAMSGDState(velocity=torch.zeros_like(x))

    def before_step(self, state: EAMSGDState, x: Tensor) -> tuple[Tensor, EAMSGDState]:
        """The point x + delta v at which the gradient is taken."""
        return x + state.velocity * self.momentum, replace(state, before=x.clone())

    def rest(self, state: EAMSGDState, x: Tensor, exchange: Exchange) -> Outcome[EAMSGDState]:
        """The velocity is how far the step went."""
        assert state.before is not None, "before_step comes first"
        return Outcome(x=x, state=replace(state, velocity=x - state.before, before=None))

    def exchange_round(
        self, state: EAMSGDState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[EAMSGDState]:
        """The elastic part, of the weights before the step; it does not enter the velocity."""
        before = x if state.before is None else state.before
        velocity = state.velocity if state.before is None else x - before
        alpha = self.beta / exchange.workers if self.alpha is None else self.alpha
        state = replace(state, since=0, before=None, velocity=velocity)
        return Outcome(x=elastic_alone(x, before, alpha, exchange), state=state, is_round=True)
