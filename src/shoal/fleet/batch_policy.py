"""Batch policies: how the global batch follows the number of workers.

The choice is the user's, because it decides what is optimised: ``proportional`` is Dynamic SGD's own
(the batch follows the workers and the learning rate follows the batch), ``constant`` keeps every step
the same whoever computes it, ``capped`` grows to a limit and stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.errors import UsageError


class BatchPolicy(Protocol):
    """Maps (samples per worker, workers) to the nominal samples per optimizer step."""

    @property
    def name(self) -> str:
        """The policy's name in events and tables."""
        ...

    def global_batch(self, local_batch: int, workers: int) -> int:
        """Samples per step, >= 1, for ``workers`` >= 1 of ``local_batch`` >= 1 samples each."""
        ...


@dataclass(frozen=True)
class Proportional:
    """The global batch is ``local_batch`` x workers (Dynamic SGD)."""

    name: str = "proportional"

    def global_batch(self, local_batch: int, workers: int) -> int:
        """``local_batch * workers`` samples."""
        return local_batch * workers


@dataclass(frozen=True)
class Constant:
    """The global batch stays at ``samples``; its micro-batches are dealt to whoever is there.

    ``local_batch`` then bounds the samples of one forward pass (unless ``micro_batch`` is given). With
    fewer micro-batches than workers some of these have no share, which is said when it happens.
    """

    samples: int
    name: str = "constant"

    def __post_init__(self) -> None:
        _check_samples("Constant(samples)", self.samples)

    def global_batch(self, local_batch: int, workers: int) -> int:
        """``samples``, whatever the number of workers."""
        return self.samples


@dataclass(frozen=True)
class Capped:
    """Proportional up to ``samples``, constant beyond."""

    samples: int
    name: str = "capped"

    def __post_init__(self) -> None:
        _check_samples("Capped(samples)", self.samples)

    def global_batch(self, local_batch: int, workers: int) -> int:
        """The smaller of ``local_batch * workers`` and ``samples``."""
        return min(local_batch * workers, self.samples)


def _check_samples(what: str, samples: int) -> None:
    if samples < 1:
        raise UsageError(
            f"{what} = {samples}; a global batch has at least 1 sample; pass a positive integer"
        )


def batch_policy(policy: BatchPolicy | str) -> BatchPolicy:
    """A policy from its name: ``"proportional"``, ``"constant:256"`` or ``"capped:1024"``.

    Raises:
        UsageError: another name, or a missing or non-positive number of samples.
    """
    if not isinstance(policy, str):
        return policy
    name, _, number = policy.partition(":")
    if name == "proportional" and not number:
        return Proportional()
    if name in ("constant", "capped"):
        if not number.isdigit():
            raise UsageError(
                f"batch_policy = {policy!r}; {name} needs its global batch in samples; "
                f'write "{name}:256" or shoal.{name.capitalize()}(256)'
            )
        return Constant(int(number)) if name == "constant" else Capped(int(number))
    raise UsageError(
        f"batch_policy = {policy!r}; known are proportional, constant:N and capped:N (N in samples)"
    )


def idle_workers(global_batch: int, micro_batch: int, workers: int) -> int:
    """How many of ``workers`` have no share of a step, because it has fewer micro-batches than that."""
    return max(0, workers - -(-global_batch // micro_batch))


def micro_batch_for_all(global_batch: int, workers: int) -> int:
    """The largest micro-batch that leaves nobody idle; 0 if there are more workers than samples."""
    if workers == 1:
        return global_batch
    return (global_batch - 1) // (workers - 1)


def idle_remedy(global_batch: int, workers: int) -> str:
    """What gives all ``workers`` a share of a step."""
    micro = micro_batch_for_all(global_batch, workers)
    if micro == 0:
        return (
            f"run at most {global_batch} workers with micro_batch=1, or pass a larger global batch"
        )
    smaller = f"{micro} or smaller" if micro > 1 else "1"
    return f"pass micro_batch={smaller} to fleet.batches to give all workers a share"
