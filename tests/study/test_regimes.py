"""Borders from the fit, with intervals; the raw rules only as observed; the sentence that comes of it."""

from __future__ import annotations

import math

import pytest
from test_fit import POWERS, curve, made

from shoal.errors import UsageError
from shoal.study.finding import finding, number
from shoal.study.fit import fit_curve
from shoal.study.intervals import repeated_steps
from shoal.study.regimes import observed_least_from, observed_perfect_to, regimes


def found(rows):
    fit, cells = fit_curve(rows, resamples=0), repeated_steps(rows)
    borders = regimes(fit, cells)
    return borders, finding(borders, fit, cells)


def test_borders_follow_the_fit():
    rows = curve(POWERS, repeats=3, sd=0.02)
    fit = fit_curve(rows, resamples=0)
    borders, _ = found(rows)
    assert fit is not None and borders.perfect_to is not None
    assert borders.perfect_to.value == pytest.approx(1.2 * 1 + 0.2 * fit.b_crit.value)
    assert borders.perfect_to.interval.low == pytest.approx(1.2 + 0.2 * fit.b_crit.profile.low)
    assert borders.worth_to is not None
    assert borders.worth_to.value == pytest.approx(2 * fit.b_crit.value)
    assert borders.nothing_beyond is not None
    assert borders.nothing_beyond.value == pytest.approx(10 * fit.b_crit.value)
    assert borders.perfect_to.is_resolved_by_batches
    # The last doubling that saves a quarter of the steps, and 20 % more samples than at B0.
    assert fit.steps(2 * fit.b_crit.value) / fit.steps(fit.b_crit.value) == pytest.approx(0.75)
    edge = borders.perfect_to.value
    assert edge * fit.steps(edge) / fit.steps(1) == pytest.approx(1.2, rel=0.01)


def test_the_end_is_only_said_inside_what_was_measured():
    rows = curve(POWERS[:9], repeats=3, sd=0.02)  # to 256 = 4 B_crit
    borders, (lead, _) = found(rows)
    assert borders.nothing_beyond is not None and math.isinf(borders.nothing_beyond.value)
    assert "still falling at the largest batch, 256" in lead


def test_sparse_batches_do_not_resolve_a_border():
    rows = curve([1, 4, 16, 64, 256, 1024], repeats=3, sd=0.02)
    borders, (_, rest) = found(rows)
    assert borders.perfect_to is not None and not borders.perfect_to.is_resolved_by_batches
    assert "more than a factor 2 apart" in rest


def test_raw_rules():
    steps = {1: 100.0, 2: 50.0, 4: 29.0, 8: 16.0, 16: 11.0, 32: 10.2, 64: 10.0}
    assert observed_perfect_to(steps) == 4  # 8 * 16 = 128 > 1.2 * 100
    assert observed_least_from(steps) == 16  # exactly 1.1 times the least counts
    assert observed_least_from({1: 100.0, 2: 60.0}) is None
    assert observed_perfect_to({}) is None and observed_least_from({}) is None
    # A later batch within the rule does not mend an earlier one beyond it.
    assert observed_perfect_to({1: 100.0, 2: 70.0, 4: 26.0}) == 1


def test_the_sentence_is_the_one_to_act_on():
    rows = curve([2**k for k in range(13)], repeats=5, sd=0.03, b_crit=150)
    borders, (lead, rest) = found(rows)
    assert borders.perfect_to is not None
    assert lead == (
        f"Perfect scaling to {number(borders.perfect_to.value)}, worth having to "
        f"{number(borders.worth_to.value)}, nothing beyond {number(borders.nothing_beyond.value)}; "
        "measured with 5 searches per point."
    )
    assert 28 <= borders.perfect_to.value <= 34
    assert rest.startswith("95 % intervals: ")


def test_the_sentence_admits_what_is_not_resolved():
    borders, (lead, rest) = found(curve([1, 2, 4, 8, 16], repeats=3, sd=0.05))
    assert borders.perfect_to is None
    assert lead.startswith("Steps still fall at the largest measured batch, 16")
    assert "B_crit is not resolved: no measured batch lies above" in rest
    _, (lead, rest) = found(curve([64, 128, 256, 512], repeats=3, sd=0.05, b_crit=16))
    assert "past its perfect part at the smallest measured batch, 64" in lead
    assert "measure smaller batches" in rest
    _, (lead, rest) = found(curve([1, 1024], repeats=2, sd=0.05))
    assert "too few for a fit" in lead and "Three batches" in rest
    _, (lead, _) = found([made(b, 0, 900, end=500) for b in (1, 2, 4)])
    assert lead == "No search reached the goal within 500 steps."


def test_a_single_search_says_so_and_rough_intervals_say_so():
    _, (lead, rest) = found(curve(POWERS))
    assert "1 search per point" in lead
    assert "a single search per point" in rest
    noisy = curve([1, 16, 256, 1024], repeats=1, sd=0.5, seed=3)
    borders, (_, rest) = found(noisy)
    if borders.perfect_to is not None:
        assert "orders of magnitude" in rest
    else:
        assert "not resolved" in rest


def test_overlooked_batches_are_named():
    rows = [*curve(POWERS, repeats=2, sd=0.02), made(2, 2, 10**5, end=3000)]
    borders, _ = found(rows)
    assert borders.overlooked == (2,)


def test_regimes_are_of_one_curve():
    with pytest.raises(UsageError):
        regimes(None, [])


@pytest.mark.parametrize(
    ("value", "text"),
    [(31.2, "31"), (1487.0, "1,500"), (4.25, "4.2"), (1024, "1,024"), (99.6, "100")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
