"""Optima over the batch: exponents, the ridge, the rising interpolation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import MOMENTUM_SPACE, Planted, Truth

from shoal.errors import UsageError
from shoal.study.optima import (
    Optimum,
    effective_lr,
    exponents,
    isotonic,
    monotone,
    optima,
    rules,
)
from shoal.study.search_summary import summarise

STUDY = Planted(
    truths={
        "sgd": Truth(lr_cap=1e9, width=0.7, luck=0.02),
        "heavy": Truth(lr_cap=1e9, width=0.7, luck=0.02, space=MOMENTUM_SPACE),
    },
    batches=(4, 16, 64),
    repeats=3,
)


@pytest.fixture(scope="module")
def summaries():
    return [summarise(d, STUDY.goals[0], STUDY.settings) for d in STUDY.tables()]


def test_planted_optima_and_exponents_are_recovered(summaries):
    found = {(o.curve, o.global_batch): o for o in optima(summaries)}
    assert set(found) == {(c, b) for c in STUDY.truths for b in STUDY.batches}
    for (_, batch), optimum in found.items():
        assert optimum.effective_lr == pytest.approx(0.02 * batch, rel=0.35)
        assert optimum.trials == 5 and len(optimum.winners) == 3
    for rows in exponents(summaries).values():
        slope = {e.parameter: e for e in rows}["effective_lr"]
        assert slope.value == pytest.approx(1.0, abs=0.15)
        assert slope.interval is not None and slope.interval.holds(slope.value)
        assert (slope.smallest, slope.largest, slope.winners) == (4, 64, 9)


def test_the_effective_lr_scatters_less_than_what_it_is_made_of(summaries):
    heavy = [s for s in summaries if s.key.curve == "heavy"]
    logs = np.array(
        [
            (
                math.log(s.winner.trial.parameters["lr"] / s.key.global_batch),
                math.log(effective_lr(s.winner.trial.parameters) / s.key.global_batch),
            )
            for s in heavy
            if s.winner is not None
        ]
    )
    assert logs[:, 1].std() < 0.5 * logs[:, 0].std()


def test_exponents_name_what_was_searched(summaries):
    found = exponents(summaries)
    assert [e.parameter for e in found["sgd"]] == ["effective_lr", "lr"]
    assert [e.parameter for e in found["heavy"]] == ["effective_lr", "lr", "one_minus_momentum"]
    part = exponents(summaries, largest=16)
    assert part["sgd"][0].largest == 16 and part["sgd"][0].winners == 6
    assert exponents(summaries, largest=4) == {}


def point(batch: int, value: float, trials: int = 5) -> Optimum:
    return Optimum(
        curve="sgd",
        global_batch=batch,
        winners=(),
        effective_lr=value,
        effective_lr_spread=0.1,
        lr=value,
        momentum=0.0,
        trials=trials,
    )


def test_interpolation_is_log_log_and_never_falls():
    curve = monotone([point(1, 0.1), point(4, 0.4), point(16, 0.3), point(64, 0.9)])
    assert curve.at(2) == pytest.approx(0.1 * (math.sqrt(0.12) / 0.1) ** 0.5)
    assert curve.at(4) == pytest.approx(math.sqrt(0.4 * 0.3)) == curve.at(16)
    assert curve.at(0.5) == pytest.approx(0.1) and curve.at(1000) == pytest.approx(0.9)
    assert curve.lr(64, momentum=0.9) == pytest.approx(0.09)
    values = [curve.at(b) for b in np.geomspace(0.5, 200, 60)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    with pytest.raises(UsageError):
        monotone([])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_isotonic_is_the_nearest_rising_sequence(values):
    from scipy.optimize import isotonic_regression

    found = isotonic(values, [1.0] * len(values))
    np.testing.assert_allclose(found, isotonic_regression(values).x, atol=1e-9)


def test_rules_start_at_the_smallest_batch():
    found = rules(point(4, 0.1), [4, 16, 64])
    assert found["linear"] == pytest.approx([0.1, 0.4, 1.6])
    assert found["square_root"] == pytest.approx([0.1, 0.2, 0.4])


def test_effective_lr_of_each_optimizer():
    assert effective_lr({"lr": 0.2}) == 0.2
    assert effective_lr({"lr": 0.2, "momentum": 0.5}) == pytest.approx(0.4)
    assert effective_lr({"lr": 0.2, "beta1": 0.9}) == 0.2
    assert effective_lr({"learning_rate": 0.01249, "momentum": 0.97882}) == pytest.approx(
        0.590, abs=1e-3
    )  # the released example trial
    with pytest.raises(UsageError, match="none is lr"):
        effective_lr({"momentum": 0.5})
