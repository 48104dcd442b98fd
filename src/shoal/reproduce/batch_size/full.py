"""What needs every trial trained to the same step: budgets, test error, and how wide the good region is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.reproduce.batch_size import criteria
from shoal.reproduce.batch_size.studies import GOALS, HEAVY, METRIC, Measured
from shoal.reproduce.claims import Claim
from shoal.study.budgets import Unit, best_errors, complete_trials, scatter, share_within
from shoal.study.fit import TradeoffFit, fit_curve
from shoal.study.intervals import pooled_spread
from shoal.study.records import Goal
from shoal.study.search_summary import summarise
from shoal.study.tables import SearchData

STEP_BUDGETS = (100, 300, 1_000)
SAMPLE_BUDGETS = (4_000, 8_000)
SHARE_STEPS = 300
SHARE_SAMPLES = 8_000
SHARE_FROM = 8
TEST_FROM = 16
TEST_METRIC = "test/cross_entropy_error"
TRAIN_GOAL = Goal(metric="train/cross_entropy_error", value=GOALS[0].value)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity measured in several repeats at each batch.

    Args:
        means: by batch.
        sd: pooled over batches; NaN where nothing was repeated.
    """

    means: Mapping[int, float]
    sd: float


def spread_of(values: Mapping[int, Sequence[float]]) -> Spread:
    """Means and the pooled sd of repeats; batches with a missing value are left out."""
    whole = {batch: row for batch, row in sorted(values.items()) if row and all(map(_finite, row))}
    pooled = pooled_spread(whole.values())
    return Spread(
        means={batch: float(np.mean(row)) for batch, row in whole.items()},
        sd=math.nan if pooled is None else pooled.sd,
    )


def budget_table(full: Measured) -> dict[tuple[Unit, int], Spread]:
    """Best validation cross entropy under each budget, by batch."""
    wanted: list[tuple[Unit, Sequence[int]]] = [
        ("steps", STEP_BUDGETS),
        ("samples", SAMPLE_BUDGETS),
    ]
    found: dict[tuple[Unit, int], dict[int, list[float]]] = {
        (unit, budget): {} for unit, budgets in wanted for budget in budgets
    }
    for data in full.tables:
        members = complete_trials(data, full.analysis.settings)
        column = full.tables.metric(data.key, METRIC)
        for unit, budgets in wanted:
            for row in best_errors(column, data.key, METRIC, members, budgets, unit):
                batch = data.key.global_batch
                if unit == "samples" and row.budget > batch * full.spec.budget.steps:
                    # Trained for fewer samples than that: the budget was not spent.
                    continue
                value = math.nan if row.value is None else row.value
                found[unit, row.budget].setdefault(batch, []).append(value)
    return {place: spread_of(values) for place, values in found.items()}


def judge_budgets(
    table: Mapping[tuple[Unit, int], Spread], perfect_to: float | None, seeds: Sequence[int]
) -> Claim:
    """P9, from the batch on to which scaling is perfect."""
    worst: dict[str, float] = {}
    for (unit, budget), spread in table.items():
        start = 0.0 if unit == "steps" else (math.nan if perfect_to is None else perfect_to)
        means = [mean for batch, mean in spread.means.items() if batch >= start]
        sign = 1 if unit == "steps" else -1
        moves = [sign * (later - earlier) for earlier, later in itertools.pairwise(means)]
        worst[f"{budget} {unit}"] = max(moves, default=math.nan) / spread.sd
    return criteria.P9.judge(
        holds=all(value <= 1 for value in worst.values()),
        value={f"largest step the wrong way at {name}, sd": v for name, v in worst.items()},
        seeds=seeds,
    )


def training_fit(full: Measured) -> TradeoffFit | None:
    """The trade-off fitted to the training cross entropy, which was measured at every point."""
    summaries = [summarise(data, TRAIN_GOAL, full.analysis.settings) for data in full.tables]
    return fit_curve(summaries, train_samples=full.analysis.settings.train_samples, resamples=0)


def test_errors(full: Measured) -> Spread:
    """Test cross entropy of each search where its validation cross entropy was least."""
    values: dict[int, list[float]] = {}
    for data in full.tables:
        members = set(complete_trials(data, full.analysis.settings))
        values.setdefault(data.key.global_batch, []).append(_test_at_best(data, members))
    return spread_of(values)


def _test_at_best(data: SearchData, members: set[int]) -> float:
    points = [
        (e.metrics[METRIC].value, e.metrics[TEST_METRIC].value)
        for trial, curve in zip(data.trials, data.curves, strict=True)
        if trial.id in members
        for e in curve.evaluations
        if TEST_METRIC in e.metrics and math.isfinite(e.metrics[METRIC].value)
    ]
    return min(points)[1] if points else math.nan


def judge_test(spread: Spread, seeds: Sequence[int]) -> Claim:
    """C5."""
    means = {batch: mean for batch, mean in spread.means.items() if batch >= TEST_FROM}
    if len(means) < 2:
        return criteria.C5.judge(holds=False, value=None, seeds=seeds)
    first = means[min(means)]
    worst = max(means, key=lambda batch: means[batch])
    excess = (means[worst] - first) / spread.sd
    return criteria.C5.judge(
        holds=excess <= criteria.TEST_TOLERANCE_SD,
        value={
            "smallest batch": first,
            "worst": means[worst],
            "at B": worst,
            "excess, sd": excess,
        },
        seeds=seeds,
    )


def good_shares(full: Measured) -> dict[Unit, dict[int, float]]:
    """Share of all draws that reached the easiest goal within a budget, by unit and batch."""
    easiest = max(GOALS, key=lambda goal: goal.value)
    points: dict[Unit, dict[int, list[float]]] = {"steps": {}, "samples": {}}
    for data in full.tables:
        summary = summarise(data, easiest, full.analysis.settings)
        batch = data.key.global_batch
        for unit, budget in (("steps", SHARE_STEPS), ("samples", SHARE_SAMPLES)):
            rows = scatter(summary, budget=budget, unit="steps" if unit == "steps" else "samples")
            points["steps" if unit == "steps" else "samples"].setdefault(batch, []).append(
                share_within(rows)
            )
    return {
        unit: {batch: float(np.mean(shares)) for batch, shares in sorted(rows.items())}
        for unit, rows in points.items()
    }


def judge_shares(shares: Mapping[Unit, Mapping[int, float]], seeds: Sequence[int]) -> Claim:
    """C7."""
    samples = {b: share for b, share in shares["samples"].items() if b >= SHARE_FROM}
    up, down = rank_correlation(shares["steps"]), rank_correlation(samples)
    return criteria.C7.judge(
        holds=up >= criteria.SHARE_TREND and down <= -criteria.SHARE_TREND,
        value={f"within {SHARE_STEPS} steps": up, f"within {SHARE_SAMPLES} samples": down},
        seeds=seeds,
    )


def rank_correlation(values: Mapping[int, float]) -> float:
    """Spearman's correlation of values with their keys; NaN where all values are equal."""
    from scipy.stats import rankdata

    keys = np.argsort(np.argsort(list(values)))
    ranks = rankdata(list(values.values()))
    if len(ranks) < 3 or np.ptp(ranks) == 0:
        return math.nan
    return float(np.corrcoef(keys, ranks)[0, 1])


def perfect_to(main: Measured) -> float | None:
    """Heavy ball's fitted B_ps, if it may be used."""
    found = main.analysis.main.regimes[HEAVY].perfect_to
    return None if found is None else found.value


def _finite(value: float) -> bool:
    return math.isfinite(value)
