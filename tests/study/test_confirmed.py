"""S_conf beside S: the median over fresh seeds, misses and divergences included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planted import Planted, Truth

from shoal.study.confirmed import confirmed, median_interval
from shoal.study.curve_table import curve_table
from shoal.study.records import CONFIRM, Curve, Outcome, SearchKey
from shoal.study.search_summary import summarise
from shoal.study.tables import SearchData

STUDY = Planted(truths={"sgd": Truth(luck=0.3)}, batches=(8, 64), repeats=2)


def test_the_winners_setting_takes_longer_with_fresh_luck():
    tables = STUDY.tables()
    goal = STUDY.goals[0]
    rows = [summarise(d, goal, STUDY.settings) for d in tables]
    best = {
        b: min((r for r in rows if r.key.global_batch == b), key=lambda r: r.steps) for b in (8, 64)
    }
    again = [STUDY.confirmation(best[b].winner.trial, seeds=20) for b in (8, 64)]
    found = confirmed([*again, *tables], goal, rows)
    assert [(c.curve, c.global_batch) for c in found] == [("sgd", 8), ("sgd", 64)]
    for entry in found:
        row = best[entry.global_batch]
        assert entry.search_steps == row.steps
        assert entry.steps == np.median(entry.steps_of_seeds)
        assert entry.has_enough_seeds and entry.ratio > 1.1
        assert entry.interval is not None and entry.interval.holds(entry.steps)
    table = curve_table(rows, confirmations=found)
    with_confirmation = {(r.global_batch, r.repeat) for r in table if r.steps_confirmed is not None}
    assert with_confirmation == {(b, best[b].key.repeat) for b in (8, 64)}


def test_misses_and_divergences_are_longer_than_everything():
    key = SearchKey(curve="sgd", global_batch=8, repeat=0)
    winner = STUDY.trials(key)[0]
    data = STUDY.confirmation(winner, seeds=10)
    goal = STUDY.goals[0]
    curves = list(data.curves)
    outcomes = list(data.outcomes)
    for place in range(5):
        cut = Curve(evaluations=curves[place].evaluations[:2])
        curves[place], outcomes[place] = cut, Outcome.NOT_REACHED
    missed = SearchData(key=data.key, trials=data.trials, curves=curves, outcomes=outcomes)
    (entry,) = confirmed([missed], goal, [])
    assert entry.steps_of_seeds.count(None) == 5
    assert entry.steps is None and entry.ratio is None and entry.search_steps is None
    under_way = SearchData(
        key=data.key, trials=data.trials, curves=curves, outcomes=[None] * 5 + outcomes[5:]
    )
    (entry,) = confirmed([under_way], goal, [])
    assert len(entry.steps_of_seeds) == 5 and entry.steps is not None
    assert not entry.has_enough_seeds


def test_the_interval_of_a_median_covers():
    assert median_interval([1, 2, 3, 4, 5]) is None
    assert median_interval([1, 2, 3, 4, 5, 6]) == (1, 6)
    assert median_interval(list(range(1, 11))) == (2, 9)
    assert median_interval([*range(1, 10), None]) == (2, 9)
    low, high = median_interval([*range(1, 9), None, None])
    assert low == 2 and math.isinf(high)
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        interval = median_interval([int(s) for s in random.integers(1, 10**6, 15)])
        hits += interval.holds(500_000)
    assert hits >= 930


def test_searches_that_are_no_confirmation_are_passed_over():
    tables = STUDY.tables()
    assert confirmed(list(tables), STUDY.goals[0], []) == []
    with pytest.raises(ValueError, match="re-runs one setting"):
        key = SearchKey(curve="sgd", global_batch=8, repeat=CONFIRM)
        data = SearchData(key=key, trials=[], curves=[], outcomes=[])
        summarise(data, STUDY.goals[0], STUDY.settings)
