"""Validation noise: as large as theory says, common to all batches, and nothing without outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planted import METRIC, Planted, Truth

from shoal.study.records import Curve, Evaluation, Measured
from shoal.study.search_summary import summarise
from shoal.study.table_arrays import SampleOutcomes
from shoal.study.tables import SearchData
from shoal.study.validation_noise import validation_noise

SAMPLES = 1500
STUDY = Planted(truths={"sgd": Truth(luck=0.05)}, batches=(8, 64), repeats=2)


def with_outcomes(data: SearchData, near: float = 2.0):
    """Values replaced by means over samples of fixed difficulty; outcomes on file near the goal."""
    difficulty = (np.arange(SAMPLES) + 0.5) / SAMPLES
    difficulty = np.random.default_rng(0).permutation(difficulty)
    curves, outcomes = [], []
    for trial, curve in zip(data.trials, data.curves, strict=True):
        points = []
        for e in curve.evaluations:
            value = e.metrics[METRIC].value
            if math.isnan(value):
                points.append(e)
                continue
            wrong = difficulty < value
            mean = float(wrong.mean())
            points.append(
                Evaluation(step=e.step, metrics={METRIC: Measured(mean)}, diverged=e.diverged)
            )
            if 0.1 / near < mean < 0.1 * near:
                outcomes.append(SampleOutcomes(trial.id, e.step, METRIC, wrong))
        curves.append(Curve(evaluations=points))
    more = SearchData(
        key=data.key,
        trials=data.trials,
        curves=curves,
        outcomes=data.outcomes,
        end=data.end,
        state=data.state,
        draws=data.draws,
    )
    return more, outcomes


@pytest.fixture(scope="module")
def made():
    goal = STUDY.goals[0]
    pairs, samples = [], {}
    for data in STUDY.tables():
        more, outcomes = with_outcomes(data)
        pairs.append((more, summarise(more, goal, STUDY.settings)))
        samples[data.key] = outcomes
    return pairs, samples


def test_it_is_as_large_as_theory_says_and_common_to_all(made):
    pairs, samples = made
    noises, curves = validation_noise(pairs, samples, STUDY.settings)
    assert len(noises) == 4
    # The error falls as t^(-1/2): ln S moves by -2 d ln p, and d ln p has sd sqrt((1 - p)/(p n)).
    theory = 2 * math.sqrt(0.9 / 0.1 / SAMPLES)
    for entry, (_, summary) in zip(noises, pairs, strict=True):
        assert entry.steps == summary.steps
        assert entry.interval.low < entry.steps < entry.interval.high
        assert entry.missed == 0
        assert entry.sd == pytest.approx(theory, rel=0.25)
    (curve,) = curves
    assert (curve.samples, curve.searches) == (SAMPLES, 4)
    assert curve.common == pytest.approx(theory, rel=0.25)
    assert curve.between < 0.3 * curve.common


def test_the_measured_set_gives_the_measured_steps(made):
    """A draw in which every sample comes once is the set itself."""
    from shoal.study import validation_noise as module

    pairs, samples = made
    for data, summary in pairs:
        steps = module._resampled(
            data, summary, samples[data.key], np.ones((1, SAMPLES), dtype=int), STUDY.settings
        )
        assert steps.tolist() == [summary.steps]


def test_it_is_repeatable_and_silent_without_outcomes(made):
    pairs, samples = made
    one = validation_noise(pairs, samples, STUDY.settings, resamples=30)
    assert one == validation_noise(pairs, samples, STUDY.settings, resamples=30)
    assert validation_noise(pairs, {}, STUDY.settings) == ([], [])
    other = {key: [s._replace(metric="val/other") for s in rows] for key, rows in samples.items()}
    assert validation_noise(pairs, other, STUDY.settings) == ([], [])
