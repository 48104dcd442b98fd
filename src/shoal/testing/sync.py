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
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.sync.contract import Exchange, SyncRule
from shoal.sync.stacked import Stacked
from shoal.sync.states import reseat
from shoal.testing.lockstep import in_lockstep
from shoal.testing.sync_formulas import FORMULAS
from shoal.testing.sync_task import (
    LR,
    NUMBERS,
    Place,
    StateT,
    Task,
    begin,
    integer_trace,
    run,
    step,
    walk,
)


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


def check_early_round(rule: SyncRule[StateT], workers: int) -> None:
    """A driver may hold a round whenever it likes, as the total-count trigger does; the count begins anew."""
    task, exchange = Task(), Stacked(workers)
    _, place = walk(rule, task, exchange, begin(rule, task, exchange), (rule.period or 1) + 1)
    for _ in range(3):
        at, state = rule.before_step(place.state, place.x)
        signals = task.signals(at, exchange.ranks, LR)
        gradients = task.gradients(at, exchange.ranks, place.step)
        gradients, state = rule.reduce_gradients(state, gradients, exchange, signals)
        state = rule.observe(state, signals)
        outcome = rule.exchange_round(state, at - gradients * LR, exchange, signals)
        _require(bool(torch.isfinite(outcome.x).all()), rule, "not finite after an early round")
        _require(
            rule.period is None or outcome.state.since == 0,
            rule,
            f"since = {outcome.state.since} after an early round; it begins anew",
        )
        _require(outcome.state.steps == place.step + 1, rule, "an early round lost count of steps")
        place = Place(x=outcome.x, state=outcome.state, step=place.step + 1)


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
    check_early_round(rule, workers)
    check_bad_scores(rule, workers)
    check_no_samples(rule, workers)
    check_joins(rule, workers)
    check_bytes(rule, workers)
    check_one_row_each(rule, workers, tolerance=tolerance)


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
