"""Choosing the leader, and watching how it is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import fsum, inf, isfinite, nan
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import DivergedError, UsageError

ScoreName = Literal["auto", "own", "probe", "held_out"]

LOCK_IN_SHARE = 0.8
"""Above this share of all rounds one worker leads too often."""

LOCK_IN_ROUNDS = 10
"""Fewer rounds than these prove nothing."""


def window_score(losses: Sequence[float]) -> float:
    """The mean of the losses that there are; not a number where there are none, or one is not finite.

    Losses are summed exactly, so equal losses in any order tie.

    Deviates: the authors' meter divides a zero-filled window by its full length, so that the worker with
        the fewest batches leads first (notes, 2.3).

    Example:
        >>> window_score([0.5, 0.7]), window_score([])
        (0.6, nan)
    """
    values = [float(loss) for loss in losses]
    if not values or not all(isfinite(value) for value in values):
        return nan
    return fsum(values) / len(values)


def choose(scores: Sequence[float], *, step: int) -> int:
    """The leader: the worker with the lowest finite score, of equals the lowest rank.

    Args:
        scores: losses by rank.
        step: optimizer steps made, for the error.

    Raises:
        DivergedError: no score is finite.

    Example:
        >>> choose([0.4, 0.4, 0.5], step=64)
        0
    """
    finite = [(score, rank) for rank, score in enumerate(scores) if isfinite(score)]
    if not finite:
        raise DivergedError(
            f"scores = {list(scores)} at step {step}; no worker can lead without a finite one; resume from "
            "the last checkpoint with a lower learning rate"
        )
    return min(finite)[1]


def choose_in_groups(
    scores: Sequence[float], group_of: Sequence[int], *, step: int
) -> tuple[int, ...]:
    """Each rank's local leader: the best of its group.

    A group without a finite score follows the best of the fleet.

    Args:
        scores: losses by rank.
        group_of: the group of each rank.
        step: optimizer steps made, for the error.

    Raises:
        DivergedError: no score in the fleet is finite.

    Example:
        >>> choose_in_groups([0.3, 0.2, 0.5, 0.4], [0, 0, 1, 1], step=64)
        (1, 1, 3, 3)
    """
    overall = choose(scores, step=step)
    best: dict[int, int] = {}
    for rank, (score, group) in enumerate(zip(scores, group_of, strict=True)):
        if isfinite(score) and (group not in best or score < scores[best[group]]):
            best[group] = rank
    return tuple(best.get(group, overall) for group in group_of)


def lead_margin(scores: Sequence[float], leader: int) -> float:
    """By how much the leader's score is below the second best; infinite if there is no second."""
    others = [score for rank, score in enumerate(scores) if rank != leader and isfinite(score)]
    return min(others) - scores[leader] if others else inf


def accepts(leader_score: float, own_score: float) -> bool:
    """Whether a follower lets a leader pull it, by its *own* scores of both (``verify=True``).

    Args:
        leader_score: loss of the received weights on the follower's data.
        own_score: loss of the follower's weights on the same data.

    Returns:
        True if the leader's is finite and not above the follower's; a follower whose own is not finite
        takes any leader with a finite one.
    """
    if not isfinite(leader_score):
        return False
    return not (isfinite(own_score) and leader_score > own_score)


def resolve_score(score: ScoreName, *, shards: str) -> ScoreName:
    """The score that ``"auto"`` stands for: ``"probe"`` where every worker keeps its own part of the data.

    Own training losses on fixed shards lock in the worker with the easiest part (notes, 6.2 L1).

    Args:
        score: the rule's setting.
        shards: ``"fixed"``, or how else the data are dealt.
    """
    if score != "auto":
        return score
    return "probe" if shards == "fixed" else "own"


def check_probe(probe: Collection[int], test: Collection[int]) -> None:
    """Refuse a probe set that shares samples with the test set.

    Args:
        probe: indices of samples that choose the leader.
        test: indices, in the same data set, that the result is tested on.

    Raises:
        UsageError: they overlap, or the probe set is empty.
    """
    if not probe:
        raise UsageError(
            "probe set = 0 samples; it chooses the leader and needs some; give at least 1"
        )
    shared = sorted(set(probe) & set(test))
    if shared:
        raise UsageError(
            f"probe set: {len(shared)} of its {len(probe)} samples are in the test set, sample "
            f"{shared[0]} first; choosing the leader on test samples spoils the test; take the probe from "
            "the training set"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Reign:
    """How often each worker has led.

    Args:
        led: ``[n, 2]`` int64, rows of (worker, rounds led), in the order of their first reign.
        leader: the worker that led last; -1 before the first round.
        switches: how often the leader was another worker than the round before.
    """

    led: Tensor
    leader: int
    switches: int

    def after(self, leader: int) -> Reign:
        """The next record, once worker number ``leader`` has led a round."""
        led = self.led.clone()
        found = (led[:, 0] == leader).nonzero()
        if len(found):
            led[found[0, 0], 1] += 1
        else:
            led = torch.cat([led, torch.tensor([[leader, 1]], dtype=torch.int64)])
        switched = self.leader not in (-1, leader)
        return Reign(led=led, leader=leader, switches=self.switches + switched)

    @property
    def rounds(self) -> int:
        """Rounds led by anybody."""
        return int(self.led[:, 1].sum())

    @property
    def share(self) -> float:
        """The largest share of rounds that one worker has led; 0 before the first."""
        return int(self.led[:, 1].max()) / self.rounds if len(self.led) else 0.0

    @property
    def is_locked_in(self) -> bool:
        """Whether one worker has led more than 80 % of at least ten rounds."""
        return self.rounds >= LOCK_IN_ROUNDS and self.share > LOCK_IN_SHARE


def no_reign() -> Tensor:
    """``Reign.led`` before the first round."""
    return torch.zeros((0, 2), dtype=torch.int64)
