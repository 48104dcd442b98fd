"""The study: steps to a goal against batch size, every batch size tuned on its own."""

from shoal.study.grid import Grid
from shoal.study.records import Budget, Goal
from shoal.study.run import run_study
from shoal.study.space import Discrete, Integer, Linear, Log, ReverseLog, Space
from shoal.study.spec import CurveSpec, StudySpec
from shoal.study.spec_file import load_spec
from shoal.study.workload import (
    GhostBatchNorm,
    Workload,
    classification_error,
    cross_entropy,
    ghost_batch_norm,
    load_workload,
)

__all__ = [
    "Budget",
    "CurveSpec",
    "Discrete",
    "GhostBatchNorm",
    "Goal",
    "Grid",
    "Integer",
    "Linear",
    "Log",
    "ReverseLog",
    "Space",
    "StudySpec",
    "Workload",
    "classification_error",
    "cross_entropy",
    "ghost_batch_norm",
    "load_spec",
    "load_workload",
    "run_study",
]
