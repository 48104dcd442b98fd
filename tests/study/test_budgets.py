"""What budgets buy: the least error by brute force, only for full studies; scatters per budget."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planted import METRIC, MOMENTUM_SPACE, Planted, Truth

from shoal.errors import UsageError
from shoal.study.budgets import (
    best_errors,
    complete_trials,
    require_full,
    scatter,
    share_within,
    usual_budgets,
)
from shoal.study.records import Budget, Outcome
from shoal.study.search_summary import summarise

FULL = Planted(
    truths={"heavy": Truth(luck=0.2, flutter=0.05, space=MOMENTUM_SPACE)},
    batches=(2, 32, 512),
    repeats=1,
    budget=Budget(feasible=8, draws=40, steps=3000, full=True),
)


@pytest.fixture(scope="module")
def tables():
    return FULL.tables()


@pytest.mark.parametrize("unit", ["steps", "samples"])
def test_best_errors_are_those_of_brute_force(tables, unit):
    budgets = [1, 10, 100, 1000, 3000, 10**7]
    for data in tables:
        members = complete_trials(data, FULL.settings)
        assert len(members) == 8
        column = tables.metric(data.key, METRIC)
        found = best_errors(column, data.key, METRIC, members, budgets, unit)
        scale = data.key.global_batch if unit == "samples" else 1
        for row in found:
            values = [
                e.metrics[METRIC].value
                for t, c in zip(data.trials, data.curves, strict=True)
                if t.id in members
                for e in c.evaluations
                if e.step > 0 and e.step * scale <= row.budget
            ]
            assert row.value == (min(values) if values else None)
        values = [math.inf if r.value is None else r.value for r in found]
        assert values == sorted(values, reverse=True)


def test_members_are_the_first_that_never_diverged(tables):
    for data in tables:
        whole = [
            t.id
            for t, c in zip(data.trials, data.curves, strict=True)
            if not any(e.diverged for e in c.evaluations)
        ]
        assert complete_trials(data, FULL.settings) == whole[:8]
    more = replace(FULL.settings, budget=Budget(feasible=40, draws=40, steps=3000, full=True))
    with pytest.raises(UsageError, match="compares the best of 40"):
        complete_trials(next(iter(tables)), more)


def test_only_full_studies_answer():
    require_full(FULL.settings)
    with pytest.raises(UsageError, match="--full"):
        require_full(Planted(truths={"sgd": Truth()}).settings)


def test_usual_budgets_lie_between_the_goal_and_the_end(tables):
    rows = [summarise(d, FULL.goals[0], FULL.settings) for d in tables]
    found = usual_budgets(rows)
    least = min(r.steps for r in rows)
    assert found["steps"][0] == least and found["steps"][-1] == FULL.grid[-1]
    assert found["samples"][0] == min(r.steps * r.key.global_batch for r in rows)
    assert all(values == sorted(set(values)) for values in found.values())
    assert usual_budgets([]) == {"steps": [], "samples": []}


def test_scatter_tells_outcomes_by_the_budget(tables):
    for data in tables:
        row = summarise(data, FULL.goals[0], FULL.settings)
        assert row.steps is not None
        whole = scatter(row)
        assert len(whole) == len(data.trials)
        assert [p.trial for p in whole if p.is_best] == [row.result.winner]
        at = scatter(row, budget=row.steps)
        reached = {p.trial for p in at if p.outcome is Outcome.REACHED}
        assert row.result.winner in reached
        assert reached == {
            t.trial.id for t in row.trials if t.has_crossed and t.crossing <= row.steps
        }
        same = scatter(row, budget=row.steps * data.key.global_batch, unit="samples")
        assert same == at
        before = scatter(row, budget=row.previous)
        assert not any(p.is_best for p in before)
        assert share_within(before) < share_within(at) <= share_within(whole)
        for p in whole:
            assert p.effective_lr == pytest.approx(p.lr / p.one_minus_momentum)
        diverged = {p.trial for p in whole if p.outcome is Outcome.DIVERGED}
        assert diverged == {
            t.id for t, c in zip(data.trials, data.curves, strict=True) if c.diverged_at is not None
        }
    assert math.isnan(share_within([]))
