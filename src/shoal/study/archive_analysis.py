"""The analysis of imported archives: other people's trials, each evaluated at steps of its own.

S is then the released code's: the first crossing by the first N complete trials by id. What needs a common
grid or a search's own early stop (S on every second point, unfinished searches) is left out.

Source: Shallue et al. 2019, the released loader and figures, as restated in sections 1.3 and 4 of the project's
notes; one value of a parameter at a time is how its label-smoothing figure slices a search.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.errors import UsageError
from shoal.study.analysis import StudyAnalysis, analyse
from shoal.study.archived import read_archive
from shoal.study.fit import RESAMPLES
from shoal.study.records import Budget, Goal, Outcome, SearchKey, Trial
from shoal.study.search_summary import AnalysisSettings
from shoal.study.tables import SearchData, StudyTables

MOST_TRIALS = 100
"""What the paper takes where there are as many."""
_COMPLETE = (Outcome.REACHED, Outcome.NOT_REACHED)


def analyse_archive(
    directory: str | os.PathLike[str],
    study: str | None = None,
    *,
    goals: Sequence[Goal],
    trials: int | None = None,
    split_by: str | None = None,
    train_samples: int | None = None,
    resamples: int = RESAMPLES,
) -> StudyAnalysis:
    """Analyse one study of an imported archive.

    Args:
        directory: of the import.
        study: which; None where there is only one.
        goals: the first is the headline's; all of one metric.
        trials: N per search; by default 100, or the fewest complete ones any search has if that is less, so
            that all searches compare.
        split_by: a parameter; each of its values becomes a curve of its own (``label_smoothing``).
        train_samples: n, where samples were drawn without replacement.
        resamples: of the fits' bootstrap.

    Raises:
        UsageError: no such study; a search with fewer complete trials than ``trials``, or none; a
            ``split_by`` that trials do not have.
    """
    if not goals:
        raise UsageError(
            "goals = none; an archive holds measurements and no goals; give one: --goal 'val/...<0.1'"
        )
    tables = read_archive(directory, study, goal=goals[0])
    parameters = _parameters(tables)
    name = str(tables.spec.get("name", ""))
    if split_by is not None:
        tables, parameters = _split(tables, split_by, parameters)
    fewest, where = min((_complete(data), str(data.key)) for data in tables)
    count = min(MOST_TRIALS, fewest) if trials is None else trials
    if count < 1 or count > fewest:
        raise UsageError(
            f"trials = {count}; {where} has {fewest} complete ones, and equal numbers are compared; use 1 to "
            f"{fewest}"
        )
    last = max(curve.step for data in tables for curve in data.curves)
    draws = max(len(data.trials) for data in tables)
    settings = AnalysisSettings(
        goals=tuple(goals),
        budget=Budget(feasible=count, draws=max(draws, count), steps=max(last, 1), full=True),
        grid=None,
        train_samples=train_samples,
    )
    return analyse(tables, settings, name=name, parameters=parameters, resamples=resamples)


def _complete(data: SearchData) -> int:
    return sum(outcome in _COMPLETE for outcome in data.outcomes)


def _parameters(tables: StudyTables) -> dict[str, list[str]]:
    """By curve, the names of the searched parameters in the order of the unit coordinates."""
    found: dict[str, list[str]] = {}
    curves = tables.spec.get("curves", {})
    assert isinstance(curves, Mapping)
    for curve in tables.curves():
        spaces = curves[curve]["space_at"]
        orders = {tuple(space) for space in spaces.values()}
        # Where the spaces of a curve hold different parameters, no coordinate means one thing.
        found[curve] = list(orders.pop()) if len(orders) == 1 else []
    return found


def _split(
    tables: StudyTables, split_by: str, parameters: Mapping[str, Sequence[str]]
) -> tuple[StudyTables, dict[str, list[str]]]:
    """Each value of a parameter as a curve, ``CURVE_NAME=VALUE``; ids and order are kept."""
    found: list[SearchData] = []
    names: dict[str, list[str]] = {}
    for data in tables:
        values = {t.parameters.get(split_by) for t in data.trials}
        if None in values:
            raise UsageError(
                f"split_by = {split_by!r}; trials of {data.key} have {', '.join(data.trials[0].parameters)}; "
                "name one of these"
            )
        for value in sorted(v for v in values if v is not None):
            curve = f"{data.key.curve}_{split_by}={value:g}"
            key = replace(data.key, curve=curve)
            chosen = [i for i, t in enumerate(data.trials) if t.parameters[split_by] == value]
            names[curve] = list(parameters[data.key.curve])
            found.append(
                replace(
                    data,
                    key=key,
                    trials=[_moved(data.trials[i], key) for i in chosen],
                    curves=[data.curves[i] for i in chosen],
                    outcomes=[data.outcomes[i] for i in chosen],
                    engines=(),
                    attempts=(),
                    draws=len(chosen),
                )
            )
    return StudyTables.of(found, tables.spec), names


def _moved(trial: Trial, key: SearchKey) -> Trial:
    return replace(trial, search=key)
