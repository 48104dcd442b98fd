"""Engines and evaluators for the searches of one study, made as each needs them."""

from __future__ import annotations

from shoal.study.directory import StudyDirectory
from shoal.study.engines.build import build_engine
from shoal.study.engines.contest import Choice, contest
from shoal.study.engines.contract import Engine
from shoal.study.engines.task import Task
from shoal.study.evaluation import Evaluator
from shoal.study.plan import assumed_steps
from shoal.study.plan_probe import step_seconds
from shoal.study.records import CONFIRM, SearchKey
from shoal.study.spec import StudySpec


class Workshop:
    """Makes what searches are carried out with.

    Args:
        directory: of the study, where the chosen engines are noted.
        spec: of the study.
    """

    def __init__(self, directory: StudyDirectory, spec: StudySpec) -> None:
        self._directory = directory
        self._spec = spec

    def engine(self, key: SearchKey) -> Engine:
        """A fresh engine for a search: the one noted for its curve and batch, or the winner of a contest."""
        task = Task(
            workload=self._spec.resolved,
            curve=self._spec.curves[key.curve],
            global_batch=key.global_batch,
        )
        return build_engine(task, self._choice(key, task).candidate)

    def measuring(self, key: SearchKey) -> Evaluator:
        """A fresh evaluator for a search."""
        full = self._spec.budget.full and key.repeat != CONFIRM
        return Evaluator(self._spec.resolved, self._spec.goals, full=full)

    def _choice(self, key: SearchKey, task: Task) -> Choice:
        noted = self._directory.engine_of(key.curve, key.global_batch)
        if noted is None:
            choice = contest(
                task, search_seconds=self._expected_seconds(key), trials=self._spec.budget.feasible
            )
            values = {"engine": choice.candidate.engine, **choice.as_json()}
            # Another runner may have been faster: one engine per curve and batch, whoever measured it.
            noted = self._directory.write_engine(key.curve, key.global_batch, values)
        return Choice.from_json(noted)

    def _expected_seconds(self, key: SearchKey) -> float:
        """Of one search with the plain loop, as the plan guesses it."""
        spec = self._spec
        steps = min(spec.steps, spec.budget.kappa * assumed_steps(spec, key.global_batch))
        return spec.budget.feasible * steps * step_seconds(spec, key.curve, key.global_batch)
