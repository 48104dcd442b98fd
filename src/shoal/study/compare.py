"""Two curves compared: different, equivalent, or not resolved, never just a ratio.

    different      the 95 % interval of the ratio excludes 1
    equivalent     the 90 % interval of the ratio lies inside [1/1.25, 1.25]
    not resolved   neither; with how many repeats it would take

A ratio can differ from 1 significantly and yet lie within the margin; then it is called different, and
``is_within_margin`` says the rest. Curves searched with unequal budgets are refused: the best of 100
trials beats the best of 50. Shapes are compared after dividing by the fitted E_min, not by S at one batch.

Source: section 9.10 of the project's notes on Shallue et al. 2019; the two-sided equivalence test is
Schuirmann's (1987), with the 1.25 of bioequivalence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from shoal.errors import UsageError
from shoal.study.fit import Estimate, TradeoffFit
from shoal.study.intervals import Interval, PooledSpread, pooled_spread, rounding_sd
from shoal.study.search_summary import AnalysisSettings, SearchSummary, cells

MARGIN = 1.25
MOST_REPEATS = 1000


class Verdict(StrEnum):
    """What can be said about a ratio."""

    DIFFERENT = "different"
    EQUIVALENT = "equivalent"
    NOT_RESOLVED = "not resolved"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The ratio of two quantities.

    Args:
        what: in words, e.g. "S at 64".
        ratio: first over second; None where one has no value.
        interval: at 95 %; None where the spread is not known.
        narrow: at 90 %.
        verdict: see the module's head.
        is_within_margin: whether the 90 % interval lies inside the margin.
        repeats_needed: repeats of each that would settle it if the ratio and the spread are as measured;
            None where it is settled or cannot be told.
        note: why there is no verdict; empty otherwise.
    """

    what: str
    ratio: float | None
    interval: Interval | None
    narrow: Interval | None
    verdict: Verdict
    is_within_margin: bool = False
    repeats_needed: int | None = None
    note: str = ""


def require_equal_budgets(first: AnalysisSettings, second: AnalysisSettings) -> None:
    """Refuse to compare searches that looked differently hard.

    Raises:
        UsageError: the numbers of feasible trials, the step budgets or the grids differ.
    """
    a, b = first.budget, second.budget
    if a.feasible != b.feasible:
        raise UsageError(
            f"trials = {a.feasible} and {b.feasible}; S is the best of that many, so only equal numbers "
            "compare; re-analyse the larger study with the smaller one's trials"
        )
    if a.steps != b.steps:
        raise UsageError(
            f"max_steps = {a.steps} and {b.steps}; one search was given up earlier; compare with equal "
            "max_steps"
        )
    if first.grid != second.grid:
        raise UsageError(
            "grid = two different ones; the evaluation grid is part of what S means; compare with equal "
            "grids"
        )


def compare_steps(
    first: Iterable[SearchSummary], second: Iterable[SearchSummary]
) -> list[Comparison]:
    """S of two curves, at every batch both have.

    The spread of log S is pooled over all batches of both curves, so two repeats are enough for a verdict.

    Args:
        first: one curve's summaries, of one goal.
        second: the other's, of the same goal.

    Raises:
        UsageError: the searches had unequal numbers of feasible trials, or goals differ.
    """
    one, two = list(first), list(second)
    if len({s.goal for s in (*one, *two)}) > 1:
        raise UsageError("summaries = of several goals; compare at one goal")
    counts = {s.feasible for s in (*one, *two)}
    if len(counts) > 1:
        raise UsageError(
            f"trials = {sorted(counts)}; S is the best of that many, so only equal numbers compare; "
            "re-analyse with the smallest"
        )
    groups_one, groups_two = _logs(one), _logs(two)
    censored = {(s.key.curve, s.key.global_batch) for s in (*one, *two) if s.steps is None}
    spread = pooled_spread([*groups_one.values(), *groups_two.values()])
    if spread is not None:
        spread = PooledSpread(max(spread.sd, rounding_sd([*one, *two])), spread.freedom)
    pairs = [(a, b) for a in groups_one for b in groups_two if a[1] == b[1]]
    return [
        _compare_cells(a[1], groups_one[a], groups_two[b], spread, censored & {a, b})
        for a, b in pairs
    ]


def _logs(rows: Sequence[SearchSummary]) -> dict[tuple[str, int], list[float]]:
    return {
        place: [math.log(max(s.steps, 1)) for s in group if s.steps is not None]
        for place, group in cells(rows).items()
    }


def _compare_cells(
    batch: int,
    one: Sequence[float],
    two: Sequence[float],
    spread: PooledSpread | None,
    censored: set[tuple[str, int]],
) -> Comparison:
    what = f"S at {batch}"
    if not one or not two or censored:
        who = " and ".join(sorted(name for name, _ in censored)) or "one of them"
        return _unsettled(what, f"{who} did not reach the goal in every search")
    difference = float(np.mean(one) - np.mean(two))
    if spread is None:
        return _unsettled(what, "no batch was searched twice", ratio=math.exp(difference))
    sd, freedom = spread
    error = sd * math.sqrt(1 / len(one) + 1 / len(two))
    return judge(what, difference, error, freedom, sd=sd)


def compare_estimates(what: str, first: Estimate, second: Estimate, freedom: int) -> Comparison:
    """Two fitted quantities, by the widths of their profile intervals on the log scale.

    Args:
        what: in words, e.g. "B_crit".
        first: e.g. ``fit.b_crit``.
        second: of the other curve.
        freedom: degrees of freedom: searches less 2, of the smaller fit.
    """
    difference = math.log(first.value / second.value)
    errors = [_log_error(first, freedom), _log_error(second, freedom)]
    if not all(map(math.isfinite, errors)):
        return _unsettled(what, "an interval is open", ratio=math.exp(difference))
    return judge(what, difference, math.hypot(*errors), freedom)


def compare_fits(first: TradeoffFit, second: TradeoffFit) -> list[Comparison]:
    """E_min, S_min and B_crit of two fits; refused fits give E_min only, which small batches fix."""
    freedom = max(min(first.searches, second.searches) - 2, 1)
    found = [compare_estimates("E_min", first.e_min, second.e_min, freedom)]
    if first.is_usable and second.is_usable:
        found.append(compare_estimates("S_min", first.s_min, second.s_min, freedom))
        found.append(compare_estimates("B_crit", first.b_crit, second.b_crit, freedom))
    return found


def _log_error(estimate: Estimate, freedom: int) -> float:
    from scipy.stats import t as student

    low, high = estimate.profile
    if low <= 0 or math.isinf(high):
        return math.inf
    return math.log(high / low) / 2 / float(student.ppf(0.975, freedom))


def judge(
    what: str, difference: float, error: float, freedom: int, *, sd: float | None = None
) -> Comparison:
    """The verdict on a difference of logs.

    Args:
        what: in words.
        difference: of the logs.
        error: its standard error, >= 0.
        freedom: degrees of freedom of ``error``.
        sd: of one search's log, to say how many repeats it would take; unknown by default.
    """
    from scipy.stats import t as student

    wide = float(student.ppf(0.975, freedom)) * error
    narrow = float(student.ppf(0.95, freedom)) * error
    inside = abs(difference) + narrow < math.log(MARGIN)
    if abs(difference) > wide:
        verdict = Verdict.DIFFERENT
    else:
        verdict = Verdict.EQUIVALENT if inside else Verdict.NOT_RESOLVED
    needed = None
    if verdict is Verdict.NOT_RESOLVED and sd is not None:
        needed = repeats_needed(difference, sd)
    return Comparison(
        what=what,
        ratio=math.exp(difference),
        interval=Interval(math.exp(difference - wide), math.exp(difference + wide)),
        narrow=Interval(math.exp(difference - narrow), math.exp(difference + narrow)),
        verdict=verdict,
        is_within_margin=inside,
        repeats_needed=needed,
    )


def repeats_needed(difference: float, sd: float) -> int | None:
    """The least R per side at which a true ``difference`` of logs would be settled either way.

    Args:
        difference: as measured.
        sd: of one search's log.

    Returns:
        R, or None beyond 1000.

    Example:
        >>> repeats_needed(0.0, 0.2) < repeats_needed(0.15, 0.2)
        True
    """
    from scipy.stats import t as student

    repeats = np.arange(2, MOST_REPEATS + 1)
    error = sd * np.sqrt(2 / repeats)
    freedom = 2 * repeats - 2
    differs = abs(difference) > student.ppf(0.975, freedom) * error
    equals = abs(difference) + student.ppf(0.95, freedom) * error < math.log(MARGIN)
    settled = np.flatnonzero(differs | equals)
    return int(repeats[settled[0]]) if len(settled) else None


def normalised(fit: TradeoffFit, steps: float) -> float:
    """S over the fitted E_min: 1/B where scaling is perfect, whatever the workload."""
    return steps / fit.e_min.value


def _unsettled(what: str, note: str, ratio: float | None = None) -> Comparison:
    return Comparison(
        what=what,
        ratio=ratio,
        interval=None,
        narrow=None,
        verdict=Verdict.NOT_RESOLVED,
        note=note,
    )
