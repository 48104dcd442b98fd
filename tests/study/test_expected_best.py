"""The expected best of n by enumeration, its error by deleting searches, S from fewer trials exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from brute_force import steps as brute_steps
from hypothesis import given
from hypothesis import strategies as st
from planted import METRIC, Planted, Truth

from shoal.errors import UsageError
from shoal.study.expected_best import (
    BudgetStep,
    best_of_n,
    best_weights,
    budget_sensitivity,
    expected_best,
    still_falls,
)
from shoal.study.search_summary import summarise

STUDY = Planted(truths={"sgd": Truth(luck=0.3, width=2.5)}, batches=(8,), repeats=4)


@given(st.lists(st.floats(0, 9), min_size=2, max_size=8), st.data())
def test_it_is_the_mean_over_all_subsets(values, data):
    count = data.draw(st.integers(1, len(values) // 2))
    subsets = itertools.combinations(values, count)
    mean = np.mean([min(s) for s in subsets])
    assert best_of_n(values, count) == pytest.approx(mean, abs=1e-9)


def test_weights_are_a_distribution_and_n_is_at_most_half():
    for total, count in ((100, 50), (40, 20), (3, 1)):
        weights = best_weights(total, count)
        assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
    with pytest.raises(UsageError, match="from 1 to N/2 = 2"):
        best_of_n([1.0] * 5, 3)


def test_errors_are_those_of_whole_searches():
    rows = [summarise(d, STUDY.goals[0], STUDY.settings) for d in STUDY.tables()]
    found = {e.trials: e for e in expected_best(rows, [1, 5, 10, 20])}
    assert set(found) == {1, 5, 10}, "20 of 20 is the minimum itself"
    assert found[5].steps > found[10].steps
    logs = []
    for row in rows:
        crossings = [t.crossing for t in row.trials if t.is_feasible]
        logs.append(
            best_of_n([math.log(c if c is not None else row.end + 1) for c in crossings], 10)
        )
    assert found[10].steps == pytest.approx(math.exp(np.mean(logs)))
    # Deleting one search at a time: sqrt((R - 1)/R sum (theta_(-r) - mean)^2).
    left = [np.mean([v for j, v in enumerate(logs) if j != i]) for i in range(len(logs))]
    jackknife = math.sqrt((len(logs) - 1) / len(logs) * np.sum((left - np.mean(left)) ** 2))
    assert found[10].error == pytest.approx(jackknife)
    fewest = min(sum(t.has_crossed for t in row.trials if t.is_feasible) for row in rows)
    for count, entry in found.items():
        # The largest value that can be the least of n is the (N - n + 1)-th.
        assert entry.is_bound is (fewest < 20 - count + 1)
    assert found[1].is_bound


@pytest.mark.parametrize("count", [10, 20])
def test_fewer_trials_give_the_search_that_would_have_been(count):
    grid = STUDY.grid
    for data in STUDY.tables():
        found = {
            r.trials: r.steps
            for r in budget_sensitivity(data, STUDY.goals[0], STUDY.settings, [10, 20, 50])
        }
        assert set(found) == {10, 20}
        curves = [
            [(e.step, e.metrics[METRIC].value, e.diverged) for e in c.evaluations]
            for c in data.curves
        ]
        assert data.end is not None
        inside = [g for g in grid if g <= data.end]
        kind, steps, _ = brute_steps(curves, lambda v: v < 0.1, count, inside)
        assert found[count] == (steps if kind == "reached" else None)


def rows(*pairs):
    return [
        BudgetStep(key=f"s{i}", trials=n, steps=s)
        for i, pair in enumerate(pairs)
        for n, s in zip((50, 100), pair, strict=True)
    ]


def test_it_warns_while_more_trials_still_help():
    assert still_falls(rows((120, 100), (115, 100)))
    assert not still_falls(rows((105, 100), (100, 100)))
    assert still_falls(rows((None, 100)))
    assert not still_falls(rows((None, None)))
