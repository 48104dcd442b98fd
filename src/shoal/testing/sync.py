"""A conformance suite for sync rules: hand it your own rule before you train with it.

    from shoal.testing.sync import check_rule

    @pytest.mark.parametrize("workers", [1, 2, 3, 8])
    def test_my_rule(workers: int) -> None:
        check_rule(MyRule(sync_every=4), workers=workers)

It trains small quadratics under the rule, with plain SGD, and holds the rule to the contract in
``shoal.sync.contract``. Each check is also callable on its own. A rule is checked at a period of a few steps:
give it a short one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from math import nan
from typing import Any, Generic, TypeVar

import torch
from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.sync.contract import Event, Exchange, Outcome, Signals, SyncRule
from shoal.sync.stacked import Stacked
from shoal.sync.states import Counters, reseat
from shoal.testing.lockstep import in_lockstep

StateT = TypeVar("StateT", bound=Counters)

LAYOUT = (Size([6, 5]), Size([7]), Size([12, 4]))
"""Shapes of the parameters of the test problem."""

NUMBERS = sum(shape.numel() for shape in LAYOUT)
LR = 0.125

FORMULAS: dict[str, Callable[[Any, int, int, int], int]] = {
    "independent": lambda rule, p, size, steps: 0,
    "lookahead": lambda rule, p, size, steps: 0,
    "allreduce": lambda rule, p, size, steps: steps * 2 * (p - 1) * size,
    "leader": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * ((p - 1) * size * (rule.pull > 0) + 12 * p * (p - 1))
    ),
    "local_sgd": lambda rule, p, size, steps: (
        (min(steps, rule.warmup_steps) + max(0, steps - rule.warmup_steps) // rule.sync_every)
        * 2
        * (p - 1)
        * size
    ),
    "easgd": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * 2 * (p - 1 if rule.synchronous else p) * size
    ),
    "eamsgd": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * p * size,
    "downpour": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * (2 * p if p > 1 else 1) * size
    ),
    "slowmo": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "bmuf": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "diloco": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "sgp": lambda rule, p, size, steps: (
        (steps // rule.sync_every)
        * p
        * (size + size // NUMBERS)
        * min(rule.peers, (p - 1).bit_length())
    ),
    "powersgd": lambda rule, p, size, steps: (
        min(steps, rule.warmup_steps) * 2 * (p - 1) * size
        + max(0, steps - rule.warmup_steps) * 2 * (p - 1) * _thin(rule) * (size // NUMBERS)
    ),
}
"""Payload bytes of ``steps`` steps with p workers and N bytes of weights, by the name of the rule; steps a
multiple of the period, one group."""


def _thin(rule: Any) -> int:
    """Numbers that PowerSGD sends for ``LAYOUT``: the factors of what it compresses, the rest as it is."""
    total = 0
    for shape in LAYOUT:
        a, b = shape[0], shape.numel() // shape[0]
        is_thin = len(shape) > 1 and rule.rank * (a + b) * rule.min_compression < a * b
        total += rule.rank * (a + b) if is_thin else shape.numel()
    return total


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


def span(rule: SyncRule[Any]) -> int:
    """Steps that hold three rounds of the rule, or eight steps of a rule without."""
    return 3 * (rule.period or 1) + 5


def same_values(left: Any, right: Any) -> bool:
    """Whether two states hold the same numbers, bit for bit."""
    return all(
        _same(getattr(left, entry.name), getattr(right, entry.name)) for entry in fields(left)
    )


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def _require(holds: bool, rule: SyncRule[Any], message: str) -> None:
    if not holds:
        raise AssertionError(f"rule {rule.name!r}: {message}")


def check_declarations(rule: SyncRule[Any]) -> None:
    """Name, what it comes to alone, period and state are what the contract says."""
    _require(bool(rule.name), rule, "name is empty; it names the rule in events and errors")
    _require(
        bool(rule.alone), rule, "alone is empty; it says what the rule comes to with one worker"
    )
    period = rule.period
    _require(
        period is None or (isinstance(period, int) and period >= 1),
        rule,
        f"period = {period!r}; it must be None or a whole number >= 1",
    )
    event = rule.degenerates(1, step=3)
    _require(
        event is not None and event.values.get("comes_to") == rule.alone,
        rule,
        "with one worker degenerates() must give an event that says what the rule comes to",
    )
    _require(rule.degenerates(2, step=3) is None, rule, "degenerates() speaks with two workers")


def check_alone(rule: SyncRule[Any]) -> None:
    """With one worker it is plain SGD bit for bit, if it says so; it works in any case."""
    task, exchange = Task(), Stacked(1)
    rows, _, _ = run(rule, workers=1, steps=span(rule))
    x = task.start(1)
    for number, row in enumerate(rows):
        _require(bool(torch.isfinite(row.x).all()), rule, f"not finite after step {number}, alone")
        x = x - task.gradients(x, exchange.ranks, number) * LR
        if rule.is_plain_alone:
            _require(
                torch.equal(row.x, x), rule, f"alone it is not plain SGD, first in step {number}"
            )


def check_purity(rule: SyncRule[StateT], workers: int) -> None:
    """Asking twice gives the same answer, and nothing that was given is written to."""
    task, exchange = Task(), Stacked(workers)
    place = begin(rule, task, exchange)
    for _ in range(span(rule)):
        before = deepcopy((place.x, place.state))
        twin = deepcopy(exchange)
        following, _ = step(rule, task, exchange, place)
        again, _ = step(rule, task, twin, place)
        _require(
            torch.equal(before[0], place.x) and same_values(before[1], place.state),
            rule,
            f"step {place.step} has written into the weights or the state it was given",
        )
        _require(
            torch.equal(following.x, again.x) and same_values(following.state, again.state),
            rule,
            f"step {place.step}, asked twice, gives different answers",
        )
        place = following


def check_resume(rule: SyncRule[StateT], workers: int) -> None:
    """A state saved after any step, also in mid-period, and loaded goes on bit for bit alike."""
    task, exchange = Task(), Stacked(workers)
    expected, _, _ = run(rule, workers=workers, steps=span(rule))
    place = begin(rule, task, exchange)
    for number, row in enumerate(expected):
        file = io.BytesIO()
        torch.save(rule.state_dict(place.state), file)
        file.seek(0)
        loaded = rule.load_state_dict(torch.load(file, weights_only=True))
        _require(
            same_values(loaded, place.state),
            rule,
            f"the state before step {number} came back changed",
        )
        place, outcome = step(rule, task, exchange, replace(place, state=loaded))
        _require(
            outcome.is_round == row.is_round,
            rule,
            f"step {number}: {'a' if row.is_round else 'no'} round, but not so after a restart",
        )
        _require(
            torch.equal(outcome.x, row.x), rule, f"step {number} differs after a restart before it"
        )


def check_foreign_state(rule: SyncRule[Any]) -> None:
    """The state of another rule, or of another version, is refused with a ValueError."""
    exchange = Stacked(1)
    values = rule.state_dict(begin(rule, Task(), exchange).state)
    for changed in ({"rule": "another"}, {"format": -1}, {"no_rule_has_this_field": 1}):
        try:
            rule.load_state_dict({**values, **changed})
        except ValueError:
            continue
        _require(False, rule, f"load_state_dict accepted a state with {changed}")


def check_counter(rule: SyncRule[Any], workers: int) -> None:
    """One count per optimizer step: rounds come at multiples of the period and nowhere else."""
    rows, place, _ = run(rule, workers=workers, steps=span(rule))
    _require(
        place.state.steps == len(rows), rule, f"{len(rows)} steps counted as {place.state.steps}"
    )
    if rule.period is None:
        return
    rounds = [number + 1 for number, row in enumerate(rows) if row.is_round]
    if workers == 1 and not rounds:
        return
    begins = getattr(rule, "warmup_steps", 0)
    due = [n for n in range(1, len(rows) + 1) if n > begins and (n - begins) % rule.period == 0]
    _require(rounds == due, rule, f"rounds after steps {rounds}; they are due after {due}")


def check_one_row_each(rule: SyncRule[Any], workers: int, *, tolerance: float = 0.0) -> None:
    """Workers that hold their own row only come to the same weights as stacked ones.

    Args:
        rule: the rule.
        workers: how many.
        tolerance: relative; above 0 for rules with matrix products, which round by their shape.
    """
    expected, _, _ = run(rule, workers=workers, steps=span(rule))
    task = Task()

    def work(exchange: Exchange) -> list[Tensor]:
        rows, _ = walk(rule, task, exchange, begin(rule, task, exchange), span(rule))
        return [row.x for row in rows]

    found = in_lockstep(workers, work)
    for number, row in enumerate(expected):
        together = torch.cat([worker[number] for worker in found])
        _require(
            torch.allclose(together, row.x, rtol=tolerance, atol=tolerance),
            rule,
            f"step {number}: workers with one row each get other weights than stacked ones; the rule "
            "looks at rows that are not its own",
        )


def check_bad_scores(rule: SyncRule[Any], workers: int) -> None:
    """A worker whose loss is not a number does not spoil the weights of others."""
    if workers < 2:
        return
    rows, _, _ = run(rule, workers=workers, steps=span(rule), task=Task(bad_losses=frozenset({0})))
    _require(
        bool(torch.isfinite(rows[-1].x).all()),
        rule,
        "weights are not finite after one worker reported a loss that is not a number",
    )


def check_no_samples(rule: SyncRule[Any], workers: int) -> None:
    """A worker that never has samples hangs nobody, spoils nothing, and never leads."""
    if workers < 2:
        return
    idle = workers - 1
    rows, _, _ = run(rule, workers=workers, steps=span(rule), task=Task(idle=frozenset({idle})))
    _require(
        bool(torch.isfinite(rows[-1].x).all()), rule, "weights are not finite with an idle worker"
    )
    leaders = [event.values.get("leader") for row in rows for event in row.events]
    _require(idle not in leaders, rule, "a worker without samples led a round")


def check_joins(rule: SyncRule[StateT], workers: int) -> None:
    """Workers come and go in mid-period: counts go on, weights stay finite, nothing else changes.

    Newcomers begin with rank 0's weights. The server keeps its variable.
    """
    task, exchange = Task(), Stacked(workers)
    place = begin(rule, task, exchange)
    _, place = walk(rule, task, exchange, place, (rule.period or 1) + 1)
    for now in (workers + 1, 1, 3, workers):
        before = place.x.shape[0]
        joined = tuple(range(before, now))
        rows = [rank if rank < before else 0 for rank in range(now)]
        state = reseat(place.state, rows, joined=joined)
        _require(
            (state.steps, state.since) == (place.state.steps, place.state.since),
            rule,
            f"counts changed when the workers went from {before} to {now}",
        )
        following = Stacked(now)
        following.adopt(exchange)
        exchange = following
        x, state = rule.welcome(state, place.x[rows], joined, exchange)
        stayed = min(before, now)
        _require(
            torch.equal(x[:stayed], place.x[:stayed]), rule, "a join moved workers that were there"
        )
        place = replace(place, x=x, state=state)
        done = place.step
        _, place = walk(rule, task, exchange, place, span(rule))
        _require(place.x.shape == (now, NUMBERS), rule, f"not {now} rows with {now} workers")
        _require(bool(torch.isfinite(place.x).all()), rule, f"not finite with {now} workers")
        _require(place.state.steps == done + span(rule), rule, "steps were lost in a join")


def check_bytes(
    rule: SyncRule[Any],
    workers: int,
    formula: Callable[[Any, int, int, int], int] | None = None,
) -> None:
    """What travels is what the formula says, to the byte.

    Args:
        rule: the rule.
        workers: p.
        formula: (rule, p, N in bytes, steps) to bytes; None: that of ``FORMULAS``, if there is one.
    """
    formula = formula or FORMULAS.get(rule.name)
    if formula is None:
        return
    task, exchange = Task(), Stacked(workers)
    place = begin(rule, task, exchange)
    at_start = exchange.traffic.total_bytes()
    steps = 4 * (rule.period or 1) * getattr(rule, "fragments", 1)
    steps += getattr(rule, "warmup_steps", 0)
    walk(rule, task, exchange, place, steps)
    found = exchange.traffic.total_bytes() - at_start
    expected = formula(rule, workers, 4 * NUMBERS, steps)
    _require(
        found == expected,
        rule,
        f"{found} bytes in {steps} steps of {workers} workers; the formula says {expected}",
    )


def check_rule(rule: SyncRule[Any], *, workers: int, tolerance: float = 0.0) -> None:
    """Hold a sync rule to the contract.

    Args:
        rule: the rule, ready to use, with a short period.
        workers: number of stacked workers, >= 1.
        tolerance: of :func:`check_one_row_each`.

    Raises:
        AssertionError: the first point that does not hold, with the values.
    """
    check_declarations(rule)
    check_foreign_state(rule)
    if workers == 1:
        check_alone(rule)
    check_purity(rule, workers)
    check_resume(rule, workers)
    check_counter(rule, workers)
    check_bad_scores(rule, workers)
    check_no_samples(rule, workers)
    check_joins(rule, workers)
    check_bytes(rule, workers)
    check_one_row_each(rule, workers, tolerance=tolerance)


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


def check_trace(
    rule: SyncRule[Any],
    *,
    workers: int,
    steps: int,
    golden: Mapping[str, list[list[float]]],
    key: str,
) -> None:
    """The integer trace is the stored one, bit for bit.

    Raises:
        AssertionError: the first step that differs.
        UsageError: no trace is stored under ``key``.
    """
    if key not in golden:
        raise UsageError(
            f"golden trace {key!r}; none is stored under this name; rewrite the traces"
        )
    found = integer_trace(rule, workers=workers, steps=steps)
    for number, (row, expected) in enumerate(zip(found, golden[key], strict=True)):
        _require(row == expected, rule, f"{key}: step {number} gives {row}; stored is {expected}")
