"""DOWNPOUR: workers push what they have moved to a server, and go on from what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import whole_number
from shoal.sync.contract import Exchange, Outcome, Signals, SyncRule
from shoal.sync.states import PER_ROW, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class DownpourState(Counters):
    """What DOWNPOUR remembers.

    Args:
        fetched: ``[rows, d]``, the server's weights as each worker last fetched them.
    """

    fetched: Tensor = field(metadata=PER_ROW)


@dataclass(frozen=True, kw_only=True)
class Downpour(SyncRule[DownpourState]):
    """Add a worker's movement to the server's weights and continue from those, every ``sync_every`` steps.

    Use it to compare with; updates of many workers add up, so the learning rate must fall with their number.

    With x the worker's weights, f what it last fetched and s the server's::

        s <- s + (x - f);   f <- s;   x <- s

    Args:
        sync_every: optimizer steps between pushes, which are also fetches, >= 1. 1 is asynchronous SGD.

    Raises:
        UsageError: an argument outside its range.

    Source: Dean et al. 2012, as in section 5 of the notes on Teng et al. 2019; tau 1 as in the latter.
    Deviates: the server adds; theirs may run Adagrad. What is pushed is the movement x - f, which is
        the accumulated -lr g for plain SGD and right for any other optimizer too.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = Downpour(), Stacked(2), torch.zeros(2, 1)
        >>> outcome = rule.after_step(rule.init(x, exchange), x - 1.0, exchange, Signals())
        >>> outcome.x.tolist()   # the second worker already sees the first one's step
        [[-1.0], [-2.0]]
    """

    sync_every: int = 1

    name = "downpour"
    alone = "plain SGD: the server has what the only worker has"
    state_type = DownpourState

    def __post_init__(self) -> None:
        whole_number("Downpour", "sync_every", self.sync_every, at_least=1)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> DownpourState:
        """The server at the mean of the starting weights."""
        exchange.place(exchange.mean(x).clone())
        return DownpourState(fetched=x.clone())

    def welcome(
        self, state: DownpourState, x: Tensor, rows: Sequence[int], exchange: Exchange
    ) -> tuple[Tensor, DownpourState]:
        """Newcomers fetch; a donor's weights may hold movement that the donor will push itself."""
        x, fetched = x.clone(), state.fetched.clone()
        for row in rows:
            x[row] = fetched[row] = exchange.fetch(row)[0]
        return x, replace(state, fetched=fetched)

    def exchange_round(
        self, state: DownpourState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[DownpourState]:
        """Push, fetch and go on from there, one local row after the other."""
        state = replace(state, since=0)
        if exchange.workers == 1:
            # Nobody else has pushed; fetching what one has just pushed would only add rounding.
            exchange.push(0, x - state.fetched)
            return Outcome(x=x, state=replace(state, fetched=x.clone()), is_round=True)
        rows: list[Tensor] = []
        for row in range(x.shape[0]):
            exchange.push(row, x[row : row + 1] - state.fetched[row : row + 1])
            rows.append(exchange.fetch(row))
        fetched = torch.cat(rows)
        return Outcome(x=fetched, state=replace(state, fetched=fetched.clone()), is_round=True)
