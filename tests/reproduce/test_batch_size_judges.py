"""The judges of the batch-size claims on studies with planted truth, and on numbers by hand."""

import dataclasses
import math

import pytest

from shoal.reproduce.batch_size import criteria, digits, full, paper, quadratic
from shoal.reproduce.batch_size.studies import GOALS, Measured, digits_spec, recentred, steps_of
from shoal.reproduce.claims import Claim, Verdict
from shoal.study import Budget, Grid, Log, Space, StudySpec
from shoal.study.analysis import StudyAnalysis
from shoal.workloads.quadratic_study import Optimum
from shoal.workloads.synthetic_curves import SyntheticCurves
from workloads.synthetic_study import analysed

SGD = SyntheticCurves(smallest_steps=100, fewest_samples=3200, goal=0.06, luck=0.1)
HEAVY = dataclasses.replace(SGD, smallest_steps=25, largest_rate=4.0)
BATCHES = (1, 2, 4, 16, 64, 256, 1024)


def planted_spec(**changes: object) -> StudySpec:
    """The digits study with planted curves: 2.5 x the error is what stands for cross entropy."""
    values: dict[str, object] = {
        "workload": SGD.workload(),
        "workload_parameters": {},
        "global_batches": BATCHES,
        "budget": Budget(feasible=15, draws=40, steps=6_000, kappa=1.2),
        "grid": Grid(ratio=1.07),
    }
    return dataclasses.replace(digits_spec(repeats=2), **(values | changes))  # type: ignore[arg-type]


def planted(heavy: SyntheticCurves = HEAVY, **changes: object) -> StudyAnalysis:
    return analysed(planted_spec(**changes), {"sgd": SGD, "heavy_ball": heavy, "nesterov": heavy})


@pytest.fixture(scope="module")
def analysis() -> StudyAnalysis:
    return planted()


def by_id(claims: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in claims}


def test_planted_regimes_are_shown(analysis: StudyAnalysis) -> None:
    claims = by_id(digits.judge_digits(analysis, (1811,), ()))
    shown = {name for name, claim in claims.items() if claim.verdict is Verdict.SHOWN}
    assert shown >= {"P3", "P4", "P6", "P8", "P10"}
    assert claims["P3"].value["slope 64 to 1024"] > -0.3  # type: ignore[index]
    assert claims["P6"].value["B_crit ratio"] == pytest.approx(4, rel=0.25)  # type: ignore[index]
    assert claims["P5"].verdict is Verdict.SHOWN
    assert claims["P5"].value["ratio"] == pytest.approx(28 / 103, rel=0.15)  # type: ignore[index]
    smoke = by_id(digits.judge_quick(analysis, (3,)))
    assert smoke["Q3"].verdict is Verdict.SHOWN and smoke["Q5"].verdict is Verdict.SHOWN
    # The planted rate is linear to B = 50, then constant; the plateau begins at 256.
    p7 = claims["P7"].value
    assert p7["rises by"] == pytest.approx(50, rel=0.3)  # type: ignore[index]
    assert p7["below the linear rule by"] == pytest.approx(256 / 50, rel=0.3)  # type: ignore[index]
    assert claims["P7"].verdict is Verdict.SHOWN
    assert all(claim.seeds == (1811,) for claim in claims.values())


def test_the_paper_s_claims_on_the_same_study(analysis: StudyAnalysis) -> None:
    assert paper.judge_momentum(analysis, ()).verdict is Verdict.SHOWN
    rules = paper.judge_rules(analysis, ())
    assert 0 < rules.value["sgd exponent"] < 1  # type: ignore[index]
    fits = paper.fits_of("digits", analysis)
    assert len(fits) == 9 and all(fit.fit is not None for fit in fits)
    form = paper.judge_form(fits, ())
    assert form.verdict is Verdict.SHOWN, form.value
    few = paper.judge_spread({"digits": fits[0].fit, "other": None}, ())
    assert few.verdict is Verdict.NOT_RUN
    by_batch = {f"w{k}": fit.fit for k, fit in enumerate(fits[:6])}
    spread = paper.judge_spread(by_batch, ())
    assert spread.verdict is Verdict.SHOWN
    one = fits[0].fit
    assert paper.judge_sizes(one, one, one, one, ()).verdict is Verdict.SHOWN
    assert paper.judge_sizes(one, None, one, one, ()).verdict is Verdict.NOT_RUN


def test_without_a_difference_momentum_is_not_shown() -> None:
    analysis = planted(heavy=SGD, repeats=1)
    claims = by_id(digits.judge_digits(analysis, (), ()))
    assert claims["P5"].verdict is Verdict.NOT_SHOWN
    assert claims["P6"].verdict is Verdict.NOT_SHOWN
    assert claims["P4"].verdict is Verdict.SHOWN
    assert paper.judge_momentum(analysis, ()).verdict is Verdict.NOT_SHOWN


def test_an_edge_is_named_and_its_batches_are_searched_again() -> None:
    narrow = dataclasses.replace(
        planted_spec().curves["sgd"], space=Space({"lr": Log(min=1e-3, max=0.05)})
    )
    budget = Budget(feasible=40, draws=60, steps=20_000, kappa=3.0)
    spec = planted_spec(
        curves={"sgd": narrow}, global_batches=(1, 64, 1024), repeats=1, budget=budget
    )
    analysis = analysed(spec, {"sgd": SGD})
    claim = by_id(digits.judge_digits(analysis, (), [("sgd", 1)]))["P10"]
    assert claim.verdict is Verdict.NOT_SHOWN and "sgd at 64" in str(claim.value)
    assert "1 points recentred" in str(claim.value)
    again = recentred(
        Measured(spec=spec, directory=None, tables=None, analysis=analysis)  # type: ignore[arg-type]
    )
    assert again is not None and 64 in again.curves["sgd"].spaces
    moved = again.curves["sgd"].spaces[64]["lr"]
    assert moved.max > 0.05 and moved.max / moved.min == pytest.approx(50)
    assert 1 not in again.curves["sgd"].spaces or 1 in again.global_batches


def test_batches_that_were_not_always_reached_have_no_mean() -> None:
    assert math.isnan(digits.slope({1: 10.0}, 1, 2))
    never = dataclasses.replace(SGD, hopeless=frozenset({64}))
    spec = planted_spec(
        curves={"sgd": planted_spec().curves["sgd"]}, global_batches=(16, 64), repeats=1
    )
    assert list(steps_of(analysed(spec, {"sgd": never}), "sgd")) == [16]


def optimum(batch: int, steps: float, momentum: float = 0.0) -> Optimum:
    return Optimum(global_batch=batch, steps=round(steps), lr=0.1, momentum=momentum)


def test_least_squares_finds_an_exact_trade_off() -> None:
    batches = [4**k for k in range(1, 11)]
    found = quadratic.least_squares(batches, [6757 * (1 + 823 / b) for b in batches])
    assert found.s_min == pytest.approx(6757, rel=1e-6)
    assert found.b_crit == pytest.approx(823, rel=1e-6)
    assert found.rms < 1e-6
    reference = quadratic.least_squares(batches, quadratic.REFERENCE_SGD)
    assert reference.b_crit == pytest.approx(823, rel=0.02)
    assert reference.e_min == pytest.approx(5.56e6, rel=0.02)
    assert quadratic.least_squares(batches, quadratic.REFERENCE_MOMENTUM).b_crit == pytest.approx(
        33_800, rel=0.02
    )


def test_the_quadratic_claims_on_the_reference_table() -> None:
    """The numbers from which the criteria came meet them; worse ones do not."""
    sgd = [optimum(b, s) for b, s in zip(quadratic.BATCHES, quadratic.REFERENCE_SGD, strict=True)]
    heavy = [
        optimum(b, s, 0.9)
        for b, s in zip(quadratic.BATCHES, quadratic.REFERENCE_MOMENTUM, strict=True)
    ]
    same = quadratic.QuadraticStudy(
        sgd=sgd, momentum=heavy, cautious_sgd=sgd, cautious_momentum=sgd
    )
    p1, p2, p1r, p2r = quadratic.judge(same)
    assert (p1.verdict, p2.verdict, p1r.verdict) == (Verdict.SHOWN,) * 3
    assert p2r.verdict is Verdict.NOT_SHOWN
    assert p2.value["B_crit ratio"] == pytest.approx(41, rel=0.02)  # type: ignore[index]
    assert len(quadratic.table(same).rows) == 10
    assert "0.975" in quadratic.caveats(same)[0]


def spread(sd: float, **means: float) -> full.Spread:
    return full.Spread(means={int(b[1:]): m for b, m in means.items()}, sd=sd)


def test_budgets_may_move_the_wrong_way_by_one_sd() -> None:
    good = {
        ("steps", 100): spread(0.01, b1=0.5, b8=0.3, b64=0.309),
        ("samples", 4000): spread(0.01, b1=0.5, b8=0.2, b64=0.4),
    }
    claim = full.judge_budgets(good, 7.6, ())  # type: ignore[arg-type]
    assert claim.verdict is Verdict.SHOWN
    # Below the end of perfect scaling a sample budget may go either way.
    assert full.judge_budgets(good, 0.5, ()).verdict is Verdict.NOT_SHOWN  # type: ignore[arg-type]
    assert full.judge_budgets(good, None, ()).verdict is Verdict.NOT_SHOWN  # type: ignore[arg-type]
    bad = {("steps", 100): spread(0.01, b1=0.5, b8=0.3, b64=0.32)}
    assert full.judge_budgets(bad, 7.6, ()).verdict is Verdict.NOT_SHOWN  # type: ignore[arg-type]


def test_test_error_is_held_against_the_smallest_batch() -> None:
    fine = spread(0.01, b1=0.5, b16=0.2, b64=0.21, b256=0.219)
    assert full.judge_test(fine, ()).verdict is Verdict.SHOWN
    worse = spread(0.01, b1=0.1, b16=0.2, b256=0.23)
    claim = full.judge_test(worse, ())
    assert claim.verdict is Verdict.NOT_SHOWN
    assert claim.value["excess, sd"] == pytest.approx(3)  # type: ignore[index]


def test_shares_are_judged_by_rank() -> None:
    shares = {"steps": {1: 0.1, 8: 0.2, 64: 0.3}, "samples": {1: 0.0, 8: 0.5, 64: 0.4, 512: 0.1}}
    assert full.judge_shares(shares, ()).verdict is Verdict.SHOWN  # type: ignore[arg-type]
    turned = {"steps": shares["samples"], "samples": shares["steps"]}
    assert full.judge_shares(turned, ()).verdict is Verdict.NOT_SHOWN  # type: ignore[arg-type]
    assert math.isnan(full.rank_correlation({1: 0.5, 2: 0.5, 4: 0.5}))


def test_a_repeat_without_a_value_leaves_its_batch_out() -> None:
    found = full.spread_of({1: [1.0, 1.2], 2: [math.nan, 1.0], 4: [3.0, 3.2]})
    assert list(found.means) == [1, 4]
    assert found.sd == pytest.approx(math.sqrt(0.02))


def test_every_statement_has_its_own_id_and_the_goals_are_those_of_p8() -> None:
    statements = (
        *criteria.QUADRATIC,
        *criteria.DIGITS,
        *criteria.PAPER,
        *criteria.QUICK,
    )
    assert len({s.id for s in statements}) == len(statements)
    assert all(f"{goal.value:g}" in criteria.P8.criterion for goal in GOALS)
