"""What follows a pull besides the weights: momentum and BatchNorm's statistics, by the rule's policies.

Whatever of it comes from other workers travels, and is counted: a follower that takes over its leader's
momentum receives as many bytes again as the weights have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sync.contract import Pull, SyncRule
from shoal.sync.pulling import toward
from shoal.sync.stacked import Stacked
from shoal.world.virtual.stack import Stack


def follow_pulls(
    stack: Stack, rule: SyncRule[Any], pulls: Sequence[Pull], exchange: Stacked
) -> list[tuple[Tensor, Tensor]]:
    """What the policies ``rule.momentum`` and ``rule.statistics`` do after a round's pulls.

    Args:
        stack: whose rows they are; it is only read.
        rule: whose policies they are; without such fields everything is kept.
        pulls: of the round, in order.
        exchange: of the workers; what travels is sent through it.

    Returns:
        (rows of the stack, what they become) of everything that changes.
    """
    momentum = getattr(rule, "momentum", "keep")
    statistics = getattr(rule, "statistics", "own")
    count = exchange.workers
    changes: list[tuple[Tensor, Tensor]] = []
    if not pulls or count == 1:
        return changes
    if momentum in ("reset", "interpolate"):
        for slot in stack.slots.values():
            value = slot[:count]
            for pull in pulls:
                moved = torch.zeros(count, dtype=torch.bool)
                moved[list(pull.rows)] = True
                fraction = pull.fraction
                target = torch.zeros_like(value[:1])
                if momentum == "interpolate":
                    target = _target(value, pull, exchange)
                value = toward(
                    value, target, 1.0 if momentum == "reset" else fraction, exempt=~moved
                )
            changes.append((slot[:count], value))
    if statistics in ("leader", "mean"):
        for buffer in stack.buffers.values():
            if torch.is_floating_point(buffer):
                changes.append((buffer[:count], _statistics(buffer[:count], pulls, exchange)))
    return changes


def _statistics(rows: Tensor, pulls: Sequence[Pull], exchange: Stacked) -> Tensor:
    """The last pull's source's, whole: a part of a leader's statistics fits nobody's weights."""
    last = pulls[-1]
    flat = rows.reshape(len(rows), -1)
    target = _target(flat, last, exchange).expand_as(flat)
    moved = torch.zeros(len(rows), dtype=torch.bool)
    moved[list(last.rows)] = True
    return torch.where(moved.unsqueeze(1), target, flat).view_as(rows)


def _target(rows: Tensor, pull: Pull, exchange: Stacked) -> Tensor:
    if pull.sources is None:
        return exchange.mean(rows)
    return exchange.from_workers(rows, pull.sources)
