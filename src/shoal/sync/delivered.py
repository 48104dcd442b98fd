"""The models that a run delivers when its replicas differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import torch
from torch import Tensor

from shoal.scaling.checks import number_in
from shoal.sync.choice import choose
from shoal.sync.contract import Exchange


@dataclass(frozen=True, kw_only=True, eq=False)
class Delivered:
    """Three models of one run.

    Args:
        leader: ``[1, d]``, the worker with the lowest score, as it is.
        mean: ``[1, d]``, the mean of all workers whose weights are finite.
        near: ``[1, d]``, the mean of those within the margin of the leader's score.
        leader_rank: who leads.
        near_ranks: who is within the margin, the leader among them.
    """

    leader: Tensor
    mean: Tensor
    near: Tensor
    leader_rank: int
    near_ranks: tuple[int, ...]


def deliver(
    x: Tensor, own_scores: Sequence[float], exchange: Exchange, *, margin: float = 0.1, step: int
) -> Delivered:
    """The leader, the mean, and the mean of the workers that are nearly as good.

    Deliver the leader by default. The mean is what the paper reports; one bad worker spoils it, and workers in
    different valleys have their mean on the ridge between them. Nothing of the training state is touched.

    Args:
        x: ``[rows, d]``, weights.
        own_scores: each local row's loss, best on held-out samples.
        exchange: the workers.
        margin: of the loss, >= 0, in its own unit.
        step: optimizer steps made, for the error.

    Returns:
        The three models, the same on every worker.

    Raises:
        DivergedError: no worker has both a finite score and finite weights.
        UsageError: a margin outside its range.

    Source: section 6.1 of the notes on Teng et al. 2019; the paper delivers the mean alone.

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> x = torch.tensor([[1.0], [2.0], [90.0]])
        >>> found = deliver(x, [0.30, 0.35, 9.0], Stacked(3), step=64)
        >>> found.leader.item(), found.mean.item(), found.near.item()
        (1.0, 31.0, 1.5)
    """
    number_in("deliver", "margin", margin, low=0, high=inf)
    is_sound: list[bool] = torch.isfinite(x).all(dim=1).tolist()
    # A worker with weights that are not finite is known to all by its score: +inf if only they are ill.
    told = [
        (score if isfinite(score) else nan) if sound else inf
        for score, sound in zip(own_scores, is_sound, strict=True)
    ]
    scores = exchange.scores(told)
    leader = choose(scores, step=step)
    near = tuple(
        rank
        for rank, score in enumerate(scores)
        if isfinite(score) and score <= scores[leader] + margin
    )
    row_scores = [scores[rank] for rank in exchange.ranks]
    finite = torch.tensor([score != inf for score in row_scores], dtype=torch.float64)
    close = torch.tensor([rank in near for rank in exchange.ranks], dtype=torch.float64)
    return Delivered(
        leader=exchange.from_workers(x, (leader,) * exchange.workers)[:1].clone(),
        mean=exchange.mean(x, weights=finite.to(x.device)),
        near=exchange.mean(x, weights=close.to(x.device)),
        leader_rank=leader,
        near_ranks=near,
    )
