"""P11: the analysis held against the second derivation, number by number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.reproduce.batch_size import criteria, rederive
from shoal.reproduce.batch_size.full import SAMPLE_BUDGETS, STEP_BUDGETS
from shoal.reproduce.batch_size.rederive import Derived, Place, RawTrial
from shoal.reproduce.batch_size.studies import METRIC, Measured
from shoal.reproduce.claims import Claim
from shoal.study.analysis import GoalAnalysis
from shoal.study.budgets import best_errors, complete_trials

_SHOWN = 3


@dataclass(kw_only=True)
class Differences:
    """What was compared.

    Args:
        searches: searches derived again.
        numbers: numbers compared.
        found: the differences, in words.
    """

    searches: int = 0
    numbers: int = 0
    found: list[str] = field(default_factory=list[str])

    def equal(self, what: str, ours: object, theirs: object, within: float = 0.0) -> None:
        """Count a number, and note it where the two ways do not agree."""
        self.numbers += 1
        if isinstance(ours, float) and isinstance(theirs, float):
            same = math.isclose(ours, theirs, rel_tol=max(within, 1e-12))
        else:
            same = ours == theirs
        if not same:
            self.found.append(f"{what}: {ours} and again {theirs}")


def judge_rederived(differences: Differences, seeds: Sequence[int]) -> Claim:
    """P11."""
    words = f"{differences.numbers} numbers of {differences.searches} searches"
    if differences.found:
        words += f"; {len(differences.found)} differ: " + "; ".join(differences.found[:_SHOWN])
    return criteria.P11.judge(
        holds=differences.numbers > 0 and not differences.found, value=words, seeds=seeds
    )


def check(
    study: Measured, differences: Differences, instead: Mapping[tuple[str, int], Measured]
) -> None:
    """Derive a study's numbers again from its rows.

    Args:
        study: what the analysis says.
        differences: counts and notes.
        instead: for curves and batches whose searches came from another study, that study.
    """
    raw = rederive.read_rows(study.directory)
    for place, other in instead.items():
        again = rederive.read_rows(other.directory)
        raw |= {key: trials for key, trials in again.items() if key[:2] == place}
    spec = study.spec.canonical()
    hardest = min(goal.value for goal in study.spec.goals)
    for goal in study.analysis.goals:
        derived = {
            place: rederive.derive(trials, spec, goal.goal.metric, goal.goal.value, hardest)
            for place, trials in raw.items()
            if place[2] >= 0
        }
        _check_searches(goal, derived, differences)
        _check_rates(goal, derived, raw, differences)
        _check_fits(study, goal, derived, differences)
    differences.searches += len(study.analysis.main.summaries)
    if study.spec.budget.full:
        _check_budgets(study, raw, differences)


def _check_searches(
    goal: GoalAnalysis, derived: Mapping[Place, Derived], differences: Differences
) -> None:
    for summary in goal.summaries:
        key = summary.key
        mine = derived[key.curve, key.global_batch, key.repeat]
        what = f"{key}, goal {goal.goal.value:g}"
        differences.equal(f"S of {what}", summary.steps, mine.steps)
        differences.equal(f"winner of {what}", summary.result.winner, mine.winner)
        differences.equal(f"point before S of {what}", summary.result.previous, mine.previous)
        differences.equal(f"short, {what}", summary.is_short, mine.is_short)
        if not summary.is_short:
            differences.equal(f"end of {what}", summary.end, mine.end)
            best = [(t.crossing, t.trial.id) for t in summary.best(len(summary.trials))]
            differences.equal(f"crossers of {what}", best, list(mine.best))


def _check_rates(
    goal: GoalAnalysis,
    derived: Mapping[Place, Derived],
    raw: Mapping[Place, Mapping[int, RawTrial]],
    differences: Differences,
) -> None:
    for optimum in goal.optima:
        place = (optimum.curve, optimum.global_batch)
        keys = sorted(key for key in derived if key[:2] == place)
        again = rederive.best_rate([derived[k] for k in keys], [raw[k] for k in keys])
        differences.equal(
            f"best effective lr of {place}, goal {goal.goal.value:g}",
            optimum.effective_lr,
            again,
            1e-9,
        )


def _check_fits(
    study: Measured, goal: GoalAnalysis, derived: Mapping[Place, Derived], differences: Differences
) -> None:
    for curve, fit in goal.fits.items():
        if fit is None:
            continue
        limited = _limited(curve, derived)
        points = [
            (place[1], float(one.end), math.inf)
            if one.steps is None
            else (place[1], float(one.previous or 0), float(one.steps))
            for place, one in derived.items()
            if place[0] == curve and not one.is_short and place not in limited and one.steps != 0
        ]
        what = f"{curve}, goal {goal.goal.value:g}"
        differences.equal(f"searches in the fit of {what}", fit.searches, len(points))
        widths = [
            math.log(upto / above) for _, above, upto in points if 0 < above < upto < math.inf
        ]
        least = max(0.25 * statistics.median(widths), 1e-3) if widths else 1e-2
        samples = study.analysis.settings.train_samples
        ours = rederive.log_likelihood(
            points, fit.s_min.value, fit.b_crit.value, fit.sigma, samples
        )
        best = rederive.climb(points, samples, least)[0]
        slack = criteria.REDERIVED_WITHIN * max(1.0, abs(best))
        differences.equal(f"fit of {what} is at its optimum", ours >= best - slack, True)


def _limited(curve: str, derived: Mapping[Place, Derived]) -> set[Place]:
    """Searches at the edge of their range, in the words of the rule."""
    limited: set[Place] = set()
    cells = {place[:2] for place in derived if place[0] == curve}
    for cell in cells:
        keys = sorted(place for place in derived if place[:2] == cell)
        known = [key for key in keys if len(derived[key].best) >= 5]
        axes = range(len(derived[keys[0]].drawn[0][0]))
        for axis in axes:
            medians = {key: _median_of_best(derived[key], axis) for key in known}
            if not medians:
                continue
            side = _side(statistics.median(medians.values()), known, derived, axis)
            for key, median in medians.items():
                if side and _side(median, [key], derived, axis) == side:
                    limited.add(key)
    return limited


def _median_of_best(search: Derived, axis: int) -> float:
    return statistics.median(search.drawn[i][0][axis] for _, i in search.best[:5])


def _side(
    median: float, keys: Sequence[Place], derived: Mapping[Place, Derived], axis: int
) -> str | None:
    """The side whose edge is too near; None inside, or where most draws beyond diverged."""
    if 0.1 <= median <= 0.9:
        return None
    side = "upper" if median > 0.9 else "lower"
    beyond = [
        diverged
        for key in keys
        for unit, diverged in derived[key].drawn
        if (unit[axis] > median if side == "upper" else unit[axis] < median)
    ]
    return None if len(beyond) >= 3 and sum(beyond) > len(beyond) / 2 else side


def _check_budgets(
    study: Measured, raw: Mapping[Place, Mapping[int, RawTrial]], differences: Differences
) -> None:
    for data in study.tables:
        key = data.key
        column = study.tables.metric(key, METRIC)
        members = complete_trials(data, study.analysis.settings)
        trials = raw[key.curve, key.global_batch, key.repeat]
        for unit, budgets in (("steps", STEP_BUDGETS), ("samples", SAMPLE_BUDGETS)):
            rows = best_errors(
                column, key, METRIC, members, budgets, "steps" if unit == "steps" else "samples"
            )
            for row in rows:
                most = row.budget / (1 if unit == "steps" else key.global_batch)
                again = rederive.best_error(trials, METRIC, study.spec.budget.feasible, most)
                differences.equal(
                    f"best error of {key} in {row.budget} {unit}", row.value, again, 1e-9
                )
