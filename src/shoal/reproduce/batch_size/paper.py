"""The judges of the paper's own claims C1-C8, over all studies that were run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.reproduce.batch_size import criteria
from shoal.reproduce.batch_size.digits import agree, small_ratios, usable
from shoal.reproduce.batch_size.studies import HEAVY, NESTEROV, SGD
from shoal.reproduce.claims import Claim, Verdict
from shoal.study.analysis import StudyAnalysis
from shoal.study.fit import TradeoffFit

HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class NamedFit:
    """One fitted curve, or the lack of one.

    Args:
        name: what it is of, e.g. ``"digits sgd 0.13"``.
        fit: None where nothing could be fitted.
    """

    name: str
    fit: TradeoffFit | None

    @property
    def failure(self) -> str:
        """Why the three regimes are not shown by it; empty if they are."""
        if self.fit is None:
            return f"{self.name}: too few batches reached the goal"
        if not self.fit.is_usable:
            return f"{self.name}: {self.fit.refusal}"
        if self.fit.lack_of_fit is not None and self.fit.lack_of_fit.is_evident:
            return f"{self.name}: form refuted, p = {self.fit.lack_of_fit.p_value:.1g}"
        return ""


def fits_of(name: str, analysis: StudyAnalysis) -> list[NamedFit]:
    """Every curve and goal of a study."""
    return [
        NamedFit(name=f"{name} {curve} {goal.goal.value:g}", fit=fit)
        for goal in analysis.goals
        for curve, fit in goal.fits.items()
    ]


def judge_form(fits: Sequence[NamedFit], seeds: Sequence[int]) -> Claim:
    """C1."""
    failures = [fit.failure for fit in fits if fit.failure]
    return criteria.C1.judge(
        holds=not failures,
        value=f"{len(fits) - len(failures)} of {len(fits)} curves" + _listed(failures),
        seeds=seeds,
    )


def judge_spread(fits: Mapping[str, TradeoffFit | None], seeds: Sequence[int]) -> Claim:
    """C2, on one optimizer's fit per workload."""
    known = {name: fit for name, fit in fits.items() if fit is not None and fit.is_usable}
    if len(known) < criteria.WORKLOADS_NEEDED:
        return criteria.C2.not_run()
    low = min(known, key=lambda name: known[name].b_crit.value)
    high = max(known, key=lambda name: known[name].b_crit.value)
    first, last = known[low].b_crit, known[high].b_crit
    return criteria.C2.judge(
        holds=first.profile.high < last.profile.low and last.value > 2 * first.value,
        value={f"{name} B_crit": fit.b_crit.value for name, fit in known.items()},
        seeds=seeds,
    )


def judge_momentum(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    """C3."""
    sgd = usable(analysis, SGD)
    value: dict[str, float] = {}
    holds = sgd is not None
    for curve in (HEAVY, NESTEROV):
        ratios = small_ratios(analysis, curve)
        fit = usable(analysis, curve)
        ratio = math.nan if fit is None or sgd is None else fit.b_crit.value / sgd.b_crit.value
        value[f"{curve} largest S ratio at B <= 4"] = max(ratios.values())
        value[f"{curve} smallest"] = min(ratios.values())
        value[f"{curve} B_crit ratio"] = ratio
        holds = holds and agree(ratios) and ratio >= criteria.CRITICAL_RATIO_AT_LEAST
    return criteria.C3.judge(holds=holds, value=value, seeds=seeds)


def judge_rules(analysis: StudyAnalysis, seeds: Sequence[int]) -> Claim:
    """C4."""
    value: dict[str, float] = {}
    holds, away = True, False
    for curve in (SGD, HEAVY, NESTEROV):
        rows = analysis.main.exponents.get(curve, ())
        found = next((row for row in rows if row.parameter == "effective_lr"), None)
        if found is None or found.interval is None:
            return criteria.C4.judge(holds=False, value=None, seeds=seeds)
        low, high = found.interval
        value |= {f"{curve} exponent": found.value, f"{curve} from": low, f"{curve} to": high}
        holds = holds and found.value > 0 and high < 1
        away = away or not low <= HALF <= high
    return criteria.C4.judge(holds=holds and away, value=value, seeds=seeds)


def judge_same_as(claim: Claim) -> Claim:
    """C6, which P9 decides."""
    if claim.verdict is Verdict.NOT_RUN:
        return criteria.C6.not_run()
    return criteria.C6.judge(
        holds=claim.verdict is Verdict.SHOWN, value=claim.value, seeds=claim.seeds
    )


def judge_sizes(
    whole: TradeoffFit | None,
    quarter: TradeoffFit | None,
    narrow: TradeoffFit | None,
    wide: TradeoffFit | None,
    seeds: Sequence[int],
) -> Claim:
    """C8, on fully connected nets; not run unless all four fits may be used."""
    fits = (whole, quarter, narrow, wide)
    if any(fit is None or not fit.is_usable for fit in fits):
        return criteria.C8.not_run()
    values = [fit.b_crit.value for fit in fits if fit is not None]
    data, width = values[1] / values[0], values[2] / values[3]
    within = criteria.BORDERS_WITHIN
    return criteria.C8.judge(
        holds=1 / within <= data <= within and width >= 1,
        value={"quarter / all data": data, "narrow / wide": width},
        seeds=seeds,
    )


def _listed(failures: Sequence[str]) -> str:
    shown = list(itertools.islice(failures, 3))
    more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
    return f"; {'; '.join(shown)}{more}" if shown else ""
