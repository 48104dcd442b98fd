"""Who does what in a step: a pure function of the cursor, the membership and the batch policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shoal.data.cursor import epoch_end, step_span
from shoal.data.shares import shares
from shoal.fleet.batch_policy import BatchPolicy
from shoal.world.contract import Membership


@dataclass(frozen=True)
class StepPlan:
    """Who does what in one step; the same on every worker but for ``pieces``.

    Args:
        membership: who takes part.
        start, stop: the step's samples as positions of the cursor.
        nominal: the nominal global batch in samples.
        pieces: this process's micro-batches as (start, stop) positions, in order.
        shares: how many of them belong to each of the ranks that this process plays.
        rounds: the largest number of micro-batches any worker has.
        someone_idle: whether some worker has no samples in this step.
    """

    membership: Membership
    start: int
    stop: int
    nominal: int
    pieces: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]
    rounds: int
    someone_idle: bool


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the present epoch is cut.

    Args:
        policy: how the global batch follows the workers.
        samples: length of the training set, >= 1.
        local_batch: samples per worker per step, >= 1.
        micro_batch: samples per forward pass, 1 to ``local_batch``.
    """

    policy: BatchPolicy
    samples: int
    local_batch: int
    micro_batch: int

    def plan(self, cursor: int, membership: Membership) -> StepPlan:
        """The step that begins at ``cursor``."""
        nominal = self.policy.global_batch(self.local_batch, membership.workers)
        span = step_span(cursor, self.samples, nominal)
        dealt = _dealt(len(span), self.micro_batch, membership.workers)
        return StepPlan(
            membership=membership,
            start=span.start,
            stop=span.stop,
            nominal=nominal,
            pieces=tuple(
                (span.start + m.start, span.start + m.stop)
                for rank in membership.ranks
                for m in dealt[rank]
            ),
            shares=tuple(len(dealt[rank]) for rank in membership.ranks),
            rounds=max(len(pieces) for pieces in dealt),
            someone_idle=any(not pieces for pieces in dealt),
        )

    def upcoming(self, plan: StepPlan, index: int) -> Iterator[tuple[int, int]]:
        """What this process draws after piece ``index`` of ``plan`` if the membership stays."""
        yield from plan.pieces[index + 1 :]
        end = epoch_end(plan.start, self.samples)
        while plan.stop < end:
            plan = self.plan(plan.stop, plan.membership)
            yield from plan.pieces


# Most steps of a run are cut alike.
_dealt = lru_cache(maxsize=16)(shares)
