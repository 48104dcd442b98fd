"""Everything a study says, in one value: from the stored tables and the spec, without retraining.

:func:`analyse` runs the parts for every goal and curve: S and its table, intervals, edges, fit, regimes,
optima, expected best, comparisons, and budgets where the study was full. Each part can be used alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.study import budgets as budgets_
from shoal.study.budgets import BestError, ScatterPoint, Unit
from shoal.study.compare import Comparison, compare_fits, compare_steps
from shoal.study.confirmed import Confirmed, confirmed
from shoal.study.curve_table import CurveRow, curve_table
from shoal.study.edges import Edge, cell_edges, edge_limited, exit_status, search_edges, void
from shoal.study.expected_best import (
    BudgetStep,
    ExpectedBest,
    budget_sensitivity,
    expected_best,
    still_falls,
)
from shoal.study.finding import finding
from shoal.study.fit import RESAMPLES, TradeoffFit, fit_curve
from shoal.study.intervals import RepeatedSteps, repeated_steps
from shoal.study.optima import Exponent, Optimum, exponents, optima
from shoal.study.records import CONFIRM, Goal, SearchKey
from shoal.study.regimes import Regimes, regimes
from shoal.study.search_summary import AnalysisSettings, SearchSummary, summarise
from shoal.study.spec import StudySpec
from shoal.study.tables import StudyTables
from shoal.study.validation_noise import CurveNoise, ValidationNoise, validation_noise


@dataclass(frozen=True, kw_only=True)
class GoalAnalysis:
    """What the study says about one goal; mappings are by curve, or by (curve, global batch).

    Args:
        goal: the goal.
        summaries: every search.
        rows: the tidy table.
        cells: S at every curve and batch, with intervals.
        edges: over the repeats of each curve and batch.
        edge_limited: searches at a boundary, and why that is said.
        void: searches whose S measures the range of their decay.
        fits: None where nothing can be fitted.
        regimes: of every curve.
        findings: two sentences per curve.
        optima: best settings at each curve and batch.
        exponents: over all batches.
        rising: exponents over the batches up to B_crit, for curves whose fit is usable.
        expected: expected best of fewer trials.
        confirmed: S_conf.
        comparisons: of S and of the fits, for every pair of curves.
    """

    goal: Goal
    summaries: tuple[SearchSummary, ...]
    rows: tuple[CurveRow, ...]
    cells: tuple[RepeatedSteps, ...]
    edges: Mapping[tuple[str, int], Sequence[Edge]]
    edge_limited: Mapping[SearchKey, str]
    void: tuple[SearchKey, ...]
    fits: Mapping[str, TradeoffFit | None]
    regimes: Mapping[str, Regimes]
    findings: Mapping[str, tuple[str, str]]
    optima: tuple[Optimum, ...]
    exponents: Mapping[str, Sequence[Exponent]]
    rising: Mapping[str, Sequence[Exponent]]
    expected: tuple[ExpectedBest, ...]
    confirmed: tuple[Confirmed, ...]
    comparisons: Mapping[tuple[str, str], Sequence[Comparison]]

    def of(self, curve: str) -> list[SearchSummary]:
        """One curve's searches."""
        return [s for s in self.summaries if s.key.curve == curve]

    def cells_of(self, curve: str) -> list[RepeatedSteps]:
        """One curve's cells, by rising batch."""
        return [c for c in self.cells if c.curve == curve]

    @property
    def curves(self) -> list[str]:
        """Names of the curves, sorted."""
        return sorted({s.key.curve for s in self.summaries})


@dataclass(frozen=True, kw_only=True)
class StudyAnalysis:
    """What the study says.

    Args:
        name: the study's.
        settings: goals, budgets, grid.
        goals: one analysis per goal, in the order of the settings; the first one is the headline's.
        parameters: searched parameters by curve, in the order of the unit coordinates.
        sensitivity: S from fewer trials, for the first goal.
        still_falls: curves and batches where S fell by more than 10 % over the last half of the trials.
        best_errors: under step and sample budgets, for the goal's metric; empty unless full.
        scatter: every trial of the first goal, cut at its search's end.
        validation: S of the first goal's searches under other validation sets; empty where no per-sample
            outcomes of the goal's metric are on file.
        curve_noise: what that does to whole curves.
    """

    name: str
    settings: AnalysisSettings
    goals: tuple[GoalAnalysis, ...]
    parameters: Mapping[str, Sequence[str]]
    sensitivity: tuple[BudgetStep, ...]
    still_falls: tuple[tuple[str, int], ...]
    best_errors: tuple[BestError, ...]
    scatter: tuple[ScatterPoint, ...] = ()
    validation: tuple[ValidationNoise, ...] = ()
    curve_noise: tuple[CurveNoise, ...] = ()

    @property
    def main(self) -> GoalAnalysis:
        """The first goal's."""
        return self.goals[0]

    @property
    def exit_status(self) -> int:
        """3 if an optimum lies at the boundary of its range, else 0."""
        return exit_status(self.main.edges)


def settings_of(spec: StudySpec, *, train_samples: int | None) -> AnalysisSettings:
    """What the analysis needs of a spec.

    Args:
        spec: the study's.
        train_samples: n of its workload, which draws without replacement; None for an oracle that draws
            with replacement.
    """
    return AnalysisSettings(
        goals=spec.goals,
        budget=spec.budget,
        grid=spec.grid.points(spec.budget.steps),
        train_samples=train_samples,
    )


def searched_parameters(spec: StudySpec) -> dict[str, list[str]]:
    """By curve, what was searched, in the order of the unit coordinates."""
    return {name: list(curve.space) for name, curve in spec.curves.items()}


def analyse(
    tables: StudyTables,
    settings: AnalysisSettings,
    *,
    name: str = "",
    parameters: Mapping[str, Sequence[str]] | None = None,
    resamples: int = RESAMPLES,
) -> StudyAnalysis:
    """Analyse a study, finished or under way.

    Args:
        tables: of the study.
        settings: see :func:`settings_of`.
        name: of the study.
        parameters: see :func:`searched_parameters`; without it nothing is said about edges.
        resamples: of the fits' bootstrap.

    Raises:
        UsageError: no search has begun.
    """
    searches = [d for d in tables if d.key.repeat != CONFIRM and d.trials]
    confirmations = [d for d in tables if d.key.repeat == CONFIRM]
    if not searches:
        raise UsageError("study = without a search that has begun; run it first: shoal study run")
    names = parameters or {curve: [] for curve in tables.curves()}
    goals: list[GoalAnalysis] = []
    for goal in settings.goals:
        summaries = [summarise(data, goal, settings) for data in searches]
        found = confirmed(confirmations, goal, summaries)
        goals.append(_analyse_goal(goal, summaries, settings, names, found, resamples))
    first = goals[0]
    sensitivity = [
        step for data in searches for step in budget_sensitivity(data, first.goal, settings)
    ]
    noises, curve_noise = validation_noise(
        zip(searches, first.summaries, strict=True),
        {data.key: tables.samples(data.key) for data in searches},
        settings,
    )
    return StudyAnalysis(
        name=name,
        settings=settings,
        goals=tuple(goals),
        parameters={curve: tuple(values) for curve, values in names.items()},
        sensitivity=tuple(sensitivity),
        still_falls=tuple(_falling(sensitivity, first)),
        best_errors=tuple(_best_errors(tables, settings, first)),
        scatter=tuple(p for s in first.summaries for p in budgets_.scatter(s)),
        validation=tuple(noises),
        curve_noise=tuple(curve_noise),
    )


def _analyse_goal(
    goal: Goal,
    summaries: Sequence[SearchSummary],
    settings: AnalysisSettings,
    parameters: Mapping[str, Sequence[str]],
    found: Sequence[Confirmed],
    resamples: int,
) -> GoalAnalysis:
    limited = edge_limited(summaries, parameters)
    voided = void(summaries, parameters)
    reasons = limited | dict.fromkeys(voided, "void: the decay's length is at its lower edge")
    cells = repeated_steps(summaries, void=voided)
    curves = sorted({s.key.curve for s in summaries})
    fits = {
        curve: fit_curve(
            [s for s in summaries if s.key.curve == curve],
            edge_limited=reasons,
            train_samples=settings.train_samples,
            resamples=resamples,
        )
        for curve in curves
    }
    of = {curve: [c for c in cells if c.curve == curve] for curve in curves}
    borders = {curve: regimes(fits[curve], of[curve]) for curve in curves}
    single = {s.key: search_edges(s, parameters[s.key.curve]) for s in summaries}
    return GoalAnalysis(
        goal=goal,
        summaries=tuple(summaries),
        rows=tuple(curve_table(summaries, edges=single, void=voided, confirmations=found)),
        cells=tuple(cells),
        edges=cell_edges(summaries, parameters),
        edge_limited=limited,
        void=tuple(voided),
        fits=fits,
        regimes=borders,
        findings={curve: finding(borders[curve], fits[curve], of[curve]) for curve in curves},
        optima=tuple(optima(summaries)),
        exponents=exponents(summaries),
        rising=_rising(summaries, fits),
        expected=tuple(expected_best(summaries)),
        confirmed=tuple(found),
        comparisons=_comparisons(summaries, fits, curves),
    )


def _rising(
    summaries: Sequence[SearchSummary], fits: Mapping[str, TradeoffFit | None]
) -> dict[str, list[Exponent]]:
    """Exponents up to B_crit, where the best effective learning rate still has reason to rise."""
    found: dict[str, list[Exponent]] = {}
    for curve, fit in fits.items():
        if fit is not None and fit.is_usable:
            own = [s for s in summaries if s.key.curve == curve]
            found |= exponents(own, largest=fit.b_crit.value)
    return found


def _comparisons(
    summaries: Sequence[SearchSummary],
    fits: Mapping[str, TradeoffFit | None],
    curves: Sequence[str],
) -> dict[tuple[str, str], list[Comparison]]:
    found: dict[tuple[str, str], list[Comparison]] = {}
    for one, two in itertools.combinations(curves, 2):
        rows = compare_steps(
            [s for s in summaries if s.key.curve == one],
            [s for s in summaries if s.key.curve == two],
        )
        first, second = fits[one], fits[two]
        if first is not None and second is not None:
            rows += compare_fits(first, second)
        found[(one, two)] = rows
    return found


def _falling(sensitivity: Sequence[BudgetStep], analysis: GoalAnalysis) -> list[tuple[str, int]]:
    by_key = {str(s.key): (s.key.curve, s.key.global_batch) for s in analysis.summaries}
    by_cell: dict[tuple[str, int], list[BudgetStep]] = {}
    for step in sensitivity:
        by_cell.setdefault(by_key[step.key], []).append(step)
    return [place for place, rows in by_cell.items() if still_falls(rows)]


def _best_errors(
    tables: StudyTables, settings: AnalysisSettings, analysis: GoalAnalysis
) -> list[BestError]:
    if settings.grid is not None and not settings.budget.full:
        return []
    metric = analysis.goal.metric
    usual: dict[Unit, list[int]] = budgets_.usual_budgets(analysis.summaries)
    found: list[BestError] = []
    for summary in analysis.summaries:
        if summary.is_short:
            continue
        data = tables[summary.key]
        if data.end is None and settings.grid is not None:
            continue
        members = budgets_.complete_trials(data, settings)
        column = tables.metric(summary.key, metric)
        for unit, budgets in usual.items():
            found += budgets_.best_errors(
                column,
                summary.key,
                metric,
                members,
                budgets,
                unit,
                larger_is_better=analysis.goal.larger_is_better,
            )
    return found
