"""The search against the definition of S computed by brute force, whatever happens on the way."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.study.records import Budget, Curve, Evaluation, Goal, Measured, Outcome
from shoal.study.search import Search, State, rung_ends
from shoal.study.steps_to_result import Reach
from study.brute_force import steps as by_words
from study.search_worlds import World, at_random, carry_out, everybody, worlds

GOAL = Goal(metric="val/error", value=0.3)


def agrees_with_the_definition(world: World, search: Search) -> None:
    grid = [p for p in world.grid if p <= world.budget.steps]
    result = search.result()
    hardest = by_words(world.plain(), _better(world.goals[-1]), world.budget.feasible, grid)
    expected = {"reached": State.DONE, "not reached": State.DONE, "short": State.SHORT}
    assert result.state is expected[hardest[0]]
    for goal, found in zip(world.goals, result.goals, strict=True):
        kind, step, winner = by_words(world.plain(), _better(goal), world.budget.feasible, grid)
        if kind == "reached" and (hardest[0] != "short" or step <= hardest[1]):
            assert (found.reach, found.steps, found.winner) == (Reach.REACHED, step, winner)
        elif hardest[0] == "short":
            assert (found.reach, found.steps) == (Reach.SHORT, None)
        else:
            assert (found.reach, found.steps, found.end) == (Reach.NOT_REACHED, None, grid[-1])


def _better(goal: Goal) -> Callable[[float], bool]:
    return lambda value: value < goal.value


@settings(max_examples=300)
@given(worlds(), st.integers(0, 2**32))
def test_s_is_the_definition_whatever_the_order(world: World, seed: int) -> None:
    lockstep, shuffled = world.search(), world.search()
    carry_out(world, lockstep, everybody)
    carry_out(world, shuffled, at_random(random.Random(seed)))
    agrees_with_the_definition(world, lockstep)
    # Not only S: winners, draws, ends, outcomes and what counts of each trial.
    assert lockstep.result() == shuffled.result()


@settings(max_examples=150)
@given(worlds(), st.integers(0, 2**32))
def test_interruptions_change_nothing(world: World, seed: int) -> None:
    """Rebuilt at random moments, from curves that lost a random part of their ends."""
    rng = random.Random(seed)
    whole, broken = world.search(), world.search()
    carry_out(world, whole, everybody)
    steps = 0
    while not broken.finished:
        wanted = broken.wanted()
        for trial in at_random(rng)(wanted):
            broken.add(trial, world.evaluation(trial, wanted[trial]))
        steps += 1
        if rng.random() < 0.3 and steps < 500:
            kept = {
                trial: Curve(
                    evaluations=curve.evaluations[: len(curve.evaluations) - rng.randint(0, 2)]
                )
                for trial, curve in broken.curves.items()
            }
            broken = world.search(curves=kept)
    assert broken.result() == whole.result()


@settings(max_examples=150)
@given(worlds(), st.integers(0, 2**32))
def test_whatever_else_was_trained_counts_for_nothing(world: World, seed: int) -> None:
    """An engine that trains on in chunks, beyond what was wanted."""
    rng = random.Random(seed)
    exact, eager = world.search(), world.search()
    carry_out(world, exact, everybody)
    grid = eager.grid
    while not eager.finished:
        trial = rng.choice(sorted(eager.targets()))
        for _ in range(rng.randint(1, 6)):
            curve = eager.curves.get(trial, Curve())
            over = bool(curve.evaluations) and (
                curve.evaluations[-1].diverged or curve.step == grid[-1]
            )
            if over:
                break
            step = grid[grid.index(curve.step) + 1] if curve.evaluations else 0
            eager.add(trial, world.evaluation(trial, step))
    assert eager.result() == exact.result()


@settings(max_examples=150)
@given(worlds())
def test_the_early_stop_and_the_full_audit_say_the_same(world: World) -> None:
    early = world.search()
    full = world.search(dataclasses.replace(world.budget, full=True))
    cost, full_cost = carry_out(world, early, everybody), carry_out(world, full, everybody)
    audit, result = full.result(), early.result()
    agrees_with_the_definition(world, early)
    assert [(g.steps, g.winner, g.previous) for g in result.goals if g.steps is not None] == [
        (g.steps, g.winner, g.previous)
        for g, e in zip(audit.goals, result.goals, strict=True)
        if e.steps is not None
    ]
    assert cost <= full_cost
    # The full audit trains every member to the budget or its divergence, and nothing more.
    last = full.grid[-1]
    for trial in range(audit.members):
        curve = full.curves[trial]
        assert curve.step == last or curve.evaluations[-1].diverged
    assert full_cost == full.trial_steps


@settings(max_examples=150)
@given(worlds())
def test_work_is_bounded_by_the_horizon(world: World) -> None:
    """No trial goes beyond min(T, max(kappa S, one rung)); trials that never enter P(S) are few."""
    search = world.search()
    spent = carry_out(world, search, everybody)
    result = search.result()
    assert spent == search.trial_steps >= result.trial_steps
    steps = result.goals[-1].steps
    rungs = rung_ends(search.grid, world.budget.kappa)
    if steps is not None:
        assert result.end <= max(steps, world.budget.kappa * steps)
        rung = next(r for r in rungs if r >= steps)
        assert all(c.step <= max(result.end, rung) for c in search.curves.values())
    for trial in range(result.members):
        curve = search.curves[trial]
        outcome = result.outcomes[trial]
        if result.state is State.DONE:
            assert curve.diverged_at is not None or curve.step >= result.end
        assert outcome.outcome is search.outcome(trial)


def _run(
    values: list[list[float]], *, diverge: dict[int, int] | None = None, **budget: object
) -> Search:
    grid = tuple(range(len(values[0])))
    search = Search(
        [GOAL],
        Budget(**({"steps": grid[-1], "kappa": 1.0} | budget)),  # type: ignore[arg-type]
        grid,
    )
    while not search.finished:
        for trial, step in search.wanted().items():
            at = (diverge or {}).get(trial)
            search.add(
                trial,
                Evaluation(
                    step=step,
                    metrics={"val/error": Measured(values[trial][step])},
                    diverged=at == step,
                ),
            )
    return search


def test_a_replacement_starts_at_step_0_and_catches_up() -> None:
    values = [[0.9] * 8, [0.9] * 8, [0.9] * 8]
    search = Search([GOAL], Budget(feasible=2, draws=3, steps=7), tuple(range(8)))
    assert search.draws_needed == 2
    assert search.wanted() == {0: 0, 1: 0} and search.targets() == {0: 7, 1: 7}
    for step in range(6):
        for trial in (0, 1):
            search.add(
                trial,
                Evaluation(
                    step=step,
                    metrics={"val/error": Measured(0.9)},
                    diverged=(trial, step) == (0, 5),
                ),
            )
    assert search.draws_needed == 3
    assert search.wanted() == {1: 6, 2: 0}
    assert _run(values, feasible=2, draws=3, diverge={0: 5}).result().members == 3


def test_nothing_is_trained_beyond_a_sure_crossing() -> None:
    fast = [0.9, 0.9, 0.2, 0.9, 0.9, 0.9]
    slow = [0.9] * 6
    search = Search([GOAL], Budget(feasible=2, draws=2, steps=5, kappa=1.0), tuple(range(6)))
    for step in range(3):
        search.add(0, Evaluation(step=step, metrics={"val/error": Measured(fast[step])}))
    assert search.targets() == {1: 2}
    result = _run([fast, slow], feasible=2, draws=2).result()
    assert (result.goals[0].steps, result.end, result.trial_steps) == (2, 2, 4)


def test_all_diverge_at_step_0() -> None:
    values = [[0.9] * 4] * 5
    search = _run(values, feasible=2, draws=5, diverge=dict.fromkeys(range(5), 0))
    result = search.result()
    assert (result.state, result.end, result.members) == (State.SHORT, 0, 5)
    assert result.goals[0].feasible == 0 and result.goals[0].reach is Reach.SHORT
    assert {o.outcome for o in result.outcomes} == {Outcome.DIVERGED}
    assert search.summary()["state"] == "short"


def test_a_goal_met_at_step_0_ends_at_once() -> None:
    result = _run([[0.1, 0.9], [0.9, 0.9]], feasible=2, draws=2).result()
    assert (result.goals[0].steps, result.end, result.trial_steps) == (0, 0, 0)


def test_the_last_row_names_everything() -> None:
    search = _run([[0.9, 0.2, 0.1], [0.9, 0.9, 0.9]], feasible=2, draws=2, kappa=2.0)
    assert search.summary() == {
        "state": "done",
        "end": 2,
        "draws": 2,
        "goals": [
            {
                "metric": "val/error",
                "value": 0.3,
                "reach": "reached",
                "steps": 1,
                "previous": 0,
                "winner": 0,
                "every_second": 2,
                "confirmed_by_next": 1,
                "test": None,
            }
        ],
    }
    assert [o.outcome for o in search.result().outcomes] == [
        Outcome.REACHED,
        Outcome.NOT_REACHED,
    ]


def test_while_running_the_result_is_censored_at_the_last_common_step() -> None:
    search = Search([GOAL], Budget(feasible=1, draws=1, steps=5), tuple(range(6)))
    assert search.result().goals[0].end == -1
    for step in range(3):
        search.add(0, Evaluation(step=step, metrics={"val/error": Measured(0.9)}))
    result = search.result()
    assert (result.state, result.end, result.outcomes) == (State.RUNNING, 2, ())
    assert (search.summary()["state"], search.summary()["end"]) == ("running", None)
    assert (result.goals[0].reach, result.goals[0].end) == (Reach.UNFINISHED, 2)
    assert not search.finished


def test_rungs_are_at_most_kappa_apart_or_one_grid_step() -> None:
    grid = [0, 1, 2, 5, 10, 20, 22, 30, 60, 100, 101, 200]
    assert rung_ends(grid, 3) == [20, 60, 101, 200]
    assert rung_ends(grid, 1) == [20, 22, 30, 60, 100, 101, 200]
    assert rung_ends([0, 3], 2) == [3]
    assert rung_ends([0], 2) == [0]
    assert rung_ends([0, 50, 100], 1) == [0, 50, 100]


def test_what_cannot_be_is_refused() -> None:
    search = Search([GOAL], Budget(feasible=1, draws=2, steps=5), (0, 1, 2))
    at_0 = Evaluation(step=0, metrics={})
    with pytest.raises(UsageError, match="at most 2 trials"):
        search.add(2, at_0)
    search.add(0, at_0)
    with pytest.raises(UsageError, match="next grid point is 1"):
        search.add(0, at_0)
    search.add(0, Evaluation(step=1, metrics={}, diverged=True))
    with pytest.raises(UsageError, match="diverged at step 1"):
        search.add(0, Evaluation(step=2, metrics={}))
    with pytest.raises(UsageError, match="starts at step 0"):
        Search([GOAL], Budget(feasible=1, draws=2, steps=5), (1, 2))


def test_goals_are_kept_easiest_first() -> None:
    goals = [Goal(metric="val/e", value=v) for v in (0.1, 0.3, 0.2)]
    budget = Budget(feasible=1, draws=1, steps=5)
    assert [g.value for g in Search(goals, budget, (0, 1)).goals] == [0.3, 0.2, 0.1]
    up = [Goal(metric="val/e", value=v, larger_is_better=True) for v in (0.1, 0.3, 0.2)]
    assert [g.value for g in Search(up, budget, (0, 1)).goals] == [0.1, 0.2, 0.3]


def test_trial_steps_saved_are_real_on_a_search_with_planted_truth() -> None:
    """One fast trial among slow ones: the early stop at kappa = 3 takes a small part of the budget."""
    grid = tuple(range(0, 1001))
    values = [[0.2 if step >= 31 * (1 + t) else 0.9 for step in grid] for t in range(10)]
    early = _run(values, feasible=10, draws=10, kappa=3.0)
    full = _run(values, feasible=10, draws=10, full=True)
    assert early.result().goals[0].steps == full.result().goals[0].steps == 31
    assert early.trial_steps == early.result().trial_steps == 10 * 93
    assert full.trial_steps == 10 * 1000
