"""Schedules: known answers, bounds, warm-up with each, and lengths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.scaling import At, LearningRate, Unscaled, schedules
from shoal.scaling.schedules import Decay, Schedule

TOTAL = 6_400
MAKERS: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda warmup: schedules.constant(warmup_samples=warmup),
    "linear_decay": lambda warmup: schedules.linear_decay(warmup_samples=warmup, floor=0.25),
    "cosine": lambda warmup: schedules.cosine(warmup_samples=warmup, floor=0.25),
    "polynomial": lambda warmup: schedules.polynomial(warmup_samples=warmup, floor=0.25, power=3),
    "step": lambda warmup: schedules.step([3_200, 4_800], factor=0.5, warmup_samples=warmup),
}


@pytest.mark.parametrize("workers", [1, 4])
def test_case_cosine_over_6400_samples(workers: int) -> None:
    """cases.md, schedule: equal lr at sample 3,200 and the floor at the end, 1 or 4 workers."""
    rate = LearningRate(rule=Unscaled(), schedule=schedules.cosine(floor=0.1).resolve(TOTAL))
    global_batch = 8 * workers

    def lr(samples: int) -> float:
        at = At(
            step=samples // global_batch,
            samples=samples,
            global_batch=global_batch,
            momentum=0.9,
            epoch_samples=TOTAL,
        )
        return rate.before_step(rate.rule.init(at), at).lr(0.2)

    assert lr(0) == 0.2
    assert lr(3_200) == pytest.approx(0.2 * 0.55, rel=1e-15)
    assert lr(TOTAL) == 0.2 * 0.1


@pytest.mark.parametrize("name", MAKERS)
def test_warmup_composes_with_each(name: str) -> None:
    warm, cold = MAKERS[name](1_600).resolve(TOTAL), MAKERS[name](0).resolve(TOTAL)
    assert [warm(samples) for samples in (0, 400, 800, 1_200)] == [0.0, 0.25, 0.5, 0.75]
    assert warm(1_600) == cold(0) == 1.0
    assert warm(TOTAL) == cold(TOTAL)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=60, deadline=None)
@given(
    warmup=st.integers(0, TOTAL // 2),
    samples=st.lists(st.floats(0, 2 * TOTAL), min_size=2, max_size=30),
)
def test_factors_lie_in_0_1_and_never_rise_after_the_warmup(
    name: str, warmup: int, samples: list[float]
) -> None:
    schedule = MAKERS[name](warmup).resolve(TOTAL)
    values = [schedule(position) for position in sorted(samples)]
    assert all(0.0 <= value <= 1.0 for value in values)
    late = [schedule(position) for position in sorted(samples) if position >= warmup]
    assert all(right <= left + 1e-15 for left, right in pairwise(late))


def test_known_values() -> None:
    assert [schedules.linear_decay(total_samples=100)(at) for at in (0, 25, 100)] == [1, 0.75, 0]
    assert schedules.polynomial(total_samples=100)(50) == 0.25
    assert schedules.polynomial(power=1, total_samples=100)(30) == schedules.linear_decay(
        total_samples=100
    )(30)
    assert schedules.cosine(total_samples=100, floor=0.2)(50) == pytest.approx(0.6, rel=1e-15)
    assert schedules.cosine(total_samples=100)(25) == pytest.approx(0.853553390593, rel=1e-12)
    stepped = schedules.step([30, 60], factor=0.1)
    assert [stepped(at) for at in (0, 29.9, 30, 59, 60)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert [schedules.linear_warmup(4)(at) for at in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]


def test_by_name_makes_what_the_function_makes() -> None:
    assert schedules.by_name("cosine", warmup_samples=5) == schedules.cosine(warmup_samples=5)
    assert schedules.by_name("step", milestones_samples=[3]) == schedules.step([3])
    assert set(schedules.MAKERS) == {*MAKERS, "linear_warmup"}


def test_length_is_that_of_the_run_unless_given() -> None:
    assert schedules.cosine().resolve(100) == schedules.cosine(total_samples=100)
    given = schedules.cosine(total_samples=50)
    assert given.resolve(100) == given
    assert given(80) == 0.0


def test_a_length_that_is_not_known_yet_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"total_samples = None; schedules\.cosine .* resolve"):
        schedules.cosine()(10)


def test_a_schedule_of_ones_own_shape() -> None:
    kept = Decay(owner="mine", shape=lambda fraction: float(fraction < 0.5), total_samples=10)
    assert [kept(at) for at in (0, 4, 5, 10)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: schedules.cosine(warmup_samples=-1), "warmup_samples = -1"),
        (lambda: schedules.cosine(floor=1.5), "floor = 1.5"),
        (lambda: schedules.cosine(floor=float("nan")), "floor = nan"),
        (lambda: schedules.cosine(total_samples=0), "total_samples = 0"),
        (lambda: schedules.cosine(warmup_samples=50_000).resolve(6_400), "warmup_samples = 50000"),
        (lambda: schedules.polynomial(power=0), "power = 0"),
        (lambda: schedules.linear_warmup(0), "warmup_samples = 0"),
        (lambda: schedules.step([]), "milestones_samples = ()"),
        (lambda: schedules.step([20, 10]), "milestones_samples = (20, 10)"),
        (lambda: schedules.step([10, 10]), "milestones_samples = (10, 10)"),
        (lambda: schedules.step([10, 10], warmup_samples=10), "milestones_samples = (10, 10)"),
        (lambda: schedules.by_name("cosin"), "schedule = 'cosin'"),
        (lambda: schedules.by_name("cosine", power=2), "'power'"),
        (lambda: schedules.by_name("step", factor=0.1), "milestones_samples"),
        (lambda: schedules.step([10], warmup_samples=11), "milestones_samples = (10,)"),
        (lambda: schedules.step([10], factor=2), "factor = 2"),
    ],
)
def test_wrong_settings_are_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert named in str(caught.value)
