"""Descent on an exact objective under a sync rule: no data, no clock, all workers in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.sync.contract import Event, Signals, SyncRule
from shoal.sync.stacked import Stacked


class Objective(Protocol):
    """A function of ``[rows, d]`` points."""

    def losses(self, points: Tensor, /) -> Tensor:
        """The value at each row, ``[rows]``."""
        ...

    def gradients(self, points: Tensor, /) -> Tensor:
        """The gradient at each row, ``[rows, d]``."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Descent:
    """Where a descent ended, and how it got there.

    Args:
        x: ``[workers, d]``, the last points.
        state: of the rule.
        exchange: with the bytes that travelled, and the server's variable.
        best: the lowest loss of any worker after each step.
        events: in order.
    """

    x: Tensor
    state: Any
    exchange: Stacked
    best: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def leaders(self) -> list[int]:
        """Who led each round, of a rule that has leaders."""
        values = [event.values for event in self.events if event.kind == "round"]
        return [leader for leader in (v["leader"] for v in values) if isinstance(leader, int)]

    def center(self, rule: SyncRule[Any]) -> Tensor | None:
        """The rule's own average ``[1, d]``, in its state or at the server; None: it keeps none."""
        own = rule.center(self.state)
        if own is not None:
            return own
        return self.exchange.server if self.exchange.has_server else None


# The state's type is of no concern here.
def descend(
    rule: SyncRule[Any],
    objective: Objective,
    starts: Tensor,
    *,
    lr: float,
    steps: int,
    exchange: Stacked | None = None,
    gradients: Callable[[int, Tensor], Tensor] | None = None,
    scores: Callable[[int, Tensor], Tensor] | None = None,
) -> Descent:
    """Gradient descent of all workers under a rule.

    The score of a worker is the loss of its point after the step, as on a common probe set.

    Args:
        rule: the sync rule.
        objective: what is minimised.
        starts: ``[workers, d]``.
        lr: learning rate.
        steps: how many.
        exchange: the workers, for example in groups; None: one group on one node.
        gradients: other gradients than the objective's: noisy ones, or a bad worker's, from (step, points).
        scores: other scores than the losses, from (step, points).

    Returns:
        The descent.

    Example:
        >>> import torch
        >>> from shoal.sync.leader import Leader
        >>> from shoal.workloads.double_well import DoubleWell
        >>> rule = Leader(sync_every=1, global_sync_every=1, pull=0.1)
        >>> found = descend(rule, DoubleWell(), torch.tensor([[-0.9], [0.5]]), lr=0.1, steps=300)
        >>> [round(x, 4) for x in found.x.flatten().tolist()]     # the follower has changed wells
        [-1.0, -1.0]
    """
    exchange = exchange or Stacked(len(starts))
    x, best, events = starts, [], []
    state = rule.init(x, exchange)
    for number in range(steps):
        at, state = rule.before_step(state, x)
        slope = objective.gradients(at) if gradients is None else gradients(number, at)
        plain = Signals(lr=lr, losses=objective.losses(at))
        slope, state = rule.reduce_gradients(state, slope, exchange, plain)
        stepped = at - slope * lr
        signals = Signals(
            lr=lr,
            losses=plain.losses,
            scores=objective.losses(stepped) if scores is None else scores(number, stepped),
            judge=lambda points: objective.losses(points).tolist(),
        )
        outcome = rule.after_step(state, stepped, exchange, signals)
        x, state = outcome.x, outcome.state
        best.append(float(objective.losses(x).min()))
        events += outcome.events
    return Descent(x=x, state=state, exchange=exchange, best=tuple(best), events=tuple(events))
