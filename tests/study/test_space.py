"""Search spaces: the paper's transforms, their inverses, and ranges that are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.study.space import Discrete, Integer, Linear, Log, ReverseLog, Scale, Space

CONTINUOUS = [
    Linear(min=-2.0, max=3.0),
    Log(min=1e-4, max=10.0),
    ReverseLog(min=0.9, max=0.9999),
    ReverseLog(min=0.0, max=0.99),
]
WHOLE = [
    Integer(min=300_000, max=600_000),
    Integer(min=0, max=1),
    Integer(min=30, max=60_000, log=True),
]
ALMOST_ONE = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize(
    ("scale", "u", "value"),
    [
        (Linear(min=-2.0, max=3.0), 0.5, 0.5),
        (Log(min=1e-4, max=10.0), 0.4, 1e-2),
        (Log(min=1e-4, max=10.0), 0.0, 1e-4),
        # 1 - v is log-uniform from 0.1 to 0.0001: in the middle 10 ** -2.5.
        (ReverseLog(min=0.9, max=0.9999), 0.5, 1 - 10**-2.5),
        (ReverseLog(min=0.9, max=0.9999), 0.0, 0.9),
        (Integer(min=3, max=6), 0.24999, 3),
        (Integer(min=3, max=6), 0.25, 4),
        (Integer(min=3, max=6), ALMOST_ONE, 6),
        (Integer(min=1, max=7, log=True), 1 / 3 - 1e-9, 1),
        (Integer(min=1, max=7, log=True), 1 / 3 + 1e-9, 2),
        (Discrete(values=(0.0, 0.01, 0.1)), 0.3333, 0.0),
        (Discrete(values=(0.0, 0.01, 0.1)), 0.3334, 0.01),
        (Discrete(values=(0.0, 0.01, 0.1)), ALMOST_ONE, 0.1),
    ],
)
def test_transforms(scale: Scale, u: float, value: float) -> None:
    assert scale.value(u) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("scale", CONTINUOUS, ids=repr)
@given(u=st.floats(0, ALMOST_ONE))
def test_unit_is_the_inverse(scale: Scale, u: float) -> None:
    assert scale.unit(scale.value(u)) == pytest.approx(u, abs=1e-9)


@pytest.mark.parametrize("scale", [*CONTINUOUS, *WHOLE], ids=repr)
@given(a=st.floats(0, 1), b=st.floats(0, 1))
def test_values_rise_with_u_and_stay_inside(scale: Scale, a: float, b: float) -> None:
    low, high = scale.value(min(a, b)), scale.value(max(a, b))
    assert scale.min <= low <= high <= scale.max


@pytest.mark.parametrize("scale", [Integer(min=2, max=9), Integer(min=2, max=90, log=True)])
def test_every_whole_number_can_be_drawn_and_has_its_unit(scale: Integer) -> None:
    for value in range(scale.min, scale.max + 1):
        assert scale.value(scale.unit(value)) == value


def test_integers_are_uniform_with_both_ends() -> None:
    scale = Integer(min=0, max=3)
    drawn = [scale.value((k + 0.5) / 4000) for k in range(4000)]
    assert [drawn.count(v) for v in range(4)] == [1000] * 4


@pytest.mark.parametrize("scale", CONTINUOUS, ids=repr)
def test_a_window_moves_a_range_in_its_own_units(scale: Scale) -> None:
    moved = scale.window(0.25, 0.75)
    assert moved.min == pytest.approx(scale.value(0.25))
    assert moved.max == pytest.approx(scale.value(0.75))
    assert scale.window(0.0, 1.0).max == pytest.approx(scale.max)


def test_a_window_one_decade_beyond() -> None:
    lr = Log(min=1e-3, max=1.0)
    assert lr.window(0.0, 1 + lr.decade).max == pytest.approx(10.0)
    momentum = ReverseLog(min=0.5, max=0.99)
    assert momentum.window(0.0, 1 + momentum.decade).max == pytest.approx(0.999)
    assert momentum.window(-momentum.decade, 1.0).min == 0.0
    assert Integer(min=10, max=99, log=True).window(-1, 1) == Integer(min=1, max=99, log=True)


@pytest.mark.parametrize("scale", [Linear, Log, ReverseLog, Integer])
@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.9, 0.1)])
def test_a_range_needs_min_below_max(scale: type[Linear], low: float, high: float) -> None:
    low, high = (10 * low, 10 * high) if scale is Integer else (low, high)  # pyright: ignore
    with pytest.raises(UsageError, match=r"min = .*needs min < max"):
        scale(min=low, max=high)


@pytest.mark.parametrize("scale", [Linear, Log, ReverseLog, Integer])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ends_are_finite(scale: type[Linear], bad: float) -> None:
    with pytest.raises(UsageError, match="finite"):
        scale(min=bad, max=0.5)
    with pytest.raises(UsageError, match="finite"):
        scale(min=0, max=bad)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Log(min=0.0, max=1.0), "a log range is positive"),
        (lambda: ReverseLog(min=0.9, max=1.0), "ends below 1"),
        (lambda: ReverseLog(min=0.9, max=1.5), "ends below 1"),
        (lambda: Integer(min=1.5, max=3), "whole ends"),  # pyright: ignore
        (lambda: Integer(min=0, max=3, log=True), "positive"),
        (lambda: Discrete(values=()), "at least one"),
        (lambda: Discrete(values=(0.1, 0.1)), "twice"),
        (lambda: Discrete(values=(0.1, math.nan)), "finite"),
        (lambda: Space({}), "a search tunes something"),
        (lambda: Space({"momentum": Linear(min=0.5, max=1.0)}), "momentum must stay below 1"),
        (lambda: Space({"momentum": Discrete(values=(0.9, 1.0))}), "momentum must stay below 1"),
        (lambda: Space({"beta1": Linear(min=0.5, max=1.2)}), "beta1 must stay below 1"),
        (lambda: Space({"momentum": Linear(min=-0.1, max=0.5)}), "momentum is at least 0"),
        (lambda: Space({"lr": Linear(min=0.0, max=1.0)}), "lr is above 0"),
        (lambda: Space({"decay_steps": Log(min=0.5, max=9.0)}), "decay_steps is at least 1"),
    ],
)
def test_refused(make: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()  # pyright: ignore


@pytest.mark.parametrize("u", [-1e-9, 1.1, math.nan])
def test_a_coordinate_outside_is_refused(u: float) -> None:
    for scale in (*CONTINUOUS, *WHOLE, Discrete(values=(1.0,))):
        with pytest.raises(ValueError, match="unit coordinate"):
            scale.value(u)


def test_the_order_of_a_space_is_part_of_it() -> None:
    lr, momentum = Log(min=1e-3, max=1.0), ReverseLog(min=0.0, max=0.99)
    space = Space({"lr": lr, "momentum": momentum})
    assert space.parameters((0.0, 0.5)) == {"lr": 1e-3, "momentum": momentum.value(0.5)}
    assert space.unit({"momentum": 0.0, "lr": 1.0, "weight_decay": 3.0}) == pytest.approx((1, 0))
    assert space != Space({"momentum": momentum, "lr": lr})
    with pytest.raises(ValueError, match="zip"):
        space.parameters((0.5,))
