"""Every criterion on both sides of its threshold, with made-up values."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.reproduce.claims import Claim, Verdict
from shoal.reproduce.dynamic.criteria import (
    PairedRuns,
    QuadraticPeaks,
    judge_tier1,
    judge_tier2,
)

PEAKS = QuadraticPeaks(
    linear=7.99,
    ramp_8=2.86,
    ramp_8r=1.02,
    update_variance=210.4,
    drop=1.0,
    symmetric=12.6,
    ratio=16,
    momentum=0.9,
)


def by_id(claims: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in claims}


def test_all_of_tier_1_is_shown_by_the_reference_values() -> None:
    claims = judge_tier1(PEAKS)
    assert [claim.id for claim in claims] == ["T1", "T2", "T3", "T4", "T5", "T6"]
    assert {claim.verdict for claim in claims} == {Verdict.SHOWN}
    assert PEAKS.update_variance_expected == pytest.approx(210.4)


@pytest.mark.parametrize(
    ("claim", "field", "inside", "outside"),
    [
        ("T1", "linear", 7.0, 6.999),
        ("T2", "ramp_8", 2.0, 1.999),
        ("T2", "ramp_8", 3.5, 3.501),
        ("T3", "ramp_8r", 1.05, 1.0501),
        ("T4", "update_variance", 210.4 * 1.0199, 210.4 * 1.0201),
        ("T4", "update_variance", 210.4 * 0.9801, 210.4 * 0.9799),
        ("T5", "drop", 1.01, 1.0101),
        ("T6", "symmetric", 10.0, 9.999),
        ("T1", "linear", 7.0, float("nan")),
        ("T3", "ramp_8r", 1.0, float("nan")),
    ],
)
def test_tier_1_thresholds(claim: str, field: str, inside: float, outside: float) -> None:
    for value, verdict in ((inside, Verdict.SHOWN), (outside, Verdict.NOT_SHOWN)):
        claims = by_id(judge_tier1(replace(PEAKS, **{field: value})))
        assert claims[claim].verdict is verdict
        others = [other.verdict for id, other in claims.items() if id != claim]
        assert set(others) == {Verdict.SHOWN}


def full(value: float, seeds: int = 16) -> np.ndarray:
    return np.full(seeds, value)


def runs(seeds: int = 16, **changes: np.ndarray) -> PairedRuns:
    base = PairedRuns(
        seeds=tuple(range(100, 100 + seeds)),
        static=full(97.4, seeds),
        linear=full(95.9, seeds),
        dynamic=full(97.4, seeds),
        linear_spike=full(0.8, seeds),
        dynamic_spike=full(0.1, seeds),
        short_linear=full(90.0, seeds),
        short_none=full(50.0, seeds),
    )
    return replace(base, **changes)


def verdicts(given: PairedRuns) -> dict[str, Verdict]:
    return {claim.id: claim.verdict for claim in judge_tier2(given)}


ALL_SHOWN = dict.fromkeys(("D1", "D2", "D3", "D4"), Verdict.SHOWN)


def test_all_of_tier_2_can_be_shown() -> None:
    assert verdicts(runs()) == ALL_SHOWN
    assert all(claim.seeds == tuple(range(100, 116)) for claim in judge_tier2(runs()))


def test_kept_accuracy_allows_half_a_point() -> None:
    assert verdicts(runs(static=full(97.9)))["D1"] is Verdict.SHOWN
    assert verdicts(runs(static=full(97.91)))["D1"] is Verdict.NOT_SHOWN


def test_gap_needs_a_whole_point_on_the_mean() -> None:
    assert verdicts(runs(linear=full(96.4)))["D2"] is Verdict.SHOWN
    assert verdicts(runs(linear=full(96.41)))["D2"] is Verdict.NOT_SHOWN


@pytest.mark.parametrize(("better", "verdict"), [(12, Verdict.SHOWN), (11, Verdict.NOT_SHOWN)])
def test_gap_needs_twelve_better_seeds_and_a_tie_is_not_better(
    better: int, verdict: Verdict
) -> None:
    linear = full(97.4)
    linear[:better] = 90.0
    claim = by_id(judge_tier2(runs(linear=linear)))["D2"]
    assert claim.verdict is verdict
    assert isinstance(claim.value, dict)
    assert claim.value["seeds_better"] == better
    assert claim.value["seeds_tied"] == 16 - better
    assert claim.value["seeds_worse"] == 0


def test_many_better_seeds_do_not_make_up_for_a_small_mean() -> None:
    assert verdicts(runs(linear=full(97.3)))["D2"] is Verdict.NOT_SHOWN


def test_spike_must_be_half() -> None:
    assert verdicts(runs(dynamic_spike=full(0.4)))["D3"] is Verdict.SHOWN
    assert verdicts(runs(dynamic_spike=full(0.401)))["D3"] is Verdict.NOT_SHOWN


def test_a_diverged_spike_of_linear_counts_and_one_of_dynamic_fails() -> None:
    assert verdicts(runs(linear_spike=full(np.inf)))["D3"] is Verdict.SHOWN
    both = runs(linear_spike=full(np.inf), dynamic_spike=full(np.inf))
    assert verdicts(both)["D3"] is Verdict.NOT_SHOWN
    assert verdicts(runs(dynamic_spike=full(np.nan)))["D3"] is Verdict.NOT_SHOWN


def test_short_runs_need_twenty_points() -> None:
    assert verdicts(runs(short_none=full(70.0)))["D4"] is Verdict.SHOWN
    assert verdicts(runs(short_none=full(70.1)))["D4"] is Verdict.NOT_SHOWN


def test_few_seeds_leave_the_criteria_unjudged_and_get_names_of_their_own() -> None:
    found = verdicts(runs(seeds=4))
    assert {id for id, verdict in found.items() if verdict is Verdict.NOT_RUN} == set(ALL_SHOWN)
    assert {id for id, verdict in found.items() if verdict is Verdict.SHOWN} == {"Q1", "Q3", "Q4"}
    claims = by_id(judge_tier2(runs(seeds=4)))
    assert claims["D2"].value is None and claims["D2"].seeds == ()
    assert "4 seeds" in claims["Q1"].criterion and "16 seeds" not in claims["Q1"].criterion
    assert claims["Q3"].claim.startswith("Smoke test of D3")
    assert verdicts(runs(seeds=15))["D1"] is Verdict.NOT_RUN


def test_a_smoke_test_can_fail() -> None:
    poor = runs(seeds=4, dynamic=full(90.0, 4), dynamic_spike=full(0.7, 4))
    found = verdicts(poor)
    assert found["Q1"] is Verdict.NOT_SHOWN and found["Q3"] is Verdict.NOT_SHOWN
