"""What a study measures, as one value; :mod:`shoal.study.spec_file` reads it from TOML."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from shoal.errors import UsageError
from shoal.study.curve_spec import OPTIMIZERS, CurveSpec, OptimizerName
from shoal.study.grid import Grid
from shoal.study.records import Budget, Goal, SearchKey, hardest
from shoal.study.workload import Workload, load_workload

__all__ = ["FORMAT", "OPTIMIZERS", "CurveSpec", "OptimizerName", "StudySpec", "canonical_json"]

FORMAT = 1
"""Of the canonical spec and of what an address is made of; raised when either changes meaning."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """A study: one workload, curves, batch sizes, goals and budgets.

    Args:
        name: of the study.
        workload: a :class:`~shoal.study.workload.Workload`, or what names one for
            :func:`~shoal.study.workload.load_workload`.
        workload_parameters: keyword arguments where ``workload`` is a name.
        curves: by name.
        global_batches: samples per step, rising; steps of at most 2x where a regime is claimed.
        goals: of one metric, measured on ``val``; the hardest decides when a search ends.
        budget: trials, draws and steps of every search.
        repeats: R, independently drawn searches per point; intervals come from them.
        seed: of everything random, >= 0.
        grid: at which steps trials are evaluated.
        sampler: ``"halton"`` or ``"sobol"``, scrambled.
        allow_batch_norm: go on with BatchNorm in the model.
        base: what relative paths in ``workload`` start from; not part of the study's identity.
        recorded_fingerprint: of the workload, in a spec read back from a study directory.

    Raises:
        UsageError: a value outside its range; goals of several metrics or not of ``val``.
    """

    name: str
    workload: Workload | str
    curves: Mapping[str, CurveSpec]
    global_batches: tuple[int, ...]
    goals: tuple[Goal, ...]
    budget: Budget
    workload_parameters: Mapping[str, object] = field(default_factory=dict[str, object])
    repeats: int = 5
    seed: int = 0
    grid: Grid = field(default_factory=Grid)
    sampler: Literal["halton", "sobol"] = "halton"
    allow_batch_norm: bool = False
    base: Path | None = field(default=None, compare=False, repr=False)
    recorded_fingerprint: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("global_batches", "goals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "curves", dict(self.curves))
        self._check_names()
        self._check_numbers()
        self._check_goals()

    @cached_property
    def resolved(self) -> Workload:
        """The workload itself, checked against batches and goals; its data is read on first use.

        Raises:
            UsageError: it cannot be had; a batch is larger than the data; BatchNorm that was not
                allowed; a goal whose metric it does not measure; another fingerprint than recorded.
        """
        workload = self.workload
        if isinstance(workload, str):
            workload = load_workload(workload, self.workload_parameters, base=self.base)
        if self.recorded_fingerprint not in (None, workload.fingerprint):
            raise UsageError(
                f"workload = {workload.name}, which is not what this study began with: its data or source "
                "changed, or its function makes other data each time; restore it (and seed what it draws), "
                "or begin another study in another directory"
            )
        workload.check_batches(self.global_batches, allow_batch_norm=self.allow_batch_norm)
        metric = self.goals[0].metric.partition("/")[2]
        if metric not in workload.metrics:
            raise UsageError(
                f"goals.metric = 'val/{metric}'; the workload {workload.name} measures "
                f"{', '.join(sorted(workload.metrics))}; use val/ and one of these"
            )
        return workload

    @property
    def fingerprint(self) -> str:
        """Of the workload: recorded, or computed from data and source."""
        return self.recorded_fingerprint or self.resolved.fingerprint

    @property
    def hardest_goal(self) -> Goal:
        """The goal whose reaching implies all others."""
        return hardest(self.goals)

    @property
    def steps(self) -> int:
        """T on the grid: the last step a trial can be evaluated at."""
        return self.grid.floor(self.budget.steps)

    def searches(self) -> list[SearchKey]:
        """Every search, repeat by repeat, so that a study that is stopped has whole curves first."""
        return [
            SearchKey(curve=curve, global_batch=batch, repeat=repeat)
            for repeat in range(self.repeats)
            for curve in self.curves
            for batch in self.global_batches
        ]

    def canonical(self) -> dict[str, object]:
        """The study as plain JSON values, equal for equal studies; what ``study.json`` holds."""
        budget = self.budget
        workload = self.workload if isinstance(self.workload, str) else self.workload.name
        return {
            "format": FORMAT,
            "name": self.name,
            "workload": workload,
            "workload_parameters": dict(sorted(self.workload_parameters.items())),
            "workload_fingerprint": self.fingerprint,
            "curves": {name: curve.canonical() for name, curve in self.curves.items()},
            "global_batches": list(self.global_batches),
            "goals": [_goal_facts(goal) for goal in self.goals],
            "budget": {
                "trials": budget.feasible,
                "draw_limit": budget.draws,
                "max_steps": budget.steps,
                "kappa": float(budget.kappa),
                "full": budget.full,
            },
            "repeats": self.repeats,
            "seed": self.seed,
            "grid": {"ratio": float(self.grid.ratio), "stride": self.grid.stride},
            "sampler": self.sampler,
            "allow_batch_norm": self.allow_batch_norm,
        }

    @property
    def hash(self) -> str:
        """SHA-256 of what identifies the study; curves and goals count in any order."""
        return hashlib.sha256(canonical_json(self._identity()).encode()).hexdigest()

    def difference(self, other: StudySpec) -> list[str]:
        """One line for each value that differs: ``repeats: 5 here, 3 there``; empty when none does."""
        here, there = _flat(self._identity()), _flat(other._identity())
        lines = []
        for key in [*here, *(k for k in there if k not in here)]:
            mine, theirs = here.get(key, "nothing"), there.get(key, "nothing")
            if mine != theirs:
                lines.append(f"{key}: {mine} here, {theirs} there")
        if not lines and self.hash != other.hash:
            lines.append("the order of the searched parameters: it decides what a draw means")
        return lines

    def grows_into(self, other: StudySpec) -> bool:
        """Whether ``other`` is this study with more curves, batch sizes or repeats and no other change.

        Every search of this study is then a search of ``other``, draw for draw.
        """
        if other.repeats < self.repeats or not set(self.global_batches) <= set(
            other.global_batches
        ):
            return False
        mine, theirs = self._identity(), other._identity()
        for key in ("repeats", "global_batches", "curves"):
            del mine[key], theirs[key]
        if canonical_json(mine) != canonical_json(theirs):
            return False
        return all(
            name in other.curves and curve.draws_as(other.curves[name], self.global_batches)
            for name, curve in self.curves.items()
        )

    def _identity(self) -> dict[str, object]:
        """The canonical values with curves and goals, whose order decides nothing, sorted."""
        facts = self.canonical()
        facts["curves"] = {name: self.curves[name].canonical() for name in sorted(self.curves)}
        facts["goals"] = [_goal_facts(g) for g in sorted(self.goals, key=lambda g: g.value)]
        return facts

    def _check_names(self) -> None:
        if not self.name.strip():
            raise UsageError("name = ''; a study has a name; give one")
        if "/" in self.name or self.name in (".", ".."):
            raise UsageError(
                f"name = {self.name!r}; it also names the study's directory below studies/; leave out slashes "
                "and dots, and choose the place with --out"
            )
        if not self.curves:
            raise UsageError("curves = none; a study measures at least one; add [curves.sgd]")
        for name in self.curves:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"curves = {name!r}; a curve's name is letters, digits, _ and -; rename it"
                )
        if self.workload_parameters and not isinstance(self.workload, str):
            raise UsageError(
                "workload_parameters = given beside a Workload, which has taken its own already; remove "
                "them, or give the workload by name"
            )
        if self.sampler not in ("halton", "sobol"):
            raise UsageError(f"sampler = {self.sampler!r}; known are halton and sobol; choose one")

    def _check_numbers(self) -> None:
        batches = self.global_batches
        if not batches:
            raise UsageError("global_batches = none; list the batch sizes to measure")
        for batch in batches:
            if type(batch) is not int or batch < 1:
                raise UsageError(
                    f"global_batches = {batch!r}; samples per step, whole and at least 1; correct it"
                )
        if list(batches) != sorted(set(batches)):
            raise UsageError(
                f"global_batches = {list(batches)}; each once and rising; use {sorted(set(batches))}"
            )
        if type(self.repeats) is not int or self.repeats < 1:
            raise UsageError(
                f"repeats = {self.repeats!r}; searches per point, at least 1; 5 give an interval"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed = {self.seed!r}; a whole number in [0, 2**63); for example 0")
        for name, curve in self.curves.items():
            for batch in curve.spaces:
                if batch not in batches:
                    raise UsageError(
                        f"curves.{name}.space_at = {batch}, which is none of global_batches = "
                        f"{list(batches)}; it would have no effect; add it there or remove it here"
                    )

    def _check_goals(self) -> None:
        hardest(self.goals)
        for goal in self.goals:
            split, _, name = goal.metric.partition("/")
            if split != "val" or not name:
                raise UsageError(
                    f"goals.metric = {goal.metric!r}; a goal is measured on validation data, val/name; "
                    "train and test are stored beside it and never selected on"
                )
            if goal.larger_is_better:
                raise UsageError(
                    f"goals.larger_is_better = true for {goal.metric}; metrics of a run are errors, smaller "
                    "is better; use 1 - accuracy"
                )
            if goal.value <= 0:
                raise UsageError(
                    f"goals.value = {goal.value:g}; a metric is never negative and a goal must be beaten "
                    "strictly, so nothing reaches it; raise it above 0"
                )
        if len({goal.value for goal in self.goals}) < len(self.goals):
            raise UsageError(
                f"goals = {[g.value for g in self.goals]}; one is there twice; remove it"
            )


def canonical_json(value: object) -> str:
    """JSON in one form for equal values: keys as given, no spaces, no NaN.

    Raises:
        UsageError: a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"workload_parameters = a value that JSON cannot hold ({error}); use numbers, texts, lists"
        ) from error


def _goal_facts(goal: Goal) -> dict[str, object]:
    return {"metric": goal.metric, "value": float(goal.value)}


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    """Leaves of nested mappings and of lists of mappings, by dotted key; other lists whole."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        items = list(enumerate(value))
    else:
        return {prefix: canonical_json(value)}
    found: dict[str, str] = {}
    for key, entry in items:
        found |= _flat(entry, f"{prefix}.{key}" if prefix else str(key))
    return found
