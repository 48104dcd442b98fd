"""Studies with a planted truth: S(B), the best effective learning rate, where training diverges.

A trial with effective learning rate r crosses the goal at T = S(B) (1 + ((ln r - x*(B)) / width)^2) times a
lognormal luck; its error is goal (T / t)^(1/2), so that it crosses strictly after T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.ledger.study_rows import StudyWriter
from shoal.study.grid import Grid
from shoal.study.records import (
    CONFIRM,
    Budget,
    Evaluation,
    Goal,
    Measured,
    Outcome,
    SearchKey,
    Trial,
)
from shoal.study.search import Search
from shoal.study.search_summary import AnalysisSettings
from shoal.study.space import Log, ReverseLog, Space
from shoal.study.tables import SearchData, StudyTables

METRIC = "val/classification_error"
TEST = "test/classification_error"


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is planted for one curve."""

    s_min: float = 60.0
    b_crit: float = 32.0
    lr_per_sample: float = 0.02
    lr_cap: float = 0.6
    width: float = 1.5
    luck: float = 0.1
    flutter: float = 0.0
    diverges_above: float = 8.0
    has_momentum: bool = False
    space: Space = field(default_factory=lambda: Space({"lr": Log(min=1e-3, max=10.0)}))

    def steps(self, batch: int) -> float:
        return self.s_min * (1 + self.b_crit / batch)

    def best_lr(self, batch: int) -> float:
        return min(self.lr_per_sample * batch, self.lr_cap)


BUDGET = Budget(feasible=20, draws=60, steps=40_000, kappa=3.0)
MOMENTUM_SPACE = Space({"lr": Log(min=1e-4, max=10.0), "momentum": ReverseLog(min=0.0, max=0.99)})


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A study over planted curves."""

    truths: Mapping[str, Truth]
    batches: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    repeats: int = 5
    goals: tuple[Goal, ...] = (Goal(metric=METRIC, value=0.1),)
    budget: Budget = BUDGET
    ratio: float = 1.05
    seed: int = 0

    @property
    def grid(self) -> tuple[int, ...]:
        return Grid(ratio=self.ratio).points(self.budget.steps)

    @property
    def settings(self) -> AnalysisSettings:
        return AnalysisSettings(goals=self.goals, budget=self.budget, grid=self.grid)

    @property
    def parameters(self) -> dict[str, list[str]]:
        return {name: list(truth.space) for name, truth in self.truths.items()}

    def search_keys(self) -> list[SearchKey]:
        return [
            SearchKey(curve=curve, global_batch=batch, repeat=repeat)
            for curve in self.truths
            for batch in self.batches
            for repeat in range(self.repeats)
        ]

    def trials(self, key: SearchKey, winner: Trial | None = None, count: int = 0) -> list[Trial]:
        truth = self.truths[key.curve]
        random = self._random(key)
        found = []
        for number in range(count or self.budget.draws):
            unit = tuple(float(u) for u in random.random(len(truth.space)))
            unit = winner.unit if winner is not None else unit
            found.append(
                Trial(
                    search=key,
                    id=number,
                    unit=unit,
                    parameters=truth.space.parameters(unit),
                    seed=number,
                    address=f"{key}-{number}",
                )
            )
        return found

    def points(self, trial: Trial) -> list[Evaluation]:
        """The whole curve, to the budget or the divergence."""
        truth, key = self.truths[trial.search.curve], trial.search
        random = self._random(key, 1 + trial.id)
        lr, momentum = trial.parameters["lr"], trial.parameters.get("momentum", 0.0)
        effective = lr / (1 - momentum)
        off = math.log(effective / truth.best_lr(key.global_batch)) / truth.width
        at = truth.steps(key.global_batch) * (1 + off * off)
        at *= math.exp(truth.luck * random.standard_normal())
        ends = effective > truth.diverges_above * truth.best_lr(key.global_batch)
        early = random.uniform(0.02, 0.3) * truth.steps(key.global_batch)
        diverges = int(early) if ends else None
        found = []
        for step in self.grid:
            noise = math.exp(truth.flutter * random.standard_normal())
            value = min(0.9, 0.1 * math.sqrt(at / step) * noise) if step else 0.9
            diverged = diverges is not None and step >= diverges
            metrics = {METRIC: Measured(math.nan if diverged else value)}
            metrics[TEST] = Measured(math.nan if diverged else min(0.9, 1.1 * value))
            found.append(Evaluation(step=step, metrics=metrics, diverged=diverged))
            if diverged:
                break
        return found

    def search(self, key: SearchKey) -> SearchData:
        trials = self.trials(key)
        state = Search(self.goals, self.budget, self.grid)
        known: dict[int, dict[int, Evaluation]] = {}
        while not state.finished:
            for number, step in state.wanted().items():
                if number not in known:
                    known[number] = {e.step: e for e in self.points(trials[number])}
                state.add(number, known[number][step])
        result = state.result()
        drawn = sorted(state.curves)
        outcomes: Sequence[Outcome] = [
            result.outcomes[n].outcome if n < len(result.outcomes) else Outcome.NOT_REACHED
            for n in drawn
        ]
        return SearchData(
            key=key,
            trials=[trials[n] for n in drawn],
            curves=[state.curves[n] for n in drawn],
            outcomes=list(outcomes),
            end=result.end,
            state=str(result.state),
            draws=len(drawn),
        )

    def confirmation(self, winner: Trial, seeds: int = 10) -> SearchData:
        """The winner's setting with fresh luck; each seed to its crossing of the hardest goal."""
        key = SearchKey(
            curve=winner.search.curve, global_batch=winner.search.global_batch, repeat=CONFIRM
        )
        from shoal.study.records import Curve, hardest

        goal = hardest(self.goals)
        trials, curves, outcomes = self.trials(key, winner, seeds), [], []
        for trial in trials:
            curve = Curve()
            for evaluation in self.points(trial):
                curve.evaluations.append(evaluation)
                if curve.crossing(goal) is not None:
                    break
            curves.append(curve)
            met = curve.crossing(goal) is not None
            outcomes.append(Outcome.REACHED if met else Outcome.NOT_REACHED)
        return SearchData(
            key=key, trials=trials, curves=curves, outcomes=outcomes, state="done", draws=seeds
        )

    def write(self, directory: Path, confirm: Sequence[tuple[str, int]] = ()) -> None:
        """All searches as rows of two journals, with given-up attempts and rewritten rows in between.

        Args:
            directory: of the study.
            confirm: curves and batches whose best winner is run again.
        """
        found = [self.search(key) for key in self.search_keys()]
        found += [self.confirmation(self._best(found, *place)) for place in confirm]
        for half in (0, 1):
            with StudyWriter(directory / "rows" / f"runner-{half}.jsonl") as rows:
                for data in found[half::2]:
                    _write(rows, data)

    def _best(self, found: Sequence[SearchData], curve: str, batch: int) -> Trial:
        from shoal.study.records import hardest
        from shoal.study.search_summary import summarise

        rows = [
            summarise(d, hardest(self.goals), self.settings)
            for d in found
            if (d.key.curve, d.key.global_batch) == (curve, batch)
        ]
        best = min((r for r in rows if r.steps is not None), key=lambda r: r.steps or 0)
        assert best.winner is not None
        return best.winner.trial

    def tables(self) -> StudyTables:
        return StudyTables.of(self.search(key) for key in self.search_keys())

    def _random(self, key: SearchKey, more: int = 0) -> np.random.Generator:
        number = sorted(self.truths).index(key.curve)
        return np.random.default_rng([self.seed, number, key.global_batch, key.repeat + 1, more])


def _write(rows: StudyWriter, data: SearchData) -> None:
    for trial, curve, outcome in zip(data.trials, data.curves, data.outcomes, strict=True):
        if trial.id % 5 == 0:
            # An attempt that was given up: its far better curve must never be read.
            rows.trial(trial, attempt=f"old-{trial.id}", engine="pool", segment=0)
            for evaluation in curve.evaluations[:6]:
                metrics = {METRIC: Measured(1e-6), TEST: Measured(1e-6)}
                lie = Evaluation(step=evaluation.step, metrics=metrics)
                rows.evaluation(data.key, trial.id, lie, attempt=f"old-{trial.id}", segment=0)
        attempt = f"new-{trial.id}"
        rows.trial(trial, attempt=attempt, engine="vmap", segment=1)
        for place, evaluation in enumerate(curve.evaluations):
            if place % 11 == 3:
                # Written before a kill, measured again after it: the larger segment counts.
                lie = Evaluation(step=evaluation.step, metrics={METRIC: Measured(1e-6)})
                rows.evaluation(data.key, trial.id, lie, attempt=attempt, segment=1)
            rows.evaluation(data.key, trial.id, evaluation, attempt=attempt, segment=2)
        if outcome is not None:
            step = max(curve.step, 0)
            rows.outcome(data.key, trial.id, outcome, step, attempt=attempt, segment=2)
    if data.state is not None and data.key.repeat != CONFIRM:
        rows.search(data.key, data.state, end=data.end, draws=data.draws, segment=2)
