"""The evaluation grid: one rule, every step where it can be, never further apart than the ratio."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.study.grid import Grid


def test_the_first_points() -> None:
    points = Grid().points(100)
    assert points[:41] == tuple(range(41))
    assert points[41:] == (
        *(42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 63, 66, 69, 72, 75, 78, 81, 85, 89, 93),
        97,
    )
    assert Grid(ratio=2.0).points(64) == (0, 1, 2, 4, 8, 16, 32, 64)
    assert len(Grid().points(1_000)) == 111
    assert len(Grid().points(10_000)) == 159


@given(ratio=st.floats(1.001, 2.0), limit=st.integers(0, 20_000))
def test_points_rise_and_lie_no_further_apart_than_the_ratio(ratio: float, limit: int) -> None:
    points = Grid(ratio=ratio).points(limit)
    assert points[0] == 0 and points[-1] <= limit
    for low, high in pairwise(points):
        assert low + 1 == high or low < high <= low * ratio * (1 + 1e-12)


@given(ratio=st.sampled_from([1.05, 1.04, 1.3]), a=st.integers(0, 9_000), b=st.integers(0, 9_000))
def test_points_do_not_depend_on_the_limit(ratio: float, a: int, b: int) -> None:
    low, high = sorted((a, b))
    longer = Grid(ratio=ratio).points(high)
    assert Grid(ratio=ratio).points(low) == tuple(p for p in longer if p <= low)


@given(step=st.integers(0, 50_000), stride=st.sampled_from([1, 2, 4]))
def test_neighbours(step: int, stride: int) -> None:
    grid = Grid(stride=stride)
    at, after = grid.floor(step), grid.next(step)
    assert at <= step < after
    assert grid.next(at) == after and grid.previous(after) == at
    assert at in grid and after in grid
    assert (step in grid) == (at == step)
    assert grid.previous(step + 1) == at


def test_before_the_first() -> None:
    assert Grid().next(-1) == 0
    assert -1 not in Grid()
    with pytest.raises(ValueError, match="begins at 0"):
        Grid().previous(0)


def test_every_second() -> None:
    grid = Grid()
    assert grid.every_second().points(500) == grid.points(500)[::2]
    assert grid.every_second().every_second().points(500) == grid.points(500)[::4]
    assert grid.every_second() == Grid(stride=2)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 2.1, math.nan, math.inf])
def test_a_ratio_outside(ratio: float) -> None:
    with pytest.raises(UsageError, match="ratio"):
        Grid(ratio=ratio)


def test_a_stride_outside() -> None:
    with pytest.raises(UsageError, match="stride"):
        Grid(stride=0)
