"""Independent: no communication, the control of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Size, Tensor

from shoal.sync.contract import Exchange, SyncRule
from shoal.sync.states import Counters


@dataclass(frozen=True, kw_only=True)
class Independent(SyncRule[Counters]):
    """Every worker trains by itself, and nothing is sent.

    Show it beside every other rule: on an easy task the best, or the mean, of workers that never talked
    can look like a speed-up (notes on Teng et al. 2019, 6.2 L2).

    Source: the no-communication control of section 6.1 of those notes.
    """

    name = "independent"
    alone = "plain SGD"
    state_type = Counters

    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> Counters:
        """No state but the count of steps."""
        return Counters()
