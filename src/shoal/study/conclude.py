"""What a study says, finished or not: its rows into columns, its analysis, its page, and a few lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.study.analysis import StudyAnalysis, analyse, searched_parameters, settings_of
from shoal.study.directory import StudyDirectory
from shoal.study.noise_scale import NoiseScale
from shoal.study.records import Goal, SearchKey
from shoal.study.run import open_study
from shoal.study.spec import StudySpec
from shoal.study.tables import read_study


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What is said in the end.

    Args:
        directory: of the study.
        analysis: everything.
        report: the page.
        searches: of the study.
        done: how many of them are finished.
        warnings: what a reader must know, one line each.
    """

    directory: Path
    analysis: StudyAnalysis
    report: Path
    searches: int
    done: int
    warnings: tuple[str, ...]

    @property
    def not_to_be_used(self) -> bool:
        """Whether some result must not be used as it is: an optimum at the boundary of its range."""
        return self.analysis.exit_status != 0

    def lines(self) -> list[str]:
        """For people: per goal and curve what to do and how sure it is, then warnings and the page."""
        said: list[str] = []
        for goal in self.analysis.goals:
            head = f"{goal.goal.metric} below {goal.goal.value:g}"
            for curve, (lead, sureness) in goal.findings.items():
                said += [f"{curve}, {head}: {lead}", f"  {sureness}"]
        if self.done < self.searches:
            said.append(
                f"{self.done} of {self.searches} searches are finished; the rest may change this"
            )
        return [*said, *self.warnings, str(self.report)]

    def to_dict(self) -> dict[str, object]:
        """As one JSON document."""
        return {
            "study": self.analysis.name,
            "directory": str(self.directory),
            "report": str(self.report),
            "searches": self.searches,
            "done": self.done,
            "warnings": list(self.warnings),
            "not_to_be_used": self.not_to_be_used,
            "goals": [
                {
                    "metric": goal.goal.metric,
                    "value": goal.goal.value,
                    "findings": {curve: list(said) for curve, said in goal.findings.items()},
                    "points": [
                        {
                            "curve": row.curve,
                            "global_batch": row.global_batch,
                            "repeat": row.repeat,
                            "reach": row.reach,
                            "steps": row.steps,
                            "censored_at": row.censored_at,
                            "steps_confirmed": row.steps_confirmed,
                            "winner": row.winner,
                            "lr": row.lr,
                            "momentum": row.momentum,
                            "flags": list(row.flags),
                        }
                        for row in goal.rows
                    ],
                }
                for goal in self.analysis.goals
            ],
        }


def conclude(
    directory: StudyDirectory, *, goals: Sequence[Goal] = (), noise_scale: bool = False
) -> Conclusion:
    """Compact what runners have written, analyse it, and write the page with its figures and tables.

    Args:
        directory: of the study.
        goals: others than the study's, between its easiest and its hardest: its rows answer them exactly.
        noise_scale: replay a winner of each curve of plain SGD to measure the gradient noise scale beside
            B_crit; needs the workload and its data.

    Raises:
        UsageError: nothing was measured yet, or a part is not installed.
        OSError: the page cannot be written.
    """
    from shoal.ledger.columnar import compact
    from shoal.report.study_page import write_study_report

    compact(directory.path)
    directory, spec, analysis = analysed(directory.path, goals=goals)
    scales = noise_scales(spec, analysis) if noise_scale else None
    keys = spec.searches()
    ends = {key: end for key in keys if (end := directory.end_of(key)) is not None}
    return Conclusion(
        directory=directory.path,
        analysis=analysis,
        report=write_study_report(analysis, directory.path, noise_scales=scales),
        searches=len(keys),
        done=len(ends),
        warnings=(*warnings(ends), *missing_rows(ends, analysis)),
    )


def noise_scales(spec: StudySpec, analysis: StudyAnalysis) -> dict[str, NoiseScale]:
    """The noise scale along one winner of each curve of plain SGD: of the batch next to its B_crit.

    Raises:
        UsageError: there is no such curve with a search that reached the first goal.
    """
    from shoal.study.noise_replay import noise_scale_of_winner

    found: dict[str, NoiseScale] = {}
    for name, curve in spec.curves.items():
        reached = [s for s in analysis.main.of(name) if s.steps]
        if curve.optimizer != "sgd" or not reached:
            continue
        fit = analysis.main.fits.get(name)
        at = fit.b_crit.value if fit is not None and fit.b_crit.value > 0 else 1.0
        nearest = min(reached, key=lambda s: (abs(math.log(s.key.global_batch / at)), s.key.repeat))
        found[name] = noise_scale_of_winner(spec.resolved, curve, nearest)
    if not found:
        raise UsageError(
            "noise_scale = nothing to measure it along; it takes a curve of plain sgd that reached the first "
            "goal; add [curves.sgd], or leave it out"
        )
    return found


def conclude_archive(
    directory: Path,
    *,
    goals: Sequence[Goal],
    study: str | None = None,
    trials: int | None = None,
    split_by: str | None = None,
    train_samples: int | None = None,
    out: Path | None = None,
) -> Conclusion:
    """Analyse one study of an imported archive, and write its page with figures and tables.

    Args:
        directory: what ``shoal study import`` made.
        goals: all of one metric; the first is the headline's.
        study: which, ``[group/]dataset/model``; None where there is only one.
        trials: N per search; see :func:`~shoal.study.archive_analysis.analyse_archive`.
        split_by: a parameter whose values become curves of their own.
        train_samples: n, where samples were drawn without replacement.
        out: where the page goes; ``directory`` when None.

    Raises:
        UsageError: no goal, no such study, or too few trials.
    """
    from shoal.report.study_page import write_study_report
    from shoal.study.archive_analysis import analyse_archive

    analysis = analyse_archive(
        directory,
        study,
        goals=goals,
        trials=trials,
        split_by=split_by,
        train_samples=train_samples,
    )
    searches = len(analysis.main.summaries)
    return Conclusion(
        directory=directory,
        analysis=analysis,
        report=write_study_report(analysis, out or directory),
        searches=searches,
        done=searches,
        warnings=(),
    )


def is_archive(directory: Path) -> bool:
    """Whether ``directory`` holds an import rather than a study."""
    return (directory / "tables" / "import.json").is_file()


def parse_goal(text: str) -> Goal:
    """``METRIC<VALUE``, or ``METRIC>VALUE`` where larger is better.

    Raises:
        UsageError: anything else.

    Example:
        >>> parse_goal("val/classification_error<0.1").value
        0.1
    """
    for sign in "<>":
        metric, found, value = text.partition(sign)
        if found:
            try:
                return Goal(metric=metric, value=float(value), larger_is_better=sign == ">")
            except ValueError as error:
                if isinstance(error, UsageError):
                    raise
    raise UsageError(
        f"goal = {text!r}; write METRIC<VALUE, for example 'val/classification_error<0.1'"
    )


def analysed(
    path: Path, *, goals: Sequence[Goal] = ()
) -> tuple[StudyDirectory, StudySpec, StudyAnalysis]:
    """A study and what its rows say so far.

    Args:
        path: of the study.
        goals: others than its own; see :func:`conclude`.

    Raises:
        UsageError: there is no study, nothing was measured yet, or its rows cannot answer a goal.
    """
    directory, spec = open_study(path)
    content: Any = directory.spec()
    settings = settings_of(spec, train_samples=content["train_samples"])
    if goals:
        for goal in goals:
            _check_answerable(spec, goal)
        settings = replace(settings, goals=tuple(goals))
    analysis = analyse(
        read_study(directory.path),
        settings,
        name=spec.name,
        parameters=searched_parameters(spec),
    )
    return directory, spec, analysis


def missing_rows(ends: Mapping[SearchKey, Any], analysis: StudyAnalysis) -> list[str]:
    """Lines about finished searches whose rows no longer give what their runner found: rows were lost.

    Args:
        ends: of the finished searches.
        analysis: from the rows, of any goals; those that a search was run for are compared.
    """
    said: list[str] = []
    for goal in analysis.goals:
        for summary in goal.summaries:
            end = ends.get(summary.key)
            for found in end["goals"] if end is not None else ():
                if found["value"] == goal.goal.value and found.get("steps") != summary.steps:
                    said.append(
                        f"{summary.key}: its runner found {found.get('steps')} steps to {goal.goal.value:g}, "
                        f"the stored rows give {summary.steps}; rows are missing; restore rows/ from a copy or "
                        f"remove searches/{summary.key} and run the study again"
                    )
    return said


def _check_answerable(spec: StudySpec, goal: Goal) -> None:
    """Evaluations were cut short above the easiest goal, and trials at the hardest one."""
    own = [g.value for g in spec.goals]
    low, high = min(own), max(own)
    if goal.metric != spec.goals[0].metric or goal.larger_is_better:
        raise UsageError(
            f"goal = {goal.metric}; the study was run for {spec.goals[0].metric}, smaller is better; give a "
            "value of that"
        )
    if not spec.budget.full and not low <= goal.value <= high:
        raise UsageError(
            f"goal = {goal.value:g}; the study's rows answer goals from {low:g} to {high:g}; run one with "
            "that goal among its own, or with --full"
        )


def warnings(ends: dict[SearchKey, Any]) -> list[str]:
    """Lines about searches whose result is none or no use.

    Args:
        ends: of the finished searches.
    """
    said: list[str] = []
    for key, end in ends.items():
        closest = end.get("closest")
        missed = [goal["value"] for goal in end["goals"] if goal.get("steps") is None]
        if end["state"] == "short":
            said.append(
                f"{key}: short: {end['diverged']} of {end['trials']} trials diverged and the draw limit came "
                "first; lower the largest lr or raise draw_limit"
            )
        elif missed and closest:
            said.append(
                f"{key}: nothing came below {max(missed):g}; the best ended at {closest['value']:.4g} at "
                f"step {closest['step']:,} (trial {closest['trial']}); give an easier goal or more steps"
            )
        if any(goal.get("steps") == 0 for goal in end["goals"]):
            said.append(f"{key}: a goal was met at step 0, before any training; give a harder one")
    return said
