"""Lookahead: slow weights that follow the fast ones; no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Size, Tensor

from shoal.scaling.checks import number_in, whole_number
from shoal.sync.checks import momentum_policy
from shoal.sync.contract import Exchange, MomentumPolicy, Outcome, Pull, Signals, SyncRule
from shoal.sync.pulling import toward
from shoal.sync.states import PER_ROW, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class LookaheadState(Counters):
    """What Lookahead remembers.

    Args:
        slow: ``[rows, d]``, the slow weights.
    """

    slow: Tensor = field(metadata=PER_ROW)


@dataclass(frozen=True, kw_only=True)
class Lookahead(SyncRule[LookaheadState]):
    """Every ``sync_every`` steps, move slow weights part of the way to the fast ones and go on from there.

    Use it on one worker, as a control for DiLoCo: what an outer step alone brings. With several workers each
    looks ahead by itself.

    With s the slow weights, k -> ``sync_every``, a -> ``step_size``::

        s <- s + a (x - s);   x <- s                 every k steps

    Args:
        sync_every: optimizer steps between two looks (k), >= 1.
        step_size: a, in [0, 1]. 1 is plain SGD, and 0 never moves.
        momentum_policy: of each worker's momentum: ``"keep"``, ``"reset"``, or ``"interpolate"``: pull it back
            as the weights are (see :mod:`shoal.sync.policies`).

    Raises:
        UsageError: an argument outside its range.

    Source: Zhang et al. 2019, k 5 and a 0.5, as in section 5 of the notes on Teng et al. 2019.

    Example:
        >>> import torch
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange, x = Lookahead(sync_every=1), Stacked(1), torch.zeros(1, 1)
        >>> rule.after_step(rule.init(x, exchange), x + 4.0, exchange, Signals()).x.item()
        2.0
    """

    sync_every: int = 5
    step_size: float = 0.5
    momentum_policy: MomentumPolicy = "keep"

    name = "lookahead"
    alone = "Lookahead, which is a rule for one worker"
    is_plain_alone = False
    state_type = LookaheadState

    def __post_init__(self) -> None:
        whole_number("Lookahead", "sync_every", self.sync_every, at_least=1)
        number_in("Lookahead", "step_size", self.step_size, low=0, high=1)
        momentum_policy("Lookahead", self.momentum_policy)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> LookaheadState:
        """Slow weights where the fast ones are."""
        return LookaheadState(slow=x.clone())

    def exchange_round(
        self, state: LookaheadState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[LookaheadState]:
        """The look; nothing is sent."""
        slow = toward(state.slow, x, self.step_size)
        rows = tuple(range(x.shape[0]))
        return Outcome(
            x=slow.clone(),
            state=replace(state, since=0, slow=slow),
            pulls=(Pull(toward="past", fraction=1 - self.step_size, rows=rows),),
            is_round=True,
        )

    def center(self, state: LookaheadState) -> Tensor:
        """The slow weights, one row per worker."""
        return state.slow
