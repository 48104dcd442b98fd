"""Small tasks on which the conformance suite trains under a sync rule, and the loop that does."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import Any, Generic, TypeVar

import torch
from torch import Size, Tensor

from shoal.sync.contract import Event, Exchange, Outcome, Signals, SyncRule
from shoal.sync.stacked import Stacked
from shoal.sync.states import Counters

StateT = TypeVar("StateT", bound=Counters)

LAYOUT = (Size([6, 5]), Size([7]), Size([12, 4]))
"""Shapes of the parameters of the test problem."""

NUMBERS = sum(shape.numel() for shape in LAYOUT)
LR = 0.125


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What the workers train: a noisy quadratic each, loss h (x - c)^2 / 2 with its gradient's noise.

    A worker's noise depends on its rank and the step alone, never on who else is there.

    Args:
        dtype: of the weights.
        bad_losses: ranks whose reported loss is not a number.
        idle: ranks that never have samples.
        judged: whether followers can score what they receive.
    """

    dtype: torch.dtype = torch.float32
    bad_losses: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    judged: bool = True

    def start(self, workers: int) -> Tensor:
        """Different weights for each rank."""
        return torch.cat([self._draw(rank, -1) for rank in range(workers)]) * 2

    def losses(self, x: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Each row's loss."""
        return torch.stack([self._loss(row, rank) for row, rank in zip(x, ranks, strict=True)])

    def gradients(self, x: Tensor, ranks: tuple[int, ...], step: int) -> Tensor:
        """Each row's gradient with its noise; zero for a worker without samples."""
        rows = [
            torch.zeros_like(row)
            if rank in self.idle
            else self._curvature() * (row - 1.0) + self._draw(rank, step)[0] * 0.1
            for row, rank in zip(x, ranks, strict=True)
        ]
        return torch.stack(rows)

    def signals(self, x: Tensor, ranks: tuple[int, ...], lr: float) -> Signals:
        """What the workers know about a step that began at ``x``."""
        losses = self.losses(x, ranks)
        losses[[place for place, rank in enumerate(ranks) if rank in self.bad_losses]] = nan
        counts = torch.tensor([0 if rank in self.idle else 8 for rank in ranks])

        def judge(weights: Tensor) -> list[float]:
            return self.losses(weights, ranks).tolist()

        return Signals(
            lr=lr,
            losses=losses,
            counts=counts if self.idle else None,
            judge=judge if self.judged else None,
        )

    def _curvature(self) -> Tensor:
        return torch.linspace(0.25, 2.0, NUMBERS, dtype=self.dtype)

    def _loss(self, row: Tensor, rank: int) -> Tensor:
        if rank in self.idle:
            return torch.tensor(nan, dtype=torch.float64)
        return (self._curvature() * (row - 1.0).square()).double().sum() / 2

    def _draw(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * (step + 1) + rank)
        return torch.randn((1, NUMBERS), generator=generator).to(self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place(Generic[StateT]):
    """Where a run stands."""

    x: Tensor
    state: StateT
    step: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """What one step did: the weights after it, whether it ended in a round, and its events."""

    x: Tensor
    is_round: bool
    events: tuple[Event, ...] = field(default=())


def begin(rule: SyncRule[StateT], task: Task, exchange: Exchange) -> Place[StateT]:
    """The place at which a run begins: the local rows of the starting weights."""
    x = task.start(exchange.workers)[list(exchange.ranks)]
    return Place(x=x, state=rule.init(x, exchange, LAYOUT))


def step(
    rule: SyncRule[StateT], task: Task, exchange: Exchange, place: Place[StateT], lr: float = LR
) -> tuple[Place[StateT], Outcome[StateT]]:
    """One step of plain SGD under the rule, as a driver makes it."""
    at, state = rule.before_step(place.state, place.x)
    gradients = task.gradients(at, exchange.ranks, place.step)
    signals = task.signals(at, exchange.ranks, lr)
    gradients, state = rule.reduce_gradients(state, gradients, exchange, signals)
    outcome = rule.after_step(state, at - gradients * lr, exchange, signals)
    return Place(x=outcome.x, state=outcome.state, step=place.step + 1), outcome


def walk(
    rule: SyncRule[StateT], task: Task, exchange: Exchange, place: Place[StateT], steps: int
) -> tuple[list[Row], Place[StateT]]:
    """Several steps.

    Returns:
        (one row per step, the place after the last).
    """
    rows: list[Row] = []
    for _ in range(steps):
        place, outcome = step(rule, task, exchange, place)
        rows.append(Row(x=outcome.x, is_round=outcome.is_round, events=outcome.events))
    return rows, place


def run(
    rule: SyncRule[StateT], *, workers: int, steps: int, task: Task | None = None
) -> tuple[list[Row], Place[StateT], Stacked]:
    """A whole run on stacked workers.

    Returns:
        (one row per step, the place after the last, the exchange).
    """
    task = task or Task()
    exchange = Stacked(workers)
    rows, place = walk(rule, task, exchange, begin(rule, task, exchange), steps)
    return rows, place, exchange


def integer_trace(rule: SyncRule[Any], *, workers: int, steps: int) -> list[list[float]]:
    """Weights of a model of three numbers whose gradients are small whole numbers.

    At learning rate 1, worker r's gradient in step t is (r + 1, (t + r) mod 3 - 1, x_2 - r), and its loss
    |x_2 - r| + (t + r) mod workers. With powers of two as the rule's fractions, every number is exact.

    Args:
        rule: the rule.
        workers: how many.
        steps: how many.

    Returns:
        After each step the weights of all workers, row after row.
    """
    exchange = Stacked(workers)
    ranks = torch.arange(workers, dtype=torch.float64)
    x = torch.zeros((workers, 3), dtype=torch.float64)
    state = rule.init(x, exchange)
    trace: list[list[float]] = []
    for number in range(steps):
        x, state = rule.before_step(state, x)
        turns = (number + ranks) % 3 - 1
        gradients = torch.stack([ranks + 1, turns, x[:, 2] - ranks], dim=1)
        losses = (x[:, 2] - ranks).abs() + (number + ranks) % workers
        signals = Signals(lr=1.0, losses=losses, judge=lambda weights: weights.sum(dim=1).tolist())
        gradients, state = rule.reduce_gradients(state, gradients, exchange, signals)
        outcome = rule.after_step(state, x - gradients, exchange, signals)
        x, state = outcome.x, outcome.state
        trace.append(x.flatten().tolist())
    return trace
