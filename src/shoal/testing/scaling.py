"""A conformance suite for scaling rules: hand it your own rule before you train with it.

    from shoal.testing.scaling import check_rule

    def test_my_rule() -> None:
        check_rule(MyRule(reference_batch=64))

It drives the rule through random scripts of joins, leaves and failed steps, as a fleet would, and
holds it to the contract in ``shoal.scaling.contract``. Each check is also callable on its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Generic, TypeVar

from shoal.scaling.contract import At, GradientNoise, Rule

StateT = TypeVar("StateT")

KINDS = frozenset({"sgd", "heavy_ball", "nesterov", "adam", "adamw", "any"})
EPOCH_SAMPLES = 1000
SETTLE_STEPS = 4096
"""A ramp must end within this many steps for ratios up to 16."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One attempted step: the nominal global batch, and whether the fleet committed the step."""

    global_batch: int
    is_committed: bool = True


@dataclass(frozen=True, kw_only=True)
class Row(Generic[StateT]):
    """What a rule said before one attempted step; ``state`` is the advanced one."""

    at: At
    state: StateT
    multiplier: float
    target: float
    ramp_end: int | None
    progress: float
    momentum_factor: float

    def numbers(self) -> tuple[float, float, int | None, float, float]:
        """Everything but the state and the moment."""
        return (
            self.multiplier,
            self.target,
            self.ramp_end,
            self.progress,
            self.momentum_factor,
        )


@dataclass(frozen=True, kw_only=True)
class Place(Generic[StateT]):
    """Where a walk stands: the rule's committed state, and steps and samples committed."""

    state: StateT
    step: int = 0
    samples: int = 0


def moment(step: int, samples: int, global_batch: int, momentum: float = 0.9) -> At:
    """The ``At`` of a run whose epochs have ``EPOCH_SAMPLES`` samples."""
    return At(
        step=step,
        samples=samples,
        global_batch=global_batch,
        momentum=momentum,
        epoch_samples=EPOCH_SAMPLES,
    )


def noise_of(at: At) -> GradientNoise:
    """Made-up but fixed sums for the step at ``at``, with one to four pieces."""
    draw = Random(at.step)
    pieces = 1 + at.step % 4
    mean_square = 0.5 + draw.random()
    spread = draw.random() * (pieces - 1)
    return GradientNoise(
        weighted_squares=at.global_batch * mean_square + spread,
        pieces=pieces,
        samples=at.global_batch,
        mean_square=mean_square,
    )


def begin(rule: Rule[StateT], global_batch: int) -> Place[StateT]:
    """The place at which a run with ``global_batch`` begins."""
    return Place(state=rule.init(moment(0, 0, global_batch)))


def walk(
    rule: Rule[StateT], place: Place[StateT], script: Sequence[Tick]
) -> tuple[list[Row[StateT]], Place[StateT]]:
    """Drive ``rule`` through ``script`` as a fleet does.

    Args:
        rule: the rule.
        place: where to begin.
        script: the attempted steps, in order.

    Returns:
        (one row per attempted step, the place after the last).
    """
    rows: list[Row[StateT]] = []
    for tick in script:
        at = moment(place.step, place.samples, tick.global_batch)
        state = rule.advance(place.state, at)
        rows.append(
            Row(
                at=at,
                state=state,
                multiplier=rule.multiplier(state, at),
                target=rule.target(state, at),
                ramp_end=rule.ramp_end(state, at),
                progress=rule.progress(state, at),
                momentum_factor=rule.momentum_factor(state, at),
            )
        )
        if tick.is_committed:
            place = Place(
                state=rule.commit(state, at, noise_of(at) if rule.needs_noise else None),
                step=place.step + 1,
                samples=place.samples + tick.global_batch,
            )
    return rows, place


def random_script(rule: Rule[StateT], seed: int, steps: int = 120) -> list[Tick]:
    """A script of ``steps`` attempts with global batches from 1/16 to 16 reference batches.

    The batch stays for 1 to 40 steps at a time, so that changes fall into ramps as well as after
    them; one step in ten fails, some of them with a batch that no committed step has.
    """
    draw = Random(seed)
    reference = rule.reference_batch
    batches = sorted({max(1, reference * top // 16) for top in (1, 4, 8, 16, 24, 32, 64, 128, 256)})
    script: list[Tick] = []
    while len(script) < steps:
        batch = draw.choice(batches)
        for _ in range(draw.choice((1, 2, 3, 8, 40))):
            if draw.random() < 0.1:
                script.append(Tick(global_batch=draw.choice(batches), is_committed=False))
            script.append(Tick(global_batch=batch))
    return script[:steps]


def _require(holds: bool, rule: Rule[StateT], message: str) -> None:
    if not holds:
        raise AssertionError(f"rule {rule.name!r}: {message}")


def check_declarations(rule: Rule[StateT]) -> None:
    """Name, reference batch, optimizers and tested ratio are what the contract says."""
    _require(bool(rule.name), rule, "name is empty; it names the rule in events and errors")
    _require(
        isinstance(rule.reference_batch, int) and rule.reference_batch >= 1,
        rule,
        f"reference_batch = {rule.reference_batch!r}; it must be a whole number >= 1",
    )
    _require(
        bool(rule.optimizers) and rule.optimizers <= KINDS,
        rule,
        f"optimizers = {sorted(rule.optimizers)}; they must be some of {sorted(KINDS)}",
    )
    _require(rule.tested_ratio >= 1, rule, f"tested_ratio = {rule.tested_ratio}; it must be >= 1")


def check_start(rule: Rule[StateT]) -> None:
    """A run begins at the target, at any batch, unless the rule announces a warm-up by ramp_end."""
    for batch in (1, rule.reference_batch, 16 * rule.reference_batch):
        (row,), _ = walk(rule, begin(rule, batch), [Tick(global_batch=batch)])
        _require(
            row.ramp_end is not None or row.multiplier == row.target,
            rule,
            f"begins with multiplier {row.multiplier!r} at global batch {batch}, no ramp pending; "
            f"it must be the target {row.target!r}",
        )


def check_values(rule: Rule[StateT], seed: int) -> None:
    """Multipliers are positive, progress never falls, buffers are scaled only at a change."""
    script = random_script(rule, seed)
    rows, _ = walk(rule, begin(rule, script[0].global_batch), script)
    progress, committed_batch = 0.0, script[0].global_batch
    for row, tick in zip(rows, script, strict=True):
        for field in ("multiplier", "target", "momentum_factor"):
            value = getattr(row, field)
            _require(
                isfinite(value) and value > 0,
                rule,
                f"{field} = {value!r} at {row.at}; it must be finite and > 0",
            )
        _require(
            isfinite(row.progress) and row.progress >= progress,
            rule,
            f"progress fell from {progress!r} to {row.progress!r} at {row.at}",
        )
        _require(
            tick.global_batch != committed_batch or row.momentum_factor == 1.0,
            rule,
            f"momentum_factor = {row.momentum_factor!r} at {row.at}, without a change of batch",
        )
        _require(
            row.ramp_end is None or row.ramp_end > row.at.step,
            rule,
            f"ramp_end = {row.ramp_end} at step {row.at.step}; a pending ramp ends in the future",
        )
        progress = row.progress
        if tick.is_committed:
            committed_batch = tick.global_batch


def check_purity(rule: Rule[StateT], seed: int) -> None:
    """Asking twice gives the same answer and changes nothing; so does advancing twice."""
    script = random_script(rule, seed)
    place = begin(rule, script[0].global_batch)
    for tick in script:
        before = json.dumps(rule.to_dict(place.state))
        first, after = walk(rule, place, [tick])
        second, _ = walk(rule, place, [tick])
        _require(
            first == second, rule, f"asked twice at {first[0].at}: {first[0]}, then {second[0]}"
        )
        _require(
            json.dumps(rule.to_dict(place.state)) == before,
            rule,
            f"the state was changed in place at {first[0].at}; states are frozen",
        )
        again = rule.advance(first[0].state, first[0].at)
        _require(
            again == first[0].state,
            rule,
            f"advance(advance(state)) is {again} at {first[0].at}, advance(state) {first[0].state}",
        )
        place = after


def check_failed_steps(rule: Rule[StateT], seed: int) -> None:
    """A step that was not committed leaves no trace."""
    script = random_script(rule, seed)
    kept = [tick for tick in script if tick.is_committed]
    start = begin(rule, script[0].global_batch)
    all_rows, with_failures = walk(rule, start, script)
    rows, without = walk(rule, start, kept)
    committed = [row for row, tick in zip(all_rows, script, strict=True) if tick.is_committed]
    for left, right in zip(committed, rows, strict=True):
        _require(
            left == right,
            rule,
            f"with failed steps between: {left}; without them: {right}",
        )
    _require(with_failures == without, rule, "failed steps changed the final state")


def check_resume(rule: Rule[StateT], seed: int) -> None:
    """A state written as JSON and read back is the same, and the run goes on bit for bit alike."""
    script = random_script(rule, seed)
    place = begin(rule, script[0].global_batch)
    rows, _ = walk(rule, place, script)
    for tick, expected in zip(script, rows, strict=True):
        for state in (place.state, expected.state):
            text = json.dumps(rule.to_dict(state))
            restored = rule.from_dict(json.loads(text))
            _require(
                restored == state and json.dumps(rule.to_dict(restored)) == text,
                rule,
                f"{state} came back from to_dict as {restored}",
            )
        resumed = Place(
            state=rule.from_dict(json.loads(json.dumps(rule.to_dict(place.state)))),
            step=place.step,
            samples=place.samples,
        )
        (row,), place = walk(rule, resumed, [tick])
        _require(
            row.numbers() == expected.numbers(),
            rule,
            f"resumed at {row.at}: {row.numbers()}; without a restart: {expected.numbers()}",
        )


def check_ramps(rule: Rule[StateT], seed: int) -> None:
    """After the last change the ramp ends where announced, exactly at the target, and stays."""
    script = random_script(rule, seed)
    batch = script[-1].global_batch
    _, place = walk(rule, begin(rule, script[0].global_batch), script)
    first_rows, place = walk(rule, place, [Tick(global_batch=batch)])
    end = first_rows[0].ramp_end
    _require(
        end is None or end - place.step < SETTLE_STEPS,
        rule,
        f"a ramp announced at {first_rows[0].at} ends at step {end}, "
        f"more than {SETTLE_STEPS} steps later",
    )
    length = 8 if end is None else end - place.step + 8
    rows, _ = walk(rule, place, [Tick(global_batch=batch)] * length)
    for row in first_rows + rows:
        is_pending = end is not None and row.at.step < end
        _require(
            row.ramp_end == (end if is_pending else None),
            rule,
            f"ramp_end = {row.ramp_end} at step {row.at.step}; it was announced as {end}",
        )
        _require(
            is_pending or row.multiplier == row.target,
            rule,
            f"multiplier {row.multiplier!r} at step {row.at.step}, after the ramp; "
            f"it must be bit for bit the target {row.target!r}",
        )


def check_history(rule: Rule[StateT], seed: int) -> None:
    """Once ramps have ended the multiplier depends on the batch alone (rules without noise)."""
    if rule.needs_noise:
        return
    found: dict[int, float] = {}
    for offset in range(3):
        script = random_script(rule, seed + 1000 * (offset + 1), steps=40)
        _, place = walk(rule, begin(rule, script[0].global_batch), script)
        for batch in (rule.reference_batch, 4 * rule.reference_batch):
            settle = [Tick(global_batch=batch)]
            rows, place = walk(rule, place, settle)
            steps = 1
            while rows[-1].ramp_end is not None:
                rows, place = walk(rule, place, settle)
                steps += 1
                _require(steps < SETTLE_STEPS, rule, f"a ramp at global batch {batch} never ends")
            value = rows[-1].multiplier
            _require(
                found.setdefault(batch, value) == value,
                rule,
                f"settled at global batch {batch} with multiplier {value!r}, "
                f"and by another history with {found[batch]!r}",
            )


def check_foreign_state(rule: Rule[StateT]) -> None:
    """The state of another rule is refused with a ValueError."""
    try:
        rule.from_dict({"no_rule_has_this_field": 1.0})
    except ValueError:
        return
    _require(False, rule, "from_dict accepted the state of another rule; it must be a ValueError")


def check_rule(rule: Rule[StateT], *, seeds: int = 5) -> None:
    """Hold a scaling rule to the contract.

    Args:
        rule: the rule, ready to use.
        seeds: number of random scripts, >= 1.

    Raises:
        AssertionError: the first point that does not hold, with the values.
    """
    check_declarations(rule)
    check_start(rule)
    check_foreign_state(rule)
    by_seed: tuple[Callable[[Rule[StateT], int], None], ...] = (
        check_values,
        check_purity,
        check_failed_steps,
        check_resume,
        check_ramps,
        check_history,
    )
    for seed in range(seeds):
        for check in by_seed:
            check(rule, seed)
