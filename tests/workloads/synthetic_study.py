"""Searches on made-up curves carried out in memory, without engine or files."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.study import StudySpec
from shoal.study.analysis import StudyAnalysis, analyse, searched_parameters, settings_of
from shoal.study.design import draws
from shoal.study.records import SearchKey
from shoal.study.search import Search, State
from shoal.study.tables import SearchData, StudyTables
from shoal.workloads.synthetic_curves import SyntheticCurves


def carry_out(study: StudySpec, curves: SyntheticCurves, key: SearchKey) -> SearchData:
    """One search."""
    search = Search(study.goals, study.budget, study.grid.points(study.budget.steps))
    drawn = draws(study, key, 0, study.budget.draws)
    while not search.finished:
        for number, step in search.wanted().items():
            search.add(number, curves.evaluation(drawn[number], step))
    result = search.result()
    return SearchData(
        key=key,
        trials=drawn[: result.members],
        curves=[search.curves[number] for number in range(result.members)],
        outcomes=[o.outcome for o in result.outcomes],
        end=result.end,
        state="short" if result.state is State.SHORT else "done",
        draws=result.members,
    )


def analysed(study: StudySpec, truths: Mapping[str, SyntheticCurves]) -> StudyAnalysis:
    """A study whose curves have planted truths, by name."""
    tables = StudyTables.of(carry_out(study, truths[key.curve], key) for key in study.searches())
    return analyse(
        tables,
        settings_of(study, train_samples=None),
        name=study.name,
        parameters=searched_parameters(study),
        resamples=0,
    )
