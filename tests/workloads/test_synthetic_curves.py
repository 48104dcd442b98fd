"""The planted truth of made-up curves, and whether search, fit, regimes and edges find it."""

import dataclasses
import math

import numpy as np
import pytest

from shoal.study import Budget, CurveSpec, Goal, Grid, Log, Space, StudySpec
from shoal.study.edges import Place, cell_edges
from shoal.study.fit import TradeoffFit, fit_curve
from shoal.study.intervals import repeated_steps
from shoal.study.records import SearchKey, Trial
from shoal.study.regimes import regimes
from shoal.study.search_summary import AnalysisSettings, SearchSummary, summarise
from shoal.study.steps_to_result import Reach
from shoal.workloads.synthetic_curves import (
    SyntheticCurves,
    SyntheticEngine,
    SyntheticMeasuring,
    chained,
)
from workloads.synthetic_study import carry_out

GRID = Grid(ratio=1.05)
GOAL = Goal(metric="val/classification_error", value=0.1)


def rates(low: float, high: float) -> Space:
    return Space({"lr": Log(min=low, max=high)})


WIDE = rates(3e-3, 20.0)
QUICK = Budget(feasible=20, draws=40, steps=30_000, kappa=1.5)


def trial(lr: float, *, batch: int = 8, momentum: float | None = None, seed: int = 5) -> Trial:
    parameters = {"lr": lr} if momentum is None else {"lr": lr, "momentum": momentum}
    key = SearchKey(curve="sgd", global_batch=batch, repeat=0)
    return Trial(search=key, id=0, unit=(0.5,), parameters=parameters, seed=seed, address="")


def spec(curves: SyntheticCurves, space: Space = WIDE, **changes: object) -> StudySpec:
    values: dict[str, object] = {
        "name": "planted",
        "workload": curves.workload(),
        "curves": {"sgd": CurveSpec(optimizer="sgd", space=space)},
        "global_batches": tuple(2**k for k in range(10)),
        "goals": (GOAL,),
        "budget": Budget(feasible=30, draws=60, steps=30_000),
        "repeats": 5,
        "grid": GRID,
    }
    return StudySpec(**(values | changes))  # type: ignore[arg-type]


def study_of(curves: SyntheticCurves, **changes: object) -> tuple[StudySpec, list[SearchSummary]]:
    study = spec(curves, **changes)  # type: ignore[arg-type]
    settings = AnalysisSettings(
        goals=study.goals, budget=study.budget, grid=study.grid.points(study.budget.steps)
    )
    rows = [
        summarise(carry_out(study, curves, key), study.goals[0], settings)
        for key in study.searches()
    ]
    return study, rows


def test_the_best_setting_crosses_right_after_the_planted_steps() -> None:
    curves = SyntheticCurves()
    for batch in (1, 8, 64, 512):
        best = trial(curves.best_rate(batch), batch=batch)
        steps = curves.steps(batch)
        assert curves.crossing(best) == pytest.approx(steps)
        curve = curves.curve(best, GRID.points(10_000))
        assert curve.crossing(GOAL) == GRID.next(math.floor(steps))
    assert curves.critical_batch == 32


def test_the_value_at_the_planted_step_is_the_goal_itself_and_does_not_count() -> None:
    curves = SyntheticCurves(smallest_steps=60, fewest_samples=8 * 40, width=math.inf)
    exact = curves.evaluation(trial(0.3), 100)
    assert exact.metrics[GOAL.metric].value == GOAL.value
    points = (0, 99, 100, 101)
    assert curves.curve(trial(0.3), points).crossing(GOAL) == 101


def test_settings_off_the_optimum_take_longer_and_momentum_counts_by_its_effective_rate() -> None:
    curves = SyntheticCurves()
    best = curves.best_rate(8)
    off = trial(best * math.exp(curves.width))
    assert curves.crossing(off) == pytest.approx(2 * curves.steps(8))
    heavy = trial(best * 0.1, momentum=0.9)
    assert curves.crossing(heavy) == pytest.approx(curves.steps(8))


def test_unstable_trials_diverge_and_hopeless_batches_never_reach() -> None:
    curves = SyntheticCurves(stable_lr=2.0, hopeless=frozenset({16}))
    for lr, at in ((2.1, 12), (200.0, 3)):
        bad = trial(lr)
        assert curves.diverges_at(bad) == at
        curve = curves.curve(bad, GRID.points(100))
        assert curve.diverged_at == curve.step == at
        assert not math.isfinite(curve.evaluations[-1].metrics[GOAL.metric].value)
    assert curves.diverges_at(trial(2.1, momentum=0.1)) is None
    assert curves.curve(trial(0.3, batch=16), GRID.points(50_000)).crossing(GOAL) is None


def test_evaluations_are_a_function_of_seed_and_step_and_their_noise_is_as_asked() -> None:
    curves = SyntheticCurves(noise=0.1)
    steps = range(100, 2_100)
    flat = SyntheticCurves()
    logs = np.array(
        [
            math.log(
                curves.evaluation(trial(0.1), t).metrics[GOAL.metric].value
                / flat.evaluation(trial(0.1), t).metrics[GOAL.metric].value
            )
            for t in steps
        ]
    )
    assert logs.std() == pytest.approx(0.1, rel=0.1) and abs(logs.mean()) < 0.01
    assert abs(np.corrcoef(logs[:-1], logs[1:])[0, 1]) < 0.1
    assert curves.evaluation(trial(0.1), 7) == curves.evaluation(trial(0.1), 7)
    assert curves.evaluation(trial(0.1), 7) != curves.evaluation(trial(0.1, seed=6), 7)
    lucky = SyntheticCurves(luck=0.3)
    spread = [math.log(lucky.crossing(trial(0.1, seed=s))) for s in range(400)]
    assert np.std(spread) == pytest.approx(0.3, rel=0.15)


def test_a_search_finds_what_was_planted_to_the_step() -> None:
    """Without noise S is the first grid point after the least planted crossing of feasible trials."""
    curves = SyntheticCurves(stable_lr=2.0)
    study = spec(curves)
    for batch in (1, 16, 512):
        key = SearchKey(curve="sgd", global_batch=batch, repeat=1)
        data = carry_out(study, curves, key)
        planted = min(curves.crossing(t) for t in data.trials)
        settings = AnalysisSettings(
            goals=study.goals, budget=study.budget, grid=study.grid.points(30_000)
        )
        found = summarise(data, GOAL, settings)
        assert found.steps == study.grid.next(math.floor(planted))
        assert found.winner is not None
        assert curves.crossing(found.winner.trial) == planted
        assert sum(t.is_feasible for t in found.trials) == study.budget.feasible
        assert any(t.diverged is not None for t in found.trials)


def fitted(rows: list[SearchSummary]) -> TradeoffFit:
    fit = fit_curve(rows, resamples=0)
    assert fit is not None and fit.is_usable
    return fit


def test_the_fit_recovers_the_planted_curve_and_its_borders() -> None:
    curves = SyntheticCurves()
    _, rows = study_of(curves, repeats=1, budget=QUICK)
    fit = fitted(rows)
    assert fit.b_crit.value == pytest.approx(curves.critical_batch, rel=0.1)
    assert fit.s_min.value == pytest.approx(curves.smallest_steps, rel=0.1)
    assert fit.e_min.value == pytest.approx(curves.fewest_samples, rel=0.1)
    found = regimes(fit, repeated_steps(rows))
    truth_ps, truth_max = 1.2 + 0.2 * curves.critical_batch, 10 * curves.critical_batch
    assert found.perfect_to is not None and found.nothing_beyond is not None
    assert abs(math.log2(found.perfect_to.value / truth_ps)) < 1
    assert abs(math.log2(found.nothing_beyond.value / truth_max)) < 1


def test_the_fit_recovers_the_planted_curve_under_noise() -> None:
    curves = SyntheticCurves(noise=0.15, luck=0.15)
    batches = tuple(4**k for k in range(6))
    _, rows = study_of(curves, repeats=3, budget=QUICK, global_batches=batches)
    fit = fitted(rows)
    assert fit.b_crit.value == pytest.approx(curves.critical_batch, rel=0.25)
    assert fit.b_crit.profile.low <= curves.critical_batch <= fit.b_crit.profile.high
    # The best of 20 noisy trials is lucky: S is below the planted steps, and the fit cannot know.
    assert fit.s_min.value < curves.smallest_steps


def test_a_batch_that_never_reaches_is_censored_at_the_budget() -> None:
    curves = SyntheticCurves(hopeless=frozenset({64}))
    budget = Budget(feasible=5, draws=20, steps=2_000)
    study, rows = study_of(curves, repeats=1, budget=budget, global_batches=(32, 64, 128))
    [hopeless] = [row for row in rows if row.key.global_batch == 64]
    assert hopeless.is_censored and hopeless.censored_at == study.grid.floor(2_000)
    assert all(row.steps is not None for row in rows if row.key.global_batch != 64)


def test_too_many_divergences_make_a_search_short() -> None:
    curves = SyntheticCurves(stable_lr=0.01)
    budget = Budget(feasible=20, draws=25, steps=2_000)
    _, rows = study_of(curves, repeats=1, budget=budget, global_batches=(8,))
    assert rows[0].is_short and rows[0].result.reach is Reach.SHORT


@pytest.mark.parametrize(
    ("space", "place", "side"),
    [
        (rates(3e-3, 20.0), Place.INSIDE, None),
        # The optimum at B = 8 is 0.16: below, above, and inside but cut by divergence.
        (rates(0.2, 3.0), Place.BOUNDARY, "lower"),
        (rates(1e-3, 0.1), Place.BOUNDARY, "upper"),
    ],
)
def test_planted_edges_are_flagged(space: Space, place: Place, side: str | None) -> None:
    curves = SyntheticCurves()
    _, rows = study_of(curves, space=space, global_batches=(8,), repeats=3)
    [[edge]] = cell_edges(rows, {"sgd": ["lr"]}).values()
    assert (edge.place, edge.side) == (place, side)


def test_a_planted_stability_limit_is_told_from_an_edge() -> None:
    curves = SyntheticCurves(stable_lr=0.075)
    budget = Budget(feasible=100, draws=120, steps=5_000)
    space = rates(1e-3, 0.1)
    _, rows = study_of(curves, space=space, budget=budget, global_batches=(8,), repeats=2)
    [[edge]] = cell_edges(rows, {"sgd": ["lr"]}).values()
    assert (edge.place, edge.side) == (Place.STABILITY, "upper")


def test_all_tied_goes_to_the_first_trial() -> None:
    curves = SyntheticCurves(width=math.inf, stable_lr=1e9)
    _, rows = study_of(curves, global_batches=(8,), repeats=1)
    assert rows[0].result.winner == 0
    assert rows[0].result.draws == 30


def test_the_engine_s_chain_knows_every_step() -> None:
    engine, other = SyntheticEngine(), SyntheticEngine()
    one = trial(0.1)
    engine.admit(one)
    for target in (1, 2, 7, 100):
        engine.advance({0: target})
    assert int(engine.weights(0)["chain"]) == chained(one.seed, 100)
    other.admit(one, engine.save(0))
    other.advance({0: 150})
    measuring = SyntheticMeasuring(SyntheticCurves(), {0: one})
    measured = measuring.evaluate(0, 150, other.weights(0), other.losses(0))
    assert measured == SyntheticCurves().evaluation(one, 150)
    with pytest.raises(AssertionError, match="lost or done twice"):
        measuring.evaluate(0, 151, other.weights(0), other.losses(0))
    with pytest.raises(AssertionError, match="out of order"):
        measuring.evaluate(0, 150, other.weights(0), other.losses(0))
    stranger = SyntheticMeasuring(SyntheticCurves(), {0: dataclasses.replace(one, seed=6)})
    with pytest.raises(AssertionError, match="another trial"):
        stranger.evaluate(0, 150, other.weights(0), other.losses(0))
    with pytest.raises(ValueError, match="in already"):
        engine.admit(one)


@pytest.mark.parametrize(
    "wrong", [{"noise": -1.0}, {"goal": 0.95}, {"end_error": 0.1}, {"width": 0.0}]
)
def test_impossible_truths_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SyntheticCurves(**wrong)  # type: ignore[arg-type]
