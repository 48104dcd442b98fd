"""BMUF: blockwise model update filtering, momentum over whole blocks of local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import flag, number_in, whole_number
from shoal.sync.contract import Exchange, Outcome, Pull, Signals, SyncRule
from shoal.sync.states import Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class BMUFState(Counters):
    """What BMUF remembers.

    Args:
        weights: ``[1, d]``, W, the filtered model.
        start: ``[1, d]``, where the present block began.
        change: ``[1, d]``, D, the last filtered update.
    """

    weights: Tensor
    start: Tensor
    change: Tensor


@dataclass(frozen=True, kw_only=True)
class BMUF(SyncRule[BMUFState]):
    """Average every ``sync_every`` steps and pass what the block has moved through a momentum filter.

    Use it as SlowMo without a learning rate in it. Like every average it is spoiled by one bad worker.

    With W the filtered model, s where the block began, zeta -> ``block_momentum``, eta -> ``block_lr``::

        D <- zeta D + eta (mean x - s);   W <- W + D;   x <- s <- W  (``nesterov``: W + zeta D)

    Args:
        sync_every: optimizer steps in a block, >= 1.
        block_momentum: zeta, in [0, 1).
        block_lr: eta, > 0.
        nesterov: begin the next block ahead of the filtered model, where momentum will carry it.

    Raises:
        UsageError: an argument outside its range.

    Source: BMUF in section 5 of the notes on Teng et al. 2019: zeta 0.875, eta 1, block 50.
    Deviates: the notes measure the block's movement from W; with ``nesterov`` we measure it from where
        the block began, W + zeta D, or the momentum would count twice and, at the defaults, grow without
        end. Without ``nesterov`` the two are the same.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = BMUF(sync_every=1, block_momentum=0.5), Stacked(2), torch.zeros(2, 1)
        >>> outcome = rule.after_step(rule.init(x, exchange), x - 2.0, exchange, Signals())
        >>> outcome.x.tolist()
        [[-2.0], [-2.0]]
    """

    sync_every: int = 50
    block_momentum: float = 0.875
    block_lr: float = 1.0
    nesterov: bool = False

    name = "bmuf"
    alone = "SGD with momentum over its own blocks"
    is_plain_alone = False
    state_type = BMUFState

    def __post_init__(self) -> None:
        whole_number("BMUF", "sync_every", self.sync_every, at_least=1)
        number_in("BMUF", "block_momentum", self.block_momentum, low=0, high=1 - 1e-9)
        number_in("BMUF", "block_lr", self.block_lr, low=0, high=float("inf"), open_low=True)
        flag("BMUF", "nesterov", self.nesterov)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> BMUFState:
        """At rest, at the mean of the starting weights."""
        start = exchange.mean(x).clone()
        return BMUFState(weights=start, start=start, change=torch.zeros_like(start))

    def center(self, state: BMUFState) -> Tensor:
        """The filtered model."""
        return state.weights

    def exchange_round(
        self, state: BMUFState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[BMUFState]:
        """The mean, filtered."""
        moved = exchange.mean(x) - state.start
        change = state.change * self.block_momentum + moved * self.block_lr
        weights = state.weights + change
        start = weights + change * self.block_momentum if self.nesterov else weights
        rows = tuple(range(x.shape[0]))
        return Outcome(
            x=start.repeat(len(rows), 1),
            state=replace(state, since=0, weights=weights, start=start, change=change),
            pulls=(Pull(toward="mean", fraction=1.0, rows=rows),),
            is_round=True,
        )
