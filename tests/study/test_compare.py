"""Three verdicts, the repeats a fourth would take, and no comparison of unequal searches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from test_fit import POWERS, curve, made

from shoal.errors import UsageError
from shoal.study.compare import (
    MARGIN,
    Verdict,
    compare_fits,
    compare_steps,
    judge,
    normalised,
    repeats_needed,
    require_equal_budgets,
)
from shoal.study.fit import fit_curve
from shoal.study.records import Budget, Goal, SearchKey
from shoal.study.search_summary import AnalysisSettings


def renamed(rows, name):
    return [
        replace(
            r,
            key=SearchKey(curve=name, global_batch=r.key.global_batch, repeat=r.key.repeat),
        )
        for r in rows
    ]


def pair(ratio: float, sd: float, repeats: int = 5, seed: int = 0):
    one = curve(POWERS, repeats=repeats, sd=sd, seed=seed, s_min=200 * ratio)
    two = renamed(curve(POWERS, repeats=repeats, sd=sd, seed=seed + 1), "nesterov")
    return one, two


def test_different_equivalent_not_resolved():
    verdicts = {
        ratio_sd: {c.verdict for c in compare_steps(*pair(*ratio_sd))}
        for ratio_sd in ((2.0, 0.1), (1.0, 0.02))
    }
    assert verdicts[(2.0, 0.1)] == {Verdict.DIFFERENT}
    assert Verdict.DIFFERENT not in verdicts[(1.0, 0.02)] or len(verdicts[(1.0, 0.02)]) > 1
    unclear = compare_steps(*pair(1.1, 0.3, repeats=2))
    assert all(c.verdict is not Verdict.EQUIVALENT for c in unclear)
    waiting = [c for c in unclear if c.verdict is Verdict.NOT_RESOLVED]
    assert waiting and all(c.repeats_needed is None or c.repeats_needed > 2 for c in waiting)
    assert any(c.repeats_needed for c in waiting)


def test_the_verdict_is_read_off_the_intervals():
    clear = judge("S", math.log(1.5), 0.05, 40)
    assert clear.verdict is Verdict.DIFFERENT and not clear.is_within_margin
    assert clear.interval is not None and clear.interval.low > 1
    small = judge("S", math.log(1.1), 0.02, 40)
    assert small.verdict is Verdict.DIFFERENT and small.is_within_margin
    same = judge("S", math.log(1.02), 0.05, 40)
    assert same.verdict is Verdict.EQUIVALENT
    assert same.narrow is not None
    assert same.narrow.low > 1 / MARGIN and same.narrow.high < MARGIN
    open_ = judge("S", math.log(1.02), 0.3, 40, sd=0.3)
    assert open_.verdict is Verdict.NOT_RESOLVED and open_.repeats_needed is not None


def test_the_repeats_it_says_are_enough_and_one_less_is_not():
    for difference, sd in ((0.0, 0.2), (0.2, 0.3), (0.1, 0.15)):
        needed = repeats_needed(difference, sd)
        assert needed is not None and needed > 2
        for repeats, settled in ((needed, True), (needed - 1, False)):
            error = sd * math.sqrt(2 / repeats)
            verdict = judge("S", difference, error, 2 * repeats - 2).verdict
            assert (verdict is not Verdict.NOT_RESOLVED) is settled
    assert repeats_needed(math.log(MARGIN), 10.0) is None


def test_verdicts_are_wrong_as_seldom_as_they_say():
    random = np.random.default_rng(1)
    false_different = false_equal = 0
    studies = 2000
    for _ in range(studies):
        for truth in (0.0, math.log(MARGIN)):
            a, b = truth + 0.1 * random.standard_normal(5), 0.1 * random.standard_normal(5)
            sd = math.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / 2)
            found = judge("S", float(a.mean() - b.mean()), sd * math.sqrt(2 / 5), 8)
            if truth == 0.0:
                false_different += found.verdict is Verdict.DIFFERENT
            else:
                false_equal += found.verdict is Verdict.EQUIVALENT
    assert abs(false_different / studies - 0.05) < 0.02
    assert false_equal / studies < 0.065


def test_unequal_budgets_are_refused():
    one, two = pair(1.0, 0.1)
    fewer = [replace(r, feasible=10) for r in two]
    with pytest.raises(UsageError, match=r"trials = \[10, 20\]"):
        compare_steps(one, fewer)
    goal = (Goal(metric="val/error", value=0.1),)
    base = AnalysisSettings(
        goals=goal, budget=Budget(feasible=20, draws=40, steps=100), grid=(0, 1)
    )
    require_equal_budgets(base, base)
    with pytest.raises(UsageError, match="trials = 20 and 40"):
        require_equal_budgets(base, replace(base, budget=Budget(feasible=40, draws=40, steps=100)))
    with pytest.raises(UsageError, match="max_steps"):
        require_equal_budgets(base, replace(base, budget=Budget(feasible=20, draws=40, steps=200)))
    with pytest.raises(UsageError, match="grid"):
        require_equal_budgets(base, replace(base, grid=(0, 2)))


def test_a_censored_side_has_no_verdict():
    one, two = pair(1.0, 0.05)
    two[0] = renamed([made(1, 0, 10**6, end=5000)], "nesterov")[0]
    rows = compare_steps(one, two)
    assert rows[0].verdict is Verdict.NOT_RESOLVED and rows[0].interval is None
    assert rows[0].note == "nesterov did not reach the goal in every search"
    assert rows[1].note == ""


def test_single_searches_have_a_ratio_and_no_verdict():
    one, two = pair(2.0, 0.0, repeats=1)
    rows = compare_steps(one, two)
    assert all(r.verdict is Verdict.NOT_RESOLVED and r.interval is None for r in rows)
    assert rows[0].ratio == pytest.approx(2.0, rel=0.06)


def test_fits_compare_and_normalise():
    one, two = pair(3.0, 0.05)
    first, second = fit_curve(one, resamples=0), fit_curve(two, resamples=0)
    assert first is not None and second is not None
    found = {c.what: c for c in compare_fits(first, second)}
    assert set(found) == {"E_min", "S_min", "B_crit"}
    assert found["E_min"].verdict is Verdict.DIFFERENT
    assert found["E_min"].ratio == pytest.approx(3, rel=0.1)
    assert found["B_crit"].verdict in (Verdict.EQUIVALENT, Verdict.NOT_RESOLVED)
    # After normalising, the small batches of both curves lie on 1/B.
    assert normalised(first, first.steps(1)) == pytest.approx(1 + 1 / first.b_crit.value)
    refused = fit_curve(curve([1, 2, 4, 8]), resamples=0)
    assert refused is not None
    assert [c.what for c in compare_fits(first, refused)] == ["E_min"]
