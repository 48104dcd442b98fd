"""SlowMo: a slow momentum on top of local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from shoal.scaling.checks import number_in, whole_number
from shoal.sync.checks import mean_statistics_policy, momentum_policy
from shoal.sync.contract import (
    Exchange,
    MomentumPolicy,
    Outcome,
    Pull,
    Signals,
    StatisticsPolicy,
    SyncRule,
)
from shoal.sync.states import Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class SlowMoState(Counters):
    """What SlowMo remembers.

    Args:
        previous: ``[1, d]``, everybody's weights after the last round.
        slow: ``[1, d]``, u, the slow momentum in units of a gradient.
    """

    previous: Tensor
    slow: Tensor


@dataclass(frozen=True, kw_only=True)
class SlowMo(SyncRule[SlowMoState]):
    """Average every ``sync_every`` steps, and treat what the average moved as a gradient with momentum.

    Use it where local SGD loses accuracy at long periods. Like every average it is spoiled by one bad worker.

    With x_0 the weights after the last round, gamma the learning rate now, beta -> ``slow_momentum`` and
    alpha -> ``slow_lr``::

        u <- beta u + (x_0 - mean x) / gamma;     x <- x_0 - alpha gamma u

    Args:
        sync_every: optimizer steps between rounds, >= 1.
        slow_momentum: beta, in [0, 1). By published experience 0 below 4 nodes, 0.2 at 4, 0.5 at 8, 0.6
            at 16.
        slow_lr: alpha, > 0.
        momentum_policy: of each worker's own momentum: ``"keep"``, ``"reset"``, or ``"interpolate"``: the mean.
        statistics_policy: of BatchNorm: each its ``"own"``, the ``"mean"``, or ``"recompute"``.

    Raises:
        UsageError: an argument outside its range.

    Source: SlowMo in section 5 of the notes on Teng et al. 2019: beta 0.5, alpha 1, tau 48.
    Deviates: where the learning rate is 0 the slow momentum stays as it is, instead of becoming infinite.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = SlowMo(sync_every=1), Stacked(2), torch.zeros(2, 1)
        >>> state = rule.init(x, exchange)
        >>> for _ in range(3):
        ...     outcome = rule.after_step(state, x - 1.0, exchange, Signals(lr=1.0))
        ...     x, state = outcome.x, outcome.state
        ...     print(x[0].item())
        -1.0
        -2.5
        -4.25
    """

    sync_every: int = 48
    slow_momentum: float = 0.5
    slow_lr: float = 1.0
    momentum_policy: MomentumPolicy = "keep"
    statistics_policy: StatisticsPolicy = "own"

    name = "slowmo"
    alone = "SGD with a slow momentum over its own periods"
    is_plain_alone = False
    state_type = SlowMoState

    def __post_init__(self) -> None:
        whole_number("SlowMo", "sync_every", self.sync_every, at_least=1)
        number_in("SlowMo", "slow_momentum", self.slow_momentum, low=0, high=1 - 1e-9)
        number_in("SlowMo", "slow_lr", self.slow_lr, low=0, high=float("inf"), open_low=True)
        momentum_policy("SlowMo", self.momentum_policy)
        mean_statistics_policy("SlowMo", self.statistics_policy)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> SlowMoState:
        """No momentum, at the mean of the starting weights."""
        start = exchange.mean(x).clone()
        return SlowMoState(previous=start, slow=torch.zeros_like(start))

    def center(self, state: SlowMoState) -> Tensor:
        """Everybody's weights after the last round."""
        return state.previous

    def exchange_round(
        self, state: SlowMoState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[SlowMoState]:
        """The mean, as a slow gradient."""
        moved = state.previous - exchange.mean(x)
        slow = state.slow
        carried = slow * (self.slow_momentum * signals.lr)
        new = state.previous - (carried + moved) * self.slow_lr
        if signals.lr > 0:
            slow = slow * self.slow_momentum + moved / signals.lr
        rows = tuple(range(x.shape[0]))
        return Outcome(
            x=new.repeat(len(rows), 1),
            state=replace(state, since=0, previous=new, slow=slow),
            pulls=(Pull(toward="mean", fraction=1.0, rows=rows),),
            is_round=True,
        )
