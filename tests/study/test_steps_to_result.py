"""S by its closed form against the words of its definition, and its corner cases by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.study.records import Curve, Evaluation, Goal, Measured
from shoal.study.steps_to_result import Reach, StepsToResult, steps_to_result
from study.brute_force import steps as by_words

GRID = (0, 1, 2, 4, 8, 16, 32)
GOAL = Goal(metric="val/error", value=0.3)


def curve(values: str, grid: tuple[int, ...] = GRID) -> Curve:
    """One letter a grid point: ``.`` worse, ``=`` exactly the goal, ``+`` better, ``n`` NaN, ``>`` a
    bound, ``D`` worse and diverged, ``B`` better and diverged."""
    meaning = {".": 0.9, "=": 0.3, "+": 0.2, "n": math.nan, ">": 0.9, "D": 0.9, "B": 0.2}
    return Curve(
        evaluations=[
            Evaluation(
                step=step,
                metrics={
                    "val/error": Measured(meaning[letter], ">=" if letter == ">" else "="),
                    "test/error": Measured(meaning[letter] + 0.01 * step),
                },
                diverged=letter in "DB",
            )
            for step, letter in zip(grid, values, strict=False)
        ]
    )


def result(*values: str, n: int = 2, draws: int | None = None, **more: object) -> StepsToResult:
    return steps_to_result(
        [curve(v) for v in values],
        GOAL,
        feasible=n,
        grid=GRID,
        draws=draws,
        **more,  # type: ignore[arg-type]
    )


def test_the_first_strictly_better_evaluation_counts_and_need_not_last() -> None:
    found = result(".=..+..", "...+...")
    assert (found.reach, found.steps, found.previous, found.winner) == (Reach.REACHED, 4, 2, 1)
    assert found.test_metric == Measured(0.2 + 0.04)
    assert found.words == "4 steps" and found.is_too_coarse


def test_a_tie_goes_to_the_lowest_id() -> None:
    assert result("....+..", "....+..").winner == 0
    assert result(".......", "....+..", "....+..", n=3).winner == 1


@pytest.mark.parametrize("worse", ["=======", "nnnnnnn", ">>>>>>>", "......."])
def test_ties_with_the_goal_nan_and_bounds_are_not_better(worse: str) -> None:
    found = result(worse, worse)
    assert (found.reach, found.steps, found.end) == (Reach.NOT_REACHED, None, 32)
    assert found.words == "not reached, censored at 32"
    assert found.feasible == 2 and not found.is_too_coarse


def test_a_goal_met_at_step_0() -> None:
    found = result("+......", ".......")
    assert (found.steps, found.previous, found.winner) == (0, None, 0)


def test_a_diverged_trial_is_replaced_and_its_replacement_counts_from_then_on() -> None:
    # Trial 2 crossed at 1, but is one of the two feasible trials only from step 4 on.
    found = result("...D", ".......", ".++....", draws=4)
    assert (found.steps, found.previous, found.winner, found.crossing) == (4, 2, 2, 1)
    assert (found.draws, found.feasible) == (3, 2)
    assert (found.every_second, found.confirmed) == (8, 4)


def test_a_trial_that_diverges_after_crossing_stays_feasible_and_one_at_the_crossing_does_not() -> (
    None
):
    assert result(".+D", ".......", "+......", draws=3).steps == 1
    late = result("...B", ".......", ".....+.", draws=3)
    assert (late.steps, late.winner) == (16, 2)


def test_short_when_the_draws_run_out() -> None:
    found = result("..D", ".D", ".......", draws=3)
    assert (found.reach, found.end, found.draws, found.feasible) == (Reach.SHORT, 1, 3, 1)
    assert found.words == "short: 1 feasible trials in 3 draws"
    assert result("D", "D", n=1).reach is Reach.SHORT
    # Crossing before the draws run out is a result; crossing at that very step is none.
    assert result(".+.....", "..D", draws=2).steps == 1
    assert result("..+....", "..D", draws=2).reach is Reach.SHORT


def test_unfinished_curves_are_censored_at_the_last_common_step() -> None:
    found = result("....", "......", draws=3)
    assert (found.reach, found.end) == (Reach.UNFINISHED, 4)
    assert result("....", "......+", draws=3).reach is Reach.UNFINISHED
    # What is unfinished beyond S does not matter.
    assert result("..+", "...", draws=3).steps == 2
    assert result(n=2, draws=2).end == -1
    # A missing replacement is unfinished from the divergence on.
    missing = result("...D", ".......", draws=3)
    assert (missing.reach, missing.end) == (Reach.UNFINISHED, 2)


def test_crossings_and_divergences_beyond_the_end_do_not_count() -> None:
    curves = [curve(".....+."), curve("......D")]
    found = steps_to_result(curves, GOAL, feasible=2, grid=GRID[:5])
    assert (found.reach, found.end) == (Reach.NOT_REACHED, 8)


def test_every_second_point_and_confirmation() -> None:
    # Points 0, 2, 8, 32 are every second one.
    found = result(".+.++..", ".......")
    assert (found.steps, found.every_second, found.confirmed) == (1, 8, 4)
    lonely = result(".+.+.+.", ".......")
    assert (lonely.every_second, lonely.confirmed) == (None, None)
    assert result("......+", ".......").confirmed is None


def test_larger_is_better() -> None:
    goal = Goal(metric="val/error", value=0.5, larger_is_better=True)
    found = steps_to_result([curve("+.")], goal, feasible=1, grid=(0, 1))
    assert found.steps == 1


@pytest.mark.parametrize("grid", [(), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_a_grid_that_does_not_rise_from_0_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="starts at step 0 and rises"):
        steps_to_result([curve("..")], GOAL, feasible=1, grid=grid)


@pytest.mark.parametrize("numbers", [(0, 3), (3, 2), (1, 1)])
def test_numbers_that_contradict_each_other_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="raise draws"):
        steps_to_result(
            [curve(".."), curve("..")], GOAL, feasible=numbers[0], draws=numbers[1], grid=GRID
        )


LETTERS = st.text(alphabet="....=+n>D", min_size=len(GRID), max_size=len(GRID))


@settings(max_examples=400)
@given(st.lists(LETTERS, min_size=1, max_size=8), st.integers(1, 4))
def test_the_closed_form_is_the_definition(letters: list[str], n: int) -> None:
    cut = [v[: v.index("D") + 1] if "D" in v else v for v in letters]
    curves = [curve(v) for v in cut]
    if len(curves) < n:
        return
    found = steps_to_result(curves, GOAL, feasible=n, grid=GRID)
    plain = [
        [
            (e.step, math.inf if e.metrics["val/error"].bound != "=" else v, e.diverged)
            for e in c.evaluations
            for v in [e.metrics["val/error"].value]
        ]
        for c in curves
    ]
    kind, step, winner = by_words(plain, lambda value: value < 0.3, n, GRID)
    assert found.reach == kind
    if kind == "reached":
        assert (found.steps, found.winner) == (step, winner)
    elif kind == "short":
        assert max([-1, *(p for p in GRID if p < (step or 0))]) == found.end
    else:
        assert found.end == step
