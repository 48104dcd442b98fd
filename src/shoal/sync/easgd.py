"""Elastic averaging SGD: workers are tied to a center by a spring, and the center to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import flag, number_in, whole_number
from shoal.sync.contract import Exchange, Outcome, Signals, SyncRule
from shoal.sync.states import PER_ROW, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class EASGDState(Counters):
    """What elastic averaging remembers.

    Args:
        center: ``[1, d]``, the center of the synchronous form; None: the server has it.
        before: ``[rows, d]``, weights before the step of a coming round.
    """

    center: Tensor | None = None
    before: Tensor | None = field(default=None, metadata=PER_ROW)


@dataclass(frozen=True, kw_only=True)
class EASGD(SyncRule[EASGDState]):
    """Pull workers and a center variable toward each other every ``sync_every`` optimizer steps.

    Use it as a gentler average: workers may explore between rounds. The center lags behind the workers, and
    one bad worker drags it along. It is the center that is delivered.

    In the step of a round, with x a worker's weights before that step and x~ the center::

        asynchronous, each worker alone     d = alpha (x - x~);  x~ <- x~ + d;  x <- step(x) - d
        synchronous, all at once            x <- step(x) - alpha (x - x~)
                                            x~ <- (1 - beta) x~ + beta mean x

    where all right-hand sides use old values, so that one step with a round is x - lr g(x) - alpha (x - x~).

    Args:
        sync_every: optimizer steps between a worker's rounds (tau), >= 1.
        beta: how far the center moves per round of all workers, in [0, 1].
        alpha: how far a worker moves per round, in [0, 1]; None: beta / p with p the workers then.
        synchronous: one round of all workers, with the same center everywhere, instead of a server
            that each worker visits alone.

    Raises:
        UsageError: an argument outside its range.

    Source: Zhang, Choromanska and LeCun 2015, as in section 5 of the notes on Teng et al. 2019: alpha =
        beta / p, beta 0.9 (the reproduction of the latter uses 0.43).
    Deviates: a round falls in the last step of its period; theirs in the first, where, at the start of a
        run, workers and center are equal. The center begins at the mean of the starting weights.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule = EASGD(sync_every=1, alpha=0.25, beta=0.5, synchronous=True)
        >>> exchange, x = Stacked(2), torch.tensor([[0.0], [8.0]])
        >>> x, state = rule.before_step(rule.init(x, exchange), x)
        >>> outcome = rule.after_step(state, x - 1.0, exchange, Signals())   # the step moved by -1
        >>> outcome.x.tolist(), outcome.state.center.tolist()
        ([[0.0], [6.0]], [[4.0]])
    """

    sync_every: int = 64
    beta: float = 0.9
    alpha: float | None = None
    synchronous: bool = False

    name = "easgd"
    alone = "SGD tied to its own lagging average: worker and center pull at each other"
    is_plain_alone = False
    state_type = EASGDState

    def __post_init__(self) -> None:
        whole_number("EASGD", "sync_every", self.sync_every, at_least=1)
        number_in("EASGD", "beta", self.beta, low=0, high=1)
        if self.alpha is not None:
            number_in("EASGD", "alpha", self.alpha, low=0, high=1)
        flag("EASGD", "synchronous", self.synchronous)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> EASGDState:
        """The center at the mean of the starting weights."""
        start = exchange.mean(x).clone()
        if self.synchronous:
            return EASGDState(center=start)
        exchange.place(start)
        return EASGDState()

    def before_step(self, state: EASGDState, x: Tensor) -> tuple[Tensor, EASGDState]:
        """Keep the weights before a step that ends in a round."""
        if state.since + 1 < self.sync_every:
            return x, state
        return x, replace(state, before=x.clone())

    def center(self, state: EASGDState) -> Tensor | None:
        """The center of the synchronous form; the server has that of the other."""
        return state.center

    def exchange_round(
        self, state: EASGDState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[EASGDState]:
        """The elastic part, of the weights before the step where they were kept."""
        before = x if state.before is None else state.before
        alpha = self.beta / exchange.workers if self.alpha is None else self.alpha
        state = replace(state, since=0, before=None)
        if self.synchronous:
            x, center = elastic_together(x, before, state, alpha, self.beta, exchange)
            return Outcome(x=x, state=replace(state, center=center), is_round=True)
        return Outcome(x=elastic_alone(x, before, alpha, exchange), state=state, is_round=True)


def elastic_together(
    x: Tensor, before: Tensor, state: EASGDState, alpha: float, beta: float, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """The synchronous elastic part: (weights, center) after it."""
    assert state.center is not None
    center = state.center
    mean = exchange.mean(before)
    return x - (before - center) * alpha, center + (mean - center) * beta


def elastic_alone(x: Tensor, before: Tensor, alpha: float, exchange: Exchange) -> Tensor:
    """The asynchronous elastic part, one local row after the other."""
    rows: list[Tensor] = []
    for row in range(x.shape[0]):
        difference = (before[row : row + 1] - exchange.fetch(row)) * alpha
        exchange.push(row, difference)
        rows.append(x[row : row + 1] - difference)
    return torch.cat(rows)
