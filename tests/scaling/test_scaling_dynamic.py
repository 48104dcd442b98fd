"""Dynamic: the paper's numbers, the choices around eq. 6, random scripts against a replay."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.scaling import Dynamic, noise_matched_steps
from shoal.testing.scaling import Place, Tick, begin, moment, walk


def multipliers(rule: Dynamic, start: int, script: list[int]) -> list[float]:
    rows, _ = walk(rule, begin(rule, start), [Tick(global_batch=batch) for batch in script])
    return [row.multiplier for row in rows]


def test_vectors_of_k_4_and_length_8() -> None:
    values = multipliers(Dynamic(reference_batch=8, ramp_steps=8), 8, [32] * 20)
    assert [values[offset] for offset in (0, 1, 4, 7, 8)] == [1, 1.375, 2.5, 3.625, 4]
    assert values[8:] == [4.0] * 12


def test_vectors_of_k_16_and_length_128() -> None:
    for rule in (Dynamic(reference_batch=8), Dynamic(reference_batch=8, ramp_steps=128)):
        values = multipliers(rule, 8, [128] * 140)
        assert [values[offset] for offset in (0, 32, 64, 128)] == [1, 4.75, 8.5, 16]
        assert values[127] == pytest.approx(15.8828, abs=5e-5)
        assert values[128:] == [16.0] * 12


def test_case_ramp_as_learning_rates() -> None:
    """cases.md, ramp: lr .1 -> .4, change at t0, length 8."""
    values = multipliers(Dynamic(reference_batch=8, ramp_steps=8), 8, [8] * 5 + [32] * 9)
    assert [0.1 * value for value in values[:5]] == [0.1] * 5
    rates = [0.1 * values[5 + offset] for offset in (0, 1, 4, 7, 8)]
    assert rates == pytest.approx([0.1, 0.1375, 0.25, 0.3625, 0.4], rel=1e-15)


def test_case_multiplier_of_workers_4_2_8_4() -> None:
    """cases.md, multiplier: bit-equal at both fours, and starting at 2 then 4 == starting at 4."""
    rule = Dynamic(reference_batch=24)  # local 8: multipliers are thirds, not exact in binary
    script = [batch for workers in (4, 2, 8, 4) for batch in [8 * workers] * 100]
    values = multipliers(rule, 32, script)
    assert values[99] == values[-1] == 32 / 24
    assert multipliers(rule, 16, [16] * 3 + [32] * 100)[-1] == multipliers(rule, 32, [32])[-1]


@pytest.mark.parametrize(("k", "steps"), [(2, 11), (4, 17), (8, 21), (16, 24)])
def test_auto_length_table(k: int, steps: int) -> None:
    assert noise_matched_steps(k, 0.9) == steps
    rule = Dynamic(reference_batch=8, ramp_steps="auto")
    assert rule.advance(rule.init(moment(0, 0, 8)), moment(3, 24, 8 * k)).length == steps


def test_auto_length_without_momentum_or_growth_is_zero() -> None:
    assert [noise_matched_steps(*pair) for pair in ((16, 0.0), (1.05, 0.9), (0.5, 0.9))] == [0] * 3
    rule = Dynamic(reference_batch=8, ramp_steps="auto")
    state = rule.advance(rule.init(moment(0, 0, 8)), moment(3, 24, 128, momentum=0.0))
    assert rule.multiplier(state, moment(3, 24, 128)) == 16.0


@pytest.mark.parametrize(
    ("reference", "before", "after"), [(10, 1, 3), (10, 1, 7), (10, 2, 6), (49, 7, 21), (3, 1, 31)]
)
def test_length_8r_is_the_exact_ceiling(reference: int, before: int, after: int) -> None:
    rule = Dynamic(reference_batch=reference)
    state = rule.advance(rule.init(moment(0, 0, before)), moment(1, before, after))
    assert state.length == ceil(Fraction(8 * after, before))


def test_shrinking_drops_at_once_by_default() -> None:
    assert multipliers(Dynamic(reference_batch=8), 128, [128, 8, 8]) == [16.0, 1.0, 1.0]


def test_literal_equation_downwards() -> None:
    fixed = Dynamic(reference_batch=8, ramp_steps=128, down="ramp")
    values = multipliers(fixed, 128, [8] * 130)
    assert [values[offset] for offset in (0, 32, 64, 96, 128)] == [16, 12.25, 8.5, 4.75, 1]
    by_ratio = Dynamic(reference_batch=8, down="ramp")  # ceil(8 / 16) = 1: one step at the old rate
    assert multipliers(by_ratio, 128, [8] * 3) == [16.0, 1.0, 1.0]
    assert multipliers(by_ratio, 128, [96] * 7) == pytest.approx(
        [16 - 4 * offset / 6 for offset in range(7)]
    )


def test_a_change_during_a_ramp_anchors_anew() -> None:
    rule = Dynamic(reference_batch=8)
    values = multipliers(rule, 8, [32] * 16 + [64] * 40)
    assert values[16] == 2.5  # continuous: the old ramp's value at its step 16
    length = ceil(8 * 8 / 2.5)
    assert values[17] == pytest.approx(2.5 + 5.5 / length, rel=1e-15)
    assert values[16 + length - 1] < 8.0
    assert values[16 + length] == 8.0


def test_a_change_back_during_a_ramp_drops_at_once() -> None:
    assert multipliers(Dynamic(reference_batch=8), 8, [32] * 16 + [8] * 2)[-2:] == [1.0, 1.0]


def test_growth_that_is_overtaken_ramps_up_from_where_it_stands() -> None:
    """16x was announced, 8x comes: still above the present multiplier, so it is a ramp up."""
    rule = Dynamic(reference_batch=8)
    values = multipliers(rule, 8, [128] * 32 + [64] * 20)
    assert values[32] == 4.75
    assert values[32 + ceil(8 * 8 / 4.75)] == 8.0


def test_a_change_in_an_uncommitted_step_starts_no_ramp() -> None:
    rule = Dynamic(reference_batch=8)
    rows, _ = walk(
        rule,
        begin(rule, 8),
        [Tick(global_batch=8), Tick(global_batch=32, is_committed=False), Tick(global_batch=8)],
    )
    assert [row.multiplier for row in rows] == [1.0, 1.0, 1.0]
    assert [row.ramp_end for row in rows] == [None, 33, None]


# An independent replay: at each change the whole future is written down, in fractions.


def replay(rule: Dynamic, start: int, script: list[int]) -> list[Fraction]:
    plan: list[Fraction] = []
    batch, target = start, Fraction(start, rule.reference_batch)
    told: list[Fraction] = []
    for now in script:
        if now != batch:
            present = plan[0] if plan else target
            batch, target = now, Fraction(now, rule.reference_batch)
            length = ceil(8 * target / present) if rule.ramp_steps == "8r" else int(rule.ramp_steps)
            if target == present or (target < present and rule.down == "at_once"):
                length = 0
            plan = [present + Fraction(s, length) * (target - present) for s in range(length)]
        told.append(plan.pop(0) if plan else target)
    return told


scripts = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 40)), min_size=1, max_size=12).map(
    lambda parts: [batch for batch, steps in parts for _ in range(steps)]
)
rules = st.builds(
    Dynamic,
    reference_batch=st.integers(1, 40),
    ramp_steps=st.one_of(st.just("8r"), st.integers(0, 50)),
    down=st.sampled_from(["at_once", "ramp"]),
)


@settings(max_examples=150, deadline=None)
@given(rule=rules, start=st.integers(1, 64), script=scripts)
def test_random_scripts_agree_with_the_replay(rule: Dynamic, start: int, script: list[int]) -> None:
    told = multipliers(rule, start, script)
    expected = replay(rule, start, script)
    assert told == pytest.approx([float(value) for value in expected], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(rule=rules, start=st.integers(1, 64), script=scripts, data=st.data())
def test_kill_and_resume_anywhere_gives_the_same_rates(
    rule: Dynamic, start: int, script: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(script)))
    ticks = [Tick(global_batch=batch) for batch in script]
    whole, _ = walk(rule, begin(rule, start), ticks)
    head, place = walk(rule, begin(rule, start), ticks[:cut])
    other = Dynamic(
        reference_batch=rule.reference_batch, ramp_steps=rule.ramp_steps, down=rule.down
    )
    restored = Place(
        state=other.from_dict(rule.to_dict(place.state)), step=place.step, samples=place.samples
    )
    tail, _ = walk(other, restored, ticks[cut:])
    assert [row.numbers() for row in head + tail] == [row.numbers() for row in whole]


@settings(max_examples=100, deadline=None)
@given(rule=rules, start=st.integers(1, 64), script=scripts)
def test_rates_stay_between_old_and_new(rule: Dynamic, start: int, script: list[int]) -> None:
    ever = {start, *script}
    low, high = min(ever) / rule.reference_batch, max(ever) / rule.reference_batch
    assert all(low <= value <= high for value in multipliers(rule, start, script))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"reference_batch": 0}, "reference_batch = 0"),
        ({"reference_batch": 2.5}, "reference_batch = 2.5"),
        ({"reference_batch": True}, "reference_batch = True"),
        ({"reference_batch": 8, "ramp_steps": -1}, "ramp_steps = -1"),
        ({"reference_batch": 8, "ramp_steps": "8k"}, "ramp_steps = '8k'"),
        ({"reference_batch": 8, "ramp_steps": 8.0}, "ramp_steps = 8.0"),
        ({"reference_batch": 8, "down": "slowly"}, "down = 'slowly'"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        Dynamic(**wrong)  # type: ignore[arg-type]
    assert named in str(caught.value)
    assert "Dynamic" in str(caught.value)
