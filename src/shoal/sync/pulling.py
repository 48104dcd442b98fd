"""The pull toward another worker: the arithmetic, and one round of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.scaling.checks import number_in
from shoal.sync.choice import accepts
from shoal.sync.contract import Event, Exchange, Pull


def toward(x: Tensor, target: Tensor, fraction: float, *, exempt: Tensor | None = None) -> Tensor:
    """x + fraction (target - x): x itself at 0, the target itself at 1, bit for bit.

    Each operation rounds by itself, never fused, so that a row's result does not depend on how many rows
    are computed together.

    Args:
        x: ``[rows, d]``.
        target: ``[rows, d]`` or ``[1, d]``.
        fraction: in [0, 1].
        exempt: ``[rows]`` bool, rows that stay.

    Returns:
        ``[rows, d]``; ``x`` itself at fraction 0.
    """
    if fraction == 0:
        return x
    moved = target.expand_as(x) if fraction == 1 else x + (target - x) * fraction
    if exempt is None:
        return moved.clone() if fraction == 1 else moved
    return torch.where(exempt.to(x.device).unsqueeze(1), x, moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class Move:
    """One broadcast of leaders, and what it did to the local rows.

    Args:
        x: ``[rows, d]`` after the pull.
        received: ``[rows, d]``, each row's leader.
        is_leader: ``[rows]`` bool.
        sources: each rank's leader.
        fraction: how far followers moved.
        replaced: local rows whose weights were not finite and are now the leader's.
        refused: local rows that did not accept their leader.
    """

    x: Tensor
    received: Tensor
    is_leader: Tensor
    sources: tuple[int, ...]
    fraction: float
    replaced: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()

    def as_pull(self, *, is_repairing: bool) -> Pull:
        """The rows that moved, and where to; ``is_repairing``: see :class:`~shoal.sync.contract.Pull`."""
        stayed = {*self.refused, *self.is_leader.nonzero().flatten().tolist()}
        rows = tuple(row for row in range(len(self.is_leader)) if row not in stayed)
        return Pull(
            toward="workers",
            fraction=self.fraction,
            rows=rows,
            sources=self.sources,
            replaced=self.replaced,
            is_repairing=is_repairing,
        )

    def events(self, step: int, exchange: Exchange) -> list[Event]:
        """One event for each row that was replaced or refused."""
        found: list[Event] = []
        for kind, rows in (("replaced", self.replaced), ("refused", self.refused)):
            for row in rows:
                rank = exchange.ranks[row]
                values = {
                    "worker": exchange.members[rank],
                    "leader": exchange.members[self.sources[rank]],
                }
                found.append(Event(kind=kind, step=step, values=values))
        return found


def follow(
    x: Tensor,
    sources: Sequence[int],
    fraction: float,
    exchange: Exchange,
    *,
    judge: Callable[[Tensor], Sequence[float]] | None = None,
) -> Move:
    """Receive one's leader and move toward it.

    Args:
        x: ``[rows, d]``.
        sources: each rank's leader, for all ranks.
        fraction: in [0, 1]; at 0 nothing is sent.
        exchange: the workers.
        judge: each local row's loss of given weights, on its own data; None: leaders are trusted.

    Returns:
        The move. A follower whose weights are not finite takes the leader's whole.
    """
    sources = tuple(sources)
    is_leader = torch.tensor([sources[rank] == rank for rank in exchange.ranks])
    if fraction == 0:
        return Move(x=x, received=x, is_leader=is_leader, sources=sources, fraction=0.0)
    received = exchange.from_workers(x, sources)
    is_sound = torch.isfinite(x).all(dim=1).cpu()
    accepted = ~is_leader
    if judge is not None:
        verdicts = [accepts(z, own) for z, own in zip(judge(received), judge(x), strict=True)]
        accepted = accepted & torch.tensor(verdicts)
    moved = toward(x, received, fraction, exempt=~accepted)
    is_replaced = accepted & ~is_sound
    if bool(is_replaced.any()):
        moved = torch.where(is_replaced.to(x.device).unsqueeze(1), received, moved)
    return Move(
        x=moved,
        received=received,
        is_leader=is_leader,
        sources=sources,
        fraction=fraction,
        replaced=_rows(is_replaced),
        refused=_rows(~accepted & ~is_leader),
    )


def _rows(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


@dataclass(frozen=True, kw_only=True)
class PullScalings:
    """One pull in both scalings.

    Args:
        fraction: part of the way to the leader per round, what the leader rule is given.
        penalty_weight: lambda of the objective (lambda / 2) |x - z|^2, as in the theorems: fraction / lr.
    """

    fraction: float
    penalty_weight: float

    def __str__(self) -> str:
        return f"pull fraction {self.fraction:g} = penalty weight {self.penalty_weight:g}"


def pull_scalings(pull: float, lr: float) -> PullScalings:
    """A pull as a fraction and as a penalty weight.

    Args:
        pull: fraction, in [0, 1].
        lr: learning rate in force, > 0.

    Raises:
        UsageError: a number outside its range.

    Source: notes on Teng et al. 2019, 1.2: x - eta (g + lambda (x - z)) moves by the fraction eta lambda. A
        pull after the step, as in their algorithm, comes to rest as one of pull / (lr (1 - pull)) would:
        the same for a small pull.

    Example:
        >>> print(pull_scalings(0.1, lr=0.05))
        pull fraction 0.1 = penalty weight 2
    """
    number_in("pull_scalings", "pull", pull, low=0, high=1)
    number_in("pull_scalings", "lr", lr, low=0, high=float("inf"), open_low=True)
    return PullScalings(fraction=pull, penalty_weight=pull / lr)
