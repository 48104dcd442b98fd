"""The judges of P3-P8 and P10 and of the smoke tests, on what a study of digits says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.reproduce.batch_size import criteria
from shoal.reproduce.batch_size.studies import (
    GOALS,
    HEAVY,
    NESTEROV,
    SGD,
    at_boundary,
    steps_of,
)
from shoal.reproduce.claims import Claim, Statement
from shoal.study.analysis import StudyAnalysis
from shoal.study.fit import TradeoffFit

SMALL = (1, 2, 4)


def judge_digits(
    analysis: StudyAnalysis, seeds: Sequence[int], recentred: Sequence[tuple[str, int]]
) -> tuple[Claim, ...]:
    """P3-P8 and P10.

    Args:
        analysis: of the study, recentred searches in the place of those they replace.
        seeds: of the study.
        recentred: curves and batches whose range was moved once.
    """
    return (
        judge_slopes(criteria.P3, steps_of(analysis, SGD), (1, 16), None, seeds),
        _judge_small(analysis, seeds),
        judge_least(criteria.P5, analysis, seeds, criteria.LEAST_BATCH_AT_LEAST),
        _judge_fits(analysis, seeds),
        _judge_rates(analysis, seeds),
        _judge_goals(analysis, seeds),
        _judge_edges(analysis, seeds, recentred),
    )


def slope(steps: Mapping[int, float], first: int, last: int) -> float:
    """Mean slope of log S over log B between two batches; NaN where one has no S."""
    if first not in steps or last not in steps or first == last:
        return math.nan
    return math.log(steps[last] / steps[first]) / math.log(last / first)


def judge_slopes(
    statement: Statement,
    steps: Mapping[int, float],
    small: tuple[int, int],
    largest: int | None,
    seeds: Sequence[int],
) -> Claim:
    """Steep at small batches, flat from 64 to ``largest`` (the last batch with an S by default)."""
    end = max(steps, default=64) if largest is None else largest
    steep, flat = slope(steps, *small), slope(steps, 64, end)
    return statement.judge(
        holds=steep < criteria.SMALL_SLOPE_BELOW and flat > criteria.LARGE_SLOPE_ABOVE,
        value={f"slope {small[0]} to {small[1]}": steep, f"slope 64 to {end}": flat},
        seeds=seeds,
    )


def _judge_small(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    ratios = small_ratios(analysis, HEAVY)
    return criteria.P4.judge(
        holds=agree(ratios), value={f"B={b}": r for b, r in ratios.items()}, seeds=seeds
    )


def small_ratios(analysis: StudyAnalysis, curve: str) -> dict[int, float]:
    """S of a curve over that of SGD at the smallest batches; NaN where there is none."""
    sgd, other = steps_of(analysis, SGD), steps_of(analysis, curve)
    return {b: other.get(b, math.nan) / sgd.get(b, math.nan) for b in SMALL}


def agree(ratios: Mapping[int, float]) -> bool:
    """Whether all lie within a factor 1.6 of 1; NaN does not."""
    within = criteria.SMALL_BATCHES_WITHIN
    return all(1 / within <= ratio <= within for ratio in ratios.values())


def judge_least(
    statement: Statement, analysis: StudyAnalysis, seeds: Sequence[int], farther: float | None
) -> Claim:
    """Whether heavy ball's least S is well below SGD's, at a batch ``farther`` times as large."""
    sgd, heavy = steps_of(analysis, SGD), steps_of(analysis, HEAVY)
    if not sgd or not heavy:
        return statement.judge(holds=False, value=None, seeds=seeds)
    at_sgd, at_heavy = min(sgd, key=lambda b: sgd[b]), min(heavy, key=lambda b: heavy[b])
    ratio, apart = heavy[at_heavy] / sgd[at_sgd], at_heavy / at_sgd
    return statement.judge(
        holds=ratio <= criteria.LEAST_RATIO_AT_MOST and (farther is None or apart >= farther),
        value={
            "ratio": ratio,
            "SGD least": sgd[at_sgd],
            "at B": at_sgd,
            "heavy ball least": heavy[at_heavy],
            "at its B": at_heavy,
        },
        seeds=seeds,
    )


def usable(analysis: StudyAnalysis, curve: str, goal: int = 0) -> TradeoffFit | None:
    """The fit of a curve if its B_crit may be used."""
    fit = analysis.goals[goal].fits.get(curve)
    return fit if fit is not None and fit.is_usable else None


def _judge_fits(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    sgd, heavy = usable(analysis, SGD), usable(analysis, HEAVY)
    if sgd is None or heavy is None:
        return criteria.P6.judge(
            holds=False, value="a fit is not usable: B_crit is not inside the batches", seeds=seeds
        )
    samples = heavy.e_min.value / sgd.e_min.value
    critical = heavy.b_crit.value / sgd.b_crit.value
    within = criteria.SAMPLES_WITHIN
    return criteria.P6.judge(
        holds=1 / within <= samples <= within and critical >= criteria.CRITICAL_RATIO_AT_LEAST,
        value={"E_min ratio": samples, "B_crit ratio": critical},
        seeds=seeds,
    )


def _judge_rates(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    steps = steps_of(analysis, SGD)
    rates = {o.global_batch: o.effective_lr for o in analysis.main.optima if o.curve == SGD}
    if 1 not in rates or not steps:
        return criteria.P7.judge(holds=False, value=None, seeds=seeds)
    least = min(steps.values())
    plateau = [b for b in sorted(steps) if steps[b] <= criteria.PLATEAU_STEPS_WITHIN * least]
    first = plateau[0]
    rises = rates[first] / rates[1]
    below = first / rises
    flat = max(rates[b] for b in plateau) / min(rates[b] for b in plateau)
    return criteria.P7.judge(
        holds=rises > criteria.RATE_RISES_ABOVE
        and below > criteria.BELOW_LINEAR_ABOVE
        and flat <= criteria.PLATEAU_RATE_WITHIN,
        value={
            "rises by": rises,
            "below the linear rule by": below,
            "spread on the plateau": flat,
            "plateau from": first,
        },
        seeds=seeds,
    )


def _judge_goals(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    value: dict[str, float] = {}
    holds = True
    # Hardest first, as in the study.
    order = range(len(GOALS))
    for curve in (SGD, HEAVY):
        fits = [usable(analysis, curve, goal) for goal in order]
        critical = [fit.b_crit.value for fit in fits if fit is not None]
        spread = max(critical) / min(critical) if len(critical) == len(GOALS) else math.nan
        value[f"{curve} B_crit spread"] = spread
        steps = [steps_of(analysis, curve, goal) for goal in order]
        rising = all(
            steps[place][b] >= steps[place + 1][b]
            for place in range(len(GOALS) - 1)
            for b in steps[place]
            if b in steps[place + 1]
        )
        holds = holds and spread <= criteria.BORDERS_WITHIN and rising
    return criteria.P8.judge(holds=holds, value=value, seeds=seeds)


def _judge_edges(
    analysis: StudyAnalysis, seeds: Sequence[int], recentred: Sequence[tuple[str, int]]
) -> Claim:
    left = [f"{curve} at {batch}" for curve, batch in at_boundary(analysis) if curve != NESTEROV]
    moved = sum(curve != NESTEROV for curve, _ in recentred)
    words = f"{moved} points recentred; at a boundary now: {', '.join(left) or 'none'}"
    return criteria.P10.judge(holds=not left, value=words, seeds=seeds)


def judge_quick(analysis: StudyAnalysis, seeds: Sequence[int]) -> tuple[Claim, Claim]:
    """The smoke tests."""
    return (
        judge_slopes(criteria.Q3, steps_of(analysis, SGD), (2, 16), 256, seeds),
        judge_least(criteria.Q5, analysis, seeds, None),
    )
