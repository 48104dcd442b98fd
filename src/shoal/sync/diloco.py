"""DiLoCo and streaming DiLoCo: an outer optimizer over what many inner steps have moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.scaling.checks import flag, number_in, whole_number
from shoal.sync.checks import multiple
from shoal.sync.contract import Exchange, Outcome, Pull, Signals, SyncRule
from shoal.sync.pulling import toward
from shoal.sync.states import Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class DiLoCoState(Counters):
    """What DiLoCo remembers.

    Args:
        rounds: fragments exchanged.
        center: ``[1, d]``, the outer weights.
        buffer: ``[1, d]``, the outer momentum.
        pending: the fragment that is on its way to the workers, -1 if there is none.
    """

    rounds: int = 0
    center: Tensor
    buffer: Tensor
    pending: int = -1


@dataclass(frozen=True, kw_only=True)
class DiLoCo(SyncRule[DiLoCoState]):
    """Every ``sync_every`` inner steps, one outer step of Nesterov SGD on what the mean has moved.

    Use it with AdamW inside and few, slow exchanges. With ``fragments`` it streams: the weights are cut
    into as many pieces, one of which is exchanged every sync_every / fragments steps, so that the peak of
    traffic is as much smaller; with ``delay`` training goes on while a piece travels.

    For a fragment, with c the outer weights, mu -> ``outer_momentum`` and b its buffer::

        D = c - mean x;   b <- mu b + D;   c <- c - outer_lr (D + mu b)      (without nesterov: b for D + mu b)

    and, ``delay`` steps later, x <- c + mixing (x - c).

    Args:
        sync_every: inner steps between two exchanges of one fragment (H), a multiple of ``fragments``.
        outer_lr: > 0.
        outer_momentum: in [0, 1).
        nesterov: whether the outer step looks ahead.
        fragments: P, >= 1. Fragment f holds the numbers from d f / P to d (f + 1) / P.
        delay: steps from the exchange until its result is used, >= 0 and below sync_every / fragments.
        mixing: part of a worker's own weights that stays, in [0, 1]; 0: the outer weights are taken.

    Raises:
        UsageError: an argument outside its range.

    Source: DiLoCo and Streaming DiLoCo in section 5 of the notes on Teng et al. 2019: H 500, outer lr
        0.7, momentum 0.9 with Nesterov.
    Deviates: fragments are cut from the flat vector, not along layers; outer gradients are not quantised.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule = DiLoCo(sync_every=2, outer_lr=0.5, outer_momentum=0.0)
        >>> exchange, x = Stacked(2), torch.zeros(2, 1)
        >>> state = rule.init(x, exchange)
        >>> for _ in range(2):
        ...     outcome = rule.after_step(state, x - 1.0, exchange, Signals())
        ...     x, state = outcome.x, outcome.state
        >>> x.tolist()
        [[-1.0], [-1.0]]
    """

    sync_every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    name = "diloco"
    alone = "the inner optimizer, with an outer Nesterov step over its own periods"
    is_plain_alone = False
    state_type = DiLoCoState

    def __post_init__(self) -> None:
        whole_number("DiLoCo", "sync_every", self.sync_every, at_least=1)
        whole_number("DiLoCo", "fragments", self.fragments, at_least=1)
        multiple("DiLoCo", "sync_every", self.sync_every, of=self.fragments, of_field="fragments")
        number_in("DiLoCo", "outer_lr", self.outer_lr, low=0, high=float("inf"), open_low=True)
        number_in("DiLoCo", "outer_momentum", self.outer_momentum, low=0, high=1 - 1e-9)
        flag("DiLoCo", "nesterov", self.nesterov)
        number_in("DiLoCo", "mixing", self.mixing, low=0, high=1)
        whole_number("DiLoCo", "delay", self.delay, at_least=0)
        if self.delay >= self.period:
            raise UsageError(
                f"delay = {self.delay}; a fragment is exchanged every sync_every / fragments = {self.period} "
                f"steps and must have arrived by then; write DiLoCo(delay={self.period - 1}) or less"
            )

    @property
    def period(self) -> int:
        """Steps from one fragment to the next."""
        return self.sync_every // self.fragments

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> DiLoCoState:
        """Outer weights at the mean of the starting ones.

        Raises:
            UsageError: more fragments than parameters.
        """
        if self.fragments > x.shape[1]:
            raise UsageError(
                f"fragments = {self.fragments}; the model has {x.shape[1]} parameters; use as many "
                "fragments or fewer"
            )
        center = exchange.mean(x).clone()
        return DiLoCoState(center=center, buffer=torch.zeros_like(center))

    def rest(self, state: DiLoCoState, x: Tensor, exchange: Exchange) -> Outcome[DiLoCoState]:
        """Take up a fragment whose delay is over."""
        if state.pending < 0 or state.since < self.delay:
            return Outcome(x=x, state=state)
        return self._arrive(state, x)

    def center(self, state: DiLoCoState) -> Tensor:
        """The outer weights."""
        return state.center

    def exchange_round(
        self, state: DiLoCoState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[DiLoCoState]:
        """One outer step of the fragment whose turn it is."""
        fragment = state.rounds % self.fragments
        piece = self._piece(fragment, x)
        center, buffer = state.center.clone(), state.buffer.clone()
        moved = center[:, piece] - exchange.mean(x[:, piece].contiguous())
        velocity = buffer[:, piece] * self.outer_momentum + moved
        ahead = moved + velocity * self.outer_momentum if self.nesterov else velocity
        buffer[:, piece] = velocity
        center[:, piece] = center[:, piece] - ahead * self.outer_lr
        state = replace(
            state,
            since=0,
            rounds=state.rounds + 1,
            center=center,
            buffer=buffer,
            pending=fragment,
        )
        if self.delay == 0:
            return self._arrive(state, x, is_round=True)
        return Outcome(x=x, state=state, is_round=True)

    def _arrive(
        self, state: DiLoCoState, x: Tensor, *, is_round: bool = False
    ) -> Outcome[DiLoCoState]:
        """The pending fragment's outer weights, mixed with the workers' own."""
        piece = self._piece(state.pending, x)
        own = x[:, piece]
        x = x.clone()
        x[:, piece] = toward(state.center[:, piece].expand_as(own), own, self.mixing)
        rows = tuple(range(x.shape[0]))
        return Outcome(
            x=x,
            state=replace(state, pending=-1),
            pulls=(Pull(toward="mean", fraction=1 - self.mixing, rows=rows),),
            is_round=is_round,
        )

    def _piece(self, fragment: int, x: Tensor) -> slice:
        size = x.shape[1]
        return slice(size * fragment // self.fragments, size * (fragment + 1) // self.fragments)
