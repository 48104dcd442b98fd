"""All-reduce: every worker applies the mean gradient of the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Average the gradients of every step over all samples, so that replicas stay equal.

    g = sum_i n_i g_i / sum_i n_i, with g_i the mean gradient of worker i over its n_i samples.

    Args:
        bucket_bytes: gradients travel in flat buckets of about this size, the first as soon as
            backward has filled it; at least 1,024. 4 MiB overlaps well from a few million parameters on.

    Raises:
        UsageError: ``bucket_bytes`` below 1,024.
    """

    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024:
            raise UsageError(
                f"AllReduce(bucket_bytes) = {self.bucket_bytes}; a bucket holds at least 1,024 bytes; "
                "leave it at its default of 4 MiB"
            )
