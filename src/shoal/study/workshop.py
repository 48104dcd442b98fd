"""Engines and evaluators for the searches of one study, made once and used again."""

from __future__ import annotations

from shoal.study.directory import StudyDirectory
from shoal.study.engines.contract import Engine
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.evaluation import Evaluator
from shoal.study.records import SearchKey
from shoal.study.spec import StudySpec


class Workshop:
    """Makes what searches are carried out with.

    Args:
        directory: of the study.
        spec: of the study.
    """

    def __init__(self, directory: StudyDirectory, spec: StudySpec) -> None:
        self._directory = directory
        self._spec = spec

    def engine(self, key: SearchKey) -> Engine:
        """A fresh engine for a search, of the kind that is noted for its curve and global batch."""
        task = Task(
            workload=self._spec.resolved,
            curve=self._spec.curves[key.curve],
            global_batch=key.global_batch,
        )
        return PoolEngine(task)

    def measuring(self, key: SearchKey) -> Evaluator:
        """A fresh evaluator for a search."""
        return Evaluator(self._spec.resolved, self._spec.goals, full=self._spec.budget.full)
