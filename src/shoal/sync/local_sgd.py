"""Local SGD and post-local SGD: workers train by themselves and are averaged now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Size, Tensor

from shoal.scaling.checks import whole_number
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


@dataclass(frozen=True, kw_only=True)
class LocalSGD(SyncRule[Counters]):
    """Replace all weights by their mean every ``sync_every`` optimizer steps.

    Use it with good and equal workers on slow links. One bad worker spoils the mean for all.

    With x the weights after the step::

        x <- mean of x over workers                 every sync_every steps

    and, in the first ``warmup_steps`` steps (post-local SGD), the gradients are averaged in every step
    instead, so that replicas stay equal until then.

    Args:
        sync_every: optimizer steps between averagings, H, >= 1.
        warmup_steps: steps of all-reduce first, >= 0; periods are counted from their end.
        momentum_policy: of each worker's momentum: ``"keep"``, ``"reset"``, or ``"interpolate"``: the mean.
        statistics_policy: of BatchNorm: each its ``"own"``, the ``"mean"``, or ``"recompute"``.

    Raises:
        UsageError: an argument outside its range.

    Source: Local SGD and post-local SGD in section 5 of the notes on Teng et al. 2019.
    Deviates: torch's averager averages at the first step after the warm-up too, where all are equal.

    Example:
        >>> import torch
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = LocalSGD(sync_every=1), Stacked(2), torch.tensor([[1.0], [3.0]])
        >>> rule.after_step(rule.init(x, exchange), x, exchange, Signals()).x.tolist()
        [[2.0], [2.0]]
    """

    sync_every: int = 64
    warmup_steps: int = 0
    momentum_policy: MomentumPolicy = "keep"
    statistics_policy: StatisticsPolicy = "own"

    name = "local_sgd"
    alone = "plain SGD: the mean over one worker is itself"
    state_type = Counters

    def __post_init__(self) -> None:
        whole_number("LocalSGD", "sync_every", self.sync_every, at_least=1)
        whole_number("LocalSGD", "warmup_steps", self.warmup_steps, at_least=0)
        momentum_policy("LocalSGD", self.momentum_policy)
        mean_statistics_policy("LocalSGD", self.statistics_policy)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> Counters:
        """No state but the counts of steps."""
        return Counters()

    def reduce_gradients(
        self, state: Counters, gradients: Tensor, exchange: Exchange, signals: Signals
    ) -> tuple[Tensor, Counters]:
        """In the warm-up the mean gradient, as all-reduce gives it; then each worker's own."""
        if state.steps >= self.warmup_steps or exchange.workers == 1:
            return gradients, state
        mean = exchange.mean(gradients, weights=signals.counts)
        return mean.expand_as(gradients), state

    def observe(self, state: Counters, signals: Signals) -> Counters:
        """Count the step; those of the warm-up are of no period."""
        state = super().observe(state, signals)
        return replace(state, since=0) if state.steps <= self.warmup_steps else state

    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        """The mean, for everybody."""
        state = replace(state, since=0)
        if exchange.workers == 1:
            return Outcome(x=x, state=state)
        rows = tuple(range(x.shape[0]))
        return Outcome(
            x=exchange.mean(x).repeat(len(rows), 1),
            state=state,
            pulls=(Pull(toward="mean", fraction=1.0, rows=rows),),
            is_round=True,
        )
