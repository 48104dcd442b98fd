"""The tables of a study's page, as texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.report.wording import count, decimal
from shoal.study.analysis import GoalAnalysis, StudyAnalysis
from shoal.study.edges import Place
from shoal.study.finding import number
from shoal.study.fit import Estimate, TradeoffFit
from shoal.study.intervals import Interval
from shoal.study.noise_scale import NoiseScale
from shoal.study.regimes import Border


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as texts; the first column is words, the others numbers.

    Args:
        id: of its section.
        title: above it.
        head: names of the columns.
        rows: texts, as many as ``head``.
        note: under it; may be empty.
    """

    id: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def steps_table(goal: GoalAnalysis) -> Table:
    """S and S_conf at every curve and batch."""
    confirmed = {(c.curve, c.global_batch): c for c in goal.confirmed}
    rows: list[list[str]] = []
    for entry in goal.cells:
        place = (entry.curve, entry.global_batch)
        found = [r for r in goal.rows if (r.curve, r.global_batch) == place]
        again = confirmed.get(place)
        flags = sorted({flag for r in found for flag in r.flags})
        rows.append(
            [
                entry.curve,
                f"{entry.global_batch:,}",
                _centre(entry.centre, entry.censored_at),
                _between(entry.interval),
                _range(entry.lowest, entry.highest, entry.censored_at),
                f"{len(entry.steps)} of {len(found)}",
                count(again.steps) if again and again.steps is not None else "–",
                decimal(again.ratio, 3) if again and again.ratio is not None else "–",
                _mean_of([r.steps_every_second for r in found]),
                _mean_of([r.steps_confirmed_by_two for r in found]),
                "; ".join(flags) or "–",
            ]
        )
    return Table(
        id="steps",
        title="Steps to the goal",
        head=[
            "Curve",
            "Batch",
            "S",
            "95 % interval",
            "Least to most",
            "Reached",
            "S_conf",
            "S_conf / S",
            "On every 2nd point",
            "Two in a row",
            "Flags",
        ],
        rows=rows,
        note=(
            "S is the best of many trials and partly luck; predict time with S_conf. It lies between two "
            "points of the evaluation grid; two columns show what a coarser grid, or a second "
            "evaluation that agrees, would make of it (geometric means over the repeats)."
        ),
    )


def _centre(value: float | None, censored: Sequence[int]) -> str:
    if value is not None:
        return count(value)
    return f"> {count(min(censored))}" if censored else "–"


def _between(interval: Interval | None) -> str:
    return f"{count(interval.low)} to {count(interval.high)}" if interval else "–"


def _range(low: float | None, high: float | None, censored: Sequence[int]) -> str:
    if low is None or high is None:
        return "–"
    return f"{count(low)} to " + (
        count(high) if math.isfinite(high) else f"> {count(min(censored))}"
    )


def _mean_of(values: Sequence[int | None]) -> str:
    known = [value for value in values if value]
    if not known or len(known) < len(values):
        return "–"
    return count(math.exp(sum(map(math.log, known)) / len(known)))


def fit_table(goal: GoalAnalysis) -> Table:
    """The fit and the borders of every curve."""
    rows: list[list[str]] = []
    reasons: list[str] = []
    for curve in goal.curves:
        fit, found = goal.fits[curve], goal.regimes[curve]
        if fit is None:
            reasons.append(f"{curve}: fewer than three batches reached the goal.")
            rows.append([curve, *["–"] * 10])
            continue
        if fit.refusal:
            reasons.append(f"{curve}: {fit.refusal}.")
        reasons += [f"Left out: {key} ({why})." for key, why in fit.left_out.items()]
        rows.append(
            [
                curve,
                *(_estimate(e) for e in (fit.s_min, fit.e_min, fit.b_crit)),
                _border(found.perfect_to),
                _border(found.worth_to),
                _border(found.nothing_beyond),
                count(found.observed_perfect_to or math.nan),
                count(found.observed_least_from or math.nan),
                f"{fit.sigma:.2f}",
                _lack(fit),
            ]
        )
    return Table(
        id="fit",
        title="The trade-off",
        head=[
            "Curve",
            "S_min",
            "E_min (samples)",
            "B_crit",
            "Perfect to",
            "Worth to",
            "Nothing beyond",
            "Observed: perfect to",
            "Observed: least from",
            "Spread of ln S",
            "Lack of fit",
        ],
        rows=rows,
        note=" ".join(
            [
                "S = S_min (1 + B_crit/B). Perfect to 1.2 B0 + 0.2 B_crit (20 % more samples than at the "
                "smallest batch), worth having to 2 B_crit (the last doubling that saves a quarter of the "
                "steps), nothing beyond 10 B_crit (steps within 10 % of the least). In brackets 95 % profile "
                "intervals. Observed are the raw rules without a fit, which noise moves by octaves.",
                *reasons,
            ]
        ),
    )


def _estimate(estimate: Estimate) -> str:
    low, high = estimate.profile
    upper = number(high) if math.isfinite(high) else "…"
    return f"{number(estimate.value)} ({number(low)} to {upper})"


def _border(border: Border | None) -> str:
    if border is None:
        return "not resolved"
    if math.isinf(border.value):
        return "> largest batch"
    low, high = border.interval
    return (
        f"{number(border.value)} ({number(low)} to {number(high) if math.isfinite(high) else '…'})"
    )


def _lack(fit: TradeoffFit) -> str:
    if fit.lack_of_fit is None:
        return "–"
    word = "evident" if fit.lack_of_fit.is_evident else "none seen"
    return f"{word} (p = {fit.lack_of_fit.p_value:.2g})"


def comparison_table(goal: GoalAnalysis) -> Table:
    """Every pair of curves: the ratio, its interval, the verdict."""
    rows: list[list[str]] = []
    for (one, two), found in goal.comparisons.items():
        for entry in found:
            verdict = str(entry.verdict)
            if entry.repeats_needed:
                verdict += f" ({entry.repeats_needed} repeats would tell)"
            if entry.note:
                verdict += f": {entry.note}"
            between = entry.interval
            rows.append(
                [
                    f"{one} / {two}",
                    entry.what,
                    decimal(entry.ratio, 3) if entry.ratio is not None else "–",
                    f"{between.low:.2f} to {between.high:.2f}" if between else "–",
                    verdict,
                ]
            )
    return Table(
        id="comparison",
        title="Different, equivalent, or not resolved",
        head=["Curves", "What", "Ratio", "95 % interval", "Verdict"],
        rows=rows,
        note=(
            "Different: the 95 % interval excludes 1. Equivalent: the 90 % interval is within 1/1.25 to 1.25. "
            "One comparison in twenty is called different by chance."
        ),
    )


def validation_table(study: StudyAnalysis) -> Table:
    """What another validation set of the same size would do to S."""
    return Table(
        id="validation",
        title="Another validation set",
        head=[
            "Curve",
            "Samples",
            "Whole curve moves by (sd of ln S)",
            "Left between searches",
            "Searches",
        ],
        rows=[
            [n.curve, f"{n.samples:,}", f"{n.common:.2f}", f"{n.between:.2f}", str(n.searches)]
            for n in study.curve_noise
        ],
        note=(
            "Validation samples drawn again with replacement, the same draw for all searches. What moves the "
            "whole curve leaves borders where they are. With 225 (1 - p)/p samples at a goal of error p the "
            "first number is near 0.1."
        ),
    )


def noise_scale_table(goal: GoalAnalysis, scales: Mapping[str, NoiseScale]) -> Table:
    """The gradient noise scale beside the measured B_crit."""
    rows: list[list[str]] = []
    for curve, scale in scales.items():
        fit = goal.fits.get(curve)
        usable = fit is not None and fit.is_usable
        verdict = "no usable B_crit to compare with"
        if fit is not None and usable:
            verdict = (
                "within a decade" if scale.foretells(fit.b_crit.value) else "not within a decade"
            )
        rows.append(
            [
                curve,
                number(scale.value) if math.isfinite(scale.value) else "–",
                f"{decimal(scale.interval.low, 2)} to {decimal(scale.interval.high, 2)}",
                number(fit.b_crit.value) if fit is not None and usable else "–",
                str(scale.measurements),
                verdict,
            ]
        )
    return Table(
        id="noise-scale",
        title="The gradient noise scale",
        head=["Curve", "B_simple", "95 % interval", "B_crit", "Measurements", "Verdict"],
        rows=rows,
        note=(
            "Trace of the gradient's covariance over its squared norm, averaged over equal steps of log loss "
            "along the winner of a search. It foretells B_crit to an order of magnitude at "
            "best; with momentum it is a proxy."
        ),
    )


def edge_table(goal: GoalAnalysis) -> Table:
    """Where the best settings lie in their ranges."""
    rows = [
        [
            curve,
            f"{batch:,}",
            edge.parameter,
            edge.words if edge.place in (Place.BOUNDARY, Place.STABILITY) else str(edge.place),
            f"{edge.median:.2f}" if math.isfinite(edge.median) else "–",
            {None: "–", True: "yes", False: "no"}[edge.is_insensitive],
            str(edge.crossers),
        ]
        for (curve, batch), edges in goal.edges.items()
        for edge in edges
    ]
    return Table(
        id="edges",
        title="Ranges",
        head=[
            "Curve",
            "Batch",
            "Parameter",
            "Place",
            "Median of the best",
            "Insensitive",
            "Trials there",
        ],
        rows=rows,
        note=(
            "The median coordinate of the five best trials, 0 and 1 being the ends of the range. At a boundary "
            "a better setting may lie outside: shoal study recenter proposes the next range."
        ),
    )
