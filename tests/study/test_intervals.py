"""Intervals over repeated searches: nominal coverage, and silence where nothing can be known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_fit import made

from shoal.errors import UsageError
from shoal.study.intervals import PooledSpread, mean_interval, pooled_spread, repeated_steps
from shoal.study.records import Goal
from shoal.study.search_summary import SearchSummary


def test_a_t_interval_covers_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits, studies = 0, 2000
    for _ in range(studies):
        interval = mean_interval(math.log(100) + 0.25 * random.standard_normal(5))
        assert interval is not None
        hits += interval.holds(100)
    assert abs(hits / studies - 0.95) < 0.015


def test_known_numbers():
    interval = mean_interval([math.log(80), math.log(100), math.log(125)])
    assert interval is not None
    assert interval.low * interval.high == pytest.approx(100**2)
    # t(0.975, 2) = 4.3027, sd of the logs = ln 1.25.
    assert interval.high == pytest.approx(100 * 1.25 ** (4.302653 / math.sqrt(3)), rel=1e-6)


def test_few_repeats():
    assert mean_interval([4.0]) is None
    assert mean_interval([4.0, 4.1]) is None
    pooled = PooledSpread(0.2, 8)
    interval = mean_interval([4.0, 4.1], pooled=pooled)
    assert interval is not None
    assert math.log(interval.high / interval.low) / 2 == pytest.approx(2.306004 * 0.2 / 2**0.5)
    assert mean_interval([4.0], pooled=pooled) is None


def test_pooling_weighs_by_degrees_of_freedom():
    spread = pooled_spread([[0.0, 2.0], [1.0, 1.0, 4.0], [7.0]])
    assert spread is not None and spread.freedom == 3
    assert spread.sd == pytest.approx(math.sqrt((2.0 + 6.0) / 3))
    assert pooled_spread([[1.0], [2.0]]) is None


def test_two_repeats_borrow_the_spread_of_other_batches():
    rows = [
        made(b, r, s)
        for b, s in ((1, 1000), (2, 600), (4, 300))
        for r in (0, 1)
        for s in (s + 40 * r,)
    ]
    cells = repeated_steps(rows)
    assert [c.global_batch for c in cells] == [1, 2, 4]
    assert all(c.is_pooled and c.interval is not None for c in cells)
    alone = repeated_steps(rows[:2])[0]
    assert alone.interval is None and "no other batch" in alone.why_not
    single = repeated_steps(rows[:1])[0]
    assert single.interval is None and single.why_not == "one search alone has no interval"
    assert single.centre == pytest.approx(single.lowest) and single.lowest == single.highest


def test_censored_searches_are_shown_and_never_averaged():
    rows = [made(8, r, s, end=500) for r, s in enumerate([300, 320, 340, 700])]
    cell = repeated_steps(rows)[0]
    assert cell.censored_at == (500,) and len(cell.steps) == 3
    assert cell.interval is None and cell.why_not == "1 of 4 searches did not reach the goal"
    assert cell.lowest == cell.steps[0] and cell.highest == math.inf
    # The median of 4 of which one is beyond everything: between the second and the third.
    assert cell.centre == pytest.approx(math.sqrt(cell.steps[1] * cell.steps[2]))
    mostly_missed = repeated_steps([made(8, r, s, end=500) for r, s in enumerate([300, 700, 800])])[
        0
    ]
    assert mostly_missed.centre is None and mostly_missed.lowest is not None
    missed = repeated_steps([made(8, r, 900, end=500) for r in range(3)])[0]
    assert missed.centre is None and missed.lowest is None and missed.highest == math.inf
    assert missed.why_not == "3 of 3 searches did not reach the goal"


def test_repeats_on_one_grid_point_are_not_taken_for_equal():
    rows = [made(8, r, 300.0) for r in range(3)]
    cell = repeated_steps(rows)[0]
    assert len(set(cell.steps)) == 1 and cell.interval is not None
    width = math.log(rows[0].steps / rows[0].previous)
    half = math.log(cell.interval.high / cell.interval.low) / 2
    assert half == pytest.approx(4.302653 * width / math.sqrt(12) / math.sqrt(3), rel=1e-6)


def test_void_searches_are_left_out_by_name():
    rows = [made(8, r, 300 + 10 * r) for r in range(4)]
    cell = repeated_steps(rows, void=[rows[2].key])[0]
    assert cell.left_out == ("sgd-b8-r2",) and len(cell.steps) == 3


def test_one_goal_at_a_time():
    first = made(8, 0, 300)
    other = SearchSummary(
        key=first.key,
        result=type(first.result)(
            goal=Goal(metric="val/cross_entropy_error", value=1.0),
            reach=first.result.reach,
            steps=9,
            end=9,
            draws=20,
            feasible=20,
        ),
        feasible=20,
        end=9,
        trials=(),
    )
    with pytest.raises(UsageError, match="several goals"):
        repeated_steps([first, other])
