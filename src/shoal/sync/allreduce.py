"""All-reduce: every worker applies the mean gradient of the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.sync.contract import Exchange, Signals, SyncRule
from shoal.sync.states import Counters


@dataclass(frozen=True, kw_only=True)
class AllReduce(SyncRule[Counters]):
    """Average the gradients of every step over all samples, so that replicas stay equal.

    g = sum_i n_i g_i / sum_i n_i, with g_i the mean gradient of worker i over its n_i samples.

    Args:
        bucket_bytes: gradients travel in flat buckets of about this size, the first as soon as
            backward has filled it; at least 1,024. 4 MiB overlaps well from a few million parameters on.
            It changes when they travel, not what arrives; the pure rule sends one vector.

    Raises:
        UsageError: ``bucket_bytes`` below 1,024.

    Source: synchronous SGD, as in section 5 of the notes on Teng et al. 2019.
    """

    bucket_bytes: int = 4 << 20

    name = "allreduce"
    alone = "plain SGD: the mean over one worker is its own gradient"
    state_type = Counters

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024:
            raise UsageError(
                f"AllReduce(bucket_bytes) = {self.bucket_bytes}; a bucket holds at least 1,024 bytes; "
                "leave it at its default of 4 MiB"
            )

    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> Counters:
        """No state but the count of steps."""
        return Counters()

    def reduce_gradients(
        self, state: Counters, gradients: Tensor, exchange: Exchange, signals: Signals
    ) -> tuple[Tensor, Counters]:
        """The mean gradient, weighted by samples where their counts are given."""
        if exchange.workers == 1:
            return gradients, state
        mean = exchange.mean(gradients, weights=signals.counts)
        return mean.expand_as(gradients), state
