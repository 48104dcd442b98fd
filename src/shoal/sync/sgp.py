"""Stochastic gradient push: gossip along a changing directed graph, exact on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import whole_number
from shoal.sync.contract import Exchange, Outcome, Signals, SyncRule
from shoal.sync.states import PER_ROW, PER_ROW_FROM_ZERO, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class SGPState(Counters):
    """What push-sum remembers.

    Args:
        rounds: exchanges so far.
        surplus: ``[rows, 1]``, the push-sum weight w, less 1.
        mixed: ``[rows, d]``, the weights after the last exchange.
    """

    rounds: int = 0
    surplus: Tensor = field(metadata=PER_ROW_FROM_ZERO)
    mixed: Tensor = field(metadata=PER_ROW)


@dataclass(frozen=True, kw_only=True)
class SGP(SyncRule[SGPState]):
    """After the step, every worker keeps a share of its weights and pushes shares to ``peers`` others.

    Use it where no collective is wanted: a worker waits for nobody but its senders, and a lost message
    costs that message only. Workers agree in the limit, not exactly.

    Trained is z = y / w, with y the pushed sum and w its weight. A step moves y by as much as z; then, with
    c = 1 / (peers + 1)::

        y_i <- c (y_i + sum over senders of y);   w_i likewise;   z_i = y_i / w_i

    In exchange k, rank i sends to i + 2^(k + j), j < peers, with exponents modulo ceil(log2 p) and ranks
    modulo p.

    Args:
        sync_every: optimizer steps between exchanges, >= 1.
        peers: to how many each worker sends, >= 1; at most ceil(log2 p) of them differ and are used.

    Raises:
        UsageError: an argument outside its range.

    Source: Assran et al. 2019 (SGP), as in section 5 of the notes on Teng et al. 2019: every step, one
        peer, exponential graph.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = SGP(), Stacked(2), torch.tensor([[0.0], [4.0]])
        >>> rule.after_step(rule.init(x, exchange), x, exchange, Signals()).x.tolist()
        [[2.0], [2.0]]
    """

    sync_every: int = 1
    peers: int = 1

    name = "sgp"
    alone = "plain SGD: there is nobody to push to"
    state_type = SGPState

    def __post_init__(self) -> None:
        whole_number("SGP", "sync_every", self.sync_every, at_least=1)
        whole_number("SGP", "peers", self.peers, at_least=1)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> SGPState:
        """Weight 1 each."""
        return SGPState(surplus=torch.zeros_like(x[:, :1]), mixed=x.clone())

    def offsets(self, workers: int, exchange: int) -> list[int]:
        """How far along the ranks each message of that exchange goes.

        Example:
            >>> [SGP().offsets(8, k) for k in range(4)], SGP(peers=2).offsets(5, 2)
            ([[1], [2], [4], [1]], [4, 1])
        """
        powers = (workers - 1).bit_length()
        return [2 ** ((exchange + peer) % powers) for peer in range(min(self.peers, powers))]

    def exchange_round(
        self, state: SGPState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[SGPState]:
        """Push shares of y and w, add what came in, and divide."""
        state = replace(state, since=0, rounds=state.rounds + 1)
        workers = exchange.workers
        if workers == 1:
            return Outcome(x=x, state=replace(state, mixed=x.clone()))
        pushed = x + state.mixed * state.surplus
        offsets = self.offsets(workers, state.rounds - 1)
        share = torch.cat([pushed, state.surplus + 1], dim=1) / (len(offsets) + 1)
        total = share
        for offset in offsets:
            targets = [(rank + offset) % workers for rank in range(workers)]
            total = total + exchange.send(share, targets)
        weight = total[:, -1:]
        mixed = total[:, :-1] / weight
        state = replace(state, surplus=weight - 1, mixed=mixed.clone())
        return Outcome(x=mixed, state=state, is_round=True)
