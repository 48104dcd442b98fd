"""How far S hangs on which samples happen to be in the validation set.

Crossings are read off a finite validation set. Near a goal every sample's outcome is on file, so the set can
be drawn again with replacement, one and the same draw for all trials, batches and curves: the metric at those
points, the crossings, and S follow by definition. What was far from the goal keeps its verdict.

The noise is common to all searches of a study, so it moves whole curves up or down far more than it bends
them; the share that remains between batches is what a regime's border feels.

Source: section 9.5 of the project's notes on Shallue et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.study.intervals import Interval
from shoal.study.records import Goal, SearchKey
from shoal.study.search_summary import AnalysisSettings, SearchSummary
from shoal.study.steps_to_result import NEVER, Marks, Prefix
from shoal.study.table_arrays import SampleOutcomes
from shoal.study.tables import SearchData

RESAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class ValidationNoise:
    """S of one search under other validation sets of the same size.

    Args:
        key: the search.
        steps: S as measured.
        interval: 95 % of the resampled S; the upper end is infinite where more than 2.5 % were not reached
            by the search's end.
        sd: of ln S over the resamples that were reached; NaN below two.
        missed: share of resamples that were not reached by the end.
    """

    key: SearchKey
    steps: int
    interval: Interval
    sd: float
    missed: float


@dataclass(frozen=True, kw_only=True)
class CurveNoise:
    """What validation noise does to a whole curve.

    Args:
        curve: which.
        common: sd of the mean of ln S over all searches: the whole curve moves by so much.
        between: root mean square of what is left of each search after that.
        samples: in the validation set.
        searches: how many.
    """

    curve: str
    common: float
    between: float
    samples: int
    searches: int


def validation_noise(
    searches: Iterable[tuple[SearchData, SearchSummary]],
    samples: Mapping[SearchKey, Sequence[SampleOutcomes]],
    settings: AnalysisSettings,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[list[ValidationNoise], list[CurveNoise]]:
    """S under validation sets drawn again, jointly over all searches.

    Args:
        searches: data and summary of each, of one goal; those without S, or without outcomes of the goal's
            metric on file, are passed over.
        samples: per-sample outcomes (1 = wrong) near crossings, by search.
        settings: of the study, with a grid.
        resamples: how often the set is drawn again.
        seed: of that drawing.

    Returns:
        One entry per search, and one per curve with at least two of them.
    """
    drawn: dict[int, np.ndarray] = {}
    noises: list[ValidationNoise] = []
    logs: dict[SearchKey, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for data, summary in searches:
        mine = [s for s in samples.get(data.key, ()) if s.metric == summary.goal.metric]
        if summary.steps is None or not mine or settings.grid is None:
            continue
        count = len(mine[0].wrong)
        if count not in drawn:
            random = np.random.default_rng(seed)
            drawn[count] = random.multinomial(count, np.full(count, 1 / count), size=resamples)
        steps = _resampled(data, summary, mine, drawn[count], settings)
        noises.append(_noise(summary, steps))
        logs[data.key] = np.log(np.maximum(steps, 1))
        sizes[data.key.curve] = count
    return noises, _by_curve(logs, sizes)


def _noise(summary: SearchSummary, steps: np.ndarray) -> ValidationNoise:
    assert summary.steps is not None
    reached = steps[np.isfinite(steps)]
    low, high = np.quantile(steps, [0.025, 0.975], method="inverted_cdf")
    return ValidationNoise(
        key=summary.key,
        steps=summary.steps,
        interval=Interval(float(low), float(high)),
        sd=float(np.std(np.log(np.maximum(reached, 1)), ddof=1)) if len(reached) > 1 else math.nan,
        missed=1 - len(reached) / len(steps),
    )


def _resampled(
    data: SearchData,
    summary: SearchSummary,
    samples: Sequence[SampleOutcomes],
    drawn: np.ndarray,
    settings: AnalysisSettings,
) -> np.ndarray:
    """S under each draw; infinite where it was not reached by the search's end."""
    goal, end = summary.goal, summary.end
    by_trial: dict[int, list[SampleOutcomes]] = {}
    for outcome in sorted(samples, key=lambda s: (s.trial, s.step)):
        if outcome.step <= end:
            by_trial.setdefault(outcome.trial, []).append(outcome)
    crossings = np.full((len(drawn), data.trials[-1].id + 1), NEVER)
    diverged = np.full(data.trials[-1].id + 1, NEVER)
    for trial, curve in zip(data.trials, data.curves, strict=True):
        mine = by_trial.get(trial.id, [])
        on_file = {outcome.step for outcome in mine}
        first = NEVER
        for evaluation in curve.evaluations:
            if evaluation.step > end or evaluation.step in on_file:
                continue
            measured = evaluation.metrics.get(goal.metric)
            if measured is not None and goal.is_met_by(measured):
                first = evaluation.step
                break
        found = _first_met(mine, drawn, goal)
        crossings[:, trial.id] = np.minimum(first, found)
        at = curve.diverged_at
        diverged[trial.id] = NEVER if at is None or at > end else at
    draws = max(len(diverged), settings.budget.feasible)
    found = np.empty(len(drawn))
    for place, row in enumerate(crossings):
        marks = [Marks(c, d, end) for c, d in zip(row.tolist(), diverged.tolist(), strict=True)]
        prefix = Prefix.of(marks, summary.feasible, draws)
        is_known = prefix.result < prefix.short_from and prefix.result <= end
        found[place] = prefix.result if is_known else NEVER
    return found


def _first_met(mine: Sequence[SampleOutcomes], drawn: np.ndarray, goal: Goal) -> np.ndarray:
    """The first step on file at which the goal is met, under each draw."""
    if not mine:
        return np.full(len(drawn), NEVER)
    wrong = np.stack([outcome.wrong for outcome in mine]).astype(np.float64)
    errors = drawn @ wrong.T / wrong.shape[1]
    met = errors > goal.value if goal.larger_is_better else errors < goal.value
    steps = np.array([outcome.step for outcome in mine], dtype=np.float64)
    return np.where(met, steps, NEVER).min(axis=1)


def _by_curve(logs: Mapping[SearchKey, np.ndarray], sizes: Mapping[str, int]) -> list[CurveNoise]:
    found: list[CurveNoise] = []
    for curve in sorted(sizes):
        rows = np.stack([values for key, values in logs.items() if key.curve == curve])
        # A draw that some search does not reach says nothing about the curve as a whole.
        rows = rows[:, np.isfinite(rows).all(axis=0)]
        if len(rows) < 2 or rows.shape[1] < 2:
            continue
        centred = rows - rows.mean(axis=1, keepdims=True)
        common = centred.mean(axis=0)
        left = centred - common
        found.append(
            CurveNoise(
                curve=curve,
                common=float(np.std(common, ddof=1)),
                between=float(np.sqrt(np.mean(left**2))),
                samples=sizes[curve],
                searches=len(rows),
            )
        )
    return found
