"""What a study will cost and what it will not be able to say, before anything runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from shoal.errors import UsageError
from shoal.study.engines.update import SLOTS
from shoal.study.plan_probe import InitialError, evaluation_seconds, initial_error, step_seconds
from shoal.study.plan_text import duration, size
from shoal.study.plan_warnings import unanswered, warnings
from shoal.study.spec import StudySpec
from shoal.study.workload import Workload

_ASSUMED_KNEE = 64


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """One curve at one batch size: all its repeated searches.

    Args:
        curve: its name.
        global_batch: samples per step.
        searches: repeats.
        step_seconds: of one trial's step, plain loop, one process.
        steps: S that ``seconds`` takes for granted.
        steps_measured: whether it was measured rather than assumed.
        seconds: of one process, for all its searches, if the goal is reached at ``steps``.
        seconds_at_most: the same if the hardest goal is not reached and trials go on to the budget.
        evaluations: rows of one search, at ``steps``.
        paused_bytes: of one search put aside with all its trials.
    """

    curve: str
    global_batch: int
    searches: int
    step_seconds: float
    steps: int
    steps_measured: bool
    seconds: float
    seconds_at_most: float
    evaluations: int
    paused_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study will do.

    Args:
        name: of the study.
        points: curves x batch sizes.
        feasible: trials per search.
        draws: most trials drawn per search.
        runners: processes the seconds are shared by.
        evaluation_seconds: one whole validation pass.
        how: how the seconds were estimated, in sentences.
        unanswered: questions this study's records will not answer, and what would.
        warnings: what makes its answers worse than they look.
    """

    name: str
    points: tuple[PlannedPoint, ...]
    feasible: int
    draws: int
    runners: int
    evaluation_seconds: float
    how: tuple[str, ...]
    unanswered: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def searches(self) -> int:
        """All searches."""
        return sum(point.searches for point in self.points)

    @property
    def trials(self) -> int:
        """Feasible trials of all searches."""
        return self.feasible * self.searches

    @property
    def seconds(self) -> float:
        """Of the whole study on ``runners`` processes, by the steps taken for granted."""
        return sum(point.seconds for point in self.points) / self.runners

    @property
    def seconds_at_most(self) -> float:
        """Of the whole study if no search reaches its hardest goal."""
        return sum(point.seconds_at_most for point in self.points) / self.runners

    @property
    def paused_bytes(self) -> int:
        """Most bytes of searches in progress: the largest one for each runner."""
        return self.runners * max(point.paused_bytes for point in self.points)

    def to_dict(self) -> dict[str, object]:
        """Everything as plain JSON values."""
        return {
            **asdict(self),
            "searches": self.searches,
            "trials": self.trials,
            "seconds": self.seconds,
            "seconds_at_most": self.seconds_at_most,
            "paused_bytes": self.paused_bytes,
        }


def plan(
    spec: StudySpec,
    *,
    steps: Mapping[tuple[str, int], int] | None = None,
    runners: int = 1,
    seconds_per_step: Callable[[StudySpec, str, int], float] = step_seconds,
    seconds_per_evaluation: Callable[[Workload], float] = evaluation_seconds,
    initial: Callable[[Workload, str], InitialError] = initial_error,
) -> Plan:
    """Work out what a study will cost, and what to know before it runs.

    A search of N trials whose hardest goal is reached at S trains N trials to kappa S (to T with
    ``full``), so it takes N (kappa S s + P(kappa S) e) seconds: s of a step, e of a validation pass,
    P(t) the grid points up to t. Trials that diverge end early and are left out; early exits make
    evaluations cheaper than e.

    Args:
        spec: the study. Its workload is read, checked and probed.
        steps: S by (curve, batch) where it is known, for example from searches already done.
        runners: processes that will share the work, >= 1.
        seconds_per_step: of (spec, curve, batch).
        seconds_per_evaluation: of a workload.
        initial: a metric before training.

    Raises:
        UsageError: the workload does not fit the spec, or a training step fails.
    """
    if runners < 1:
        raise UsageError(f"runners = {runners}; at least one process does the work; use 1 or more")
    workload, known = spec.resolved, dict(steps or {})
    evaluation = seconds_per_evaluation(workload)
    points: list[PlannedPoint] = []
    for curve, batch in itertools.product(spec.curves, spec.global_batches):
        guess = known.get((curve, batch), assumed_steps(spec, batch))
        each = seconds_per_step(spec, curve, batch)
        end = _end(spec, guess)
        points.append(
            PlannedPoint(
                curve=curve,
                global_batch=batch,
                searches=spec.repeats,
                step_seconds=each,
                steps=guess,
                steps_measured=(curve, batch) in known,
                seconds=_seconds(spec, end, each, evaluation),
                seconds_at_most=_seconds(spec, spec.steps, each, evaluation),
                evaluations=spec.budget.feasible * len(spec.grid.points(end)),
                paused_bytes=_paused_bytes(spec, workload, curve),
            )
        )
    metric = spec.hardest_goal.metric.partition("/")[2]
    return Plan(
        name=spec.name,
        points=tuple(points),
        feasible=spec.budget.feasible,
        draws=spec.budget.draws,
        runners=runners,
        evaluation_seconds=evaluation,
        how=_how(spec, all(point.steps_measured for point in points)),
        unanswered=tuple(unanswered(spec)),
        warnings=tuple(warnings(spec, workload, initial(workload, metric), known)),
    )


def assumed_steps(spec: StudySpec, global_batch: int) -> int:
    """S where nothing is known: T / kappa at the smallest batch, falling as 1/B + 1/64 does.

    That is a budget which just suffices at the smallest batch, and a critical batch size of 64.
    """
    smallest = spec.global_batches[0]
    first = spec.steps / spec.budget.kappa
    fall = (1 / global_batch + 1 / _ASSUMED_KNEE) / (1 / smallest + 1 / _ASSUMED_KNEE)
    return max(1, round(first * fall))


def render(plan: Plan) -> list[str]:
    """A plan as lines for people.

    Args:
        plan: what :func:`plan` gave.
    """
    lines = [
        f"study {plan.name}: {plan.searches} searches of {plan.feasible} feasible trials "
        f"({plan.trials} trials, at most {plan.draws} draws a search)",
        f"estimated {duration(plan.seconds)} on {_processes(plan.runners)}, at most "
        f"{duration(plan.seconds_at_most)} if no search reaches its hardest goal",
        f"paused trials: up to {size(plan.paused_bytes)} on disk and in memory",
        "",
        f"{'curve':<14} {'batch':>7} {'searches':>8} {'ms/step':>9} {'steps':>9} {'estimate':>10} "
        f"{'at most':>10} {'paused':>10}",
    ]
    for point in plan.points:
        about = f"{point.steps}" if point.steps_measured else f"~{point.steps}"
        lines.append(
            f"{point.curve:<14} {point.global_batch:>7} {point.searches:>8} "
            f"{1000 * point.step_seconds:>9.3g} {about:>9} {duration(point.seconds):>10} "
            f"{duration(point.seconds_at_most):>10} {size(point.paused_bytes):>10}"
        )
    lines += ["", *plan.how]
    for title, entries in (
        ("not answered by this study:", plan.unanswered),
        ("warnings:", plan.warnings),
    ):
        if entries:
            lines += ["", title, *(f"  - {entry}" for entry in entries)]
    return lines


def _end(spec: StudySpec, steps: int) -> int:
    if spec.budget.full:
        return spec.steps
    return spec.grid.floor(min(spec.steps, max(1, math.ceil(spec.budget.kappa * steps))))


def _seconds(spec: StudySpec, end: int, step: float, evaluation: float) -> float:
    trials = spec.repeats * spec.budget.feasible
    return trials * (end * step + len(spec.grid.points(end)) * evaluation)


def _paused_bytes(spec: StudySpec, workload: Workload, curve: str) -> int:
    model = workload.build(0)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    state = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    slots = len(SLOTS[spec.curves[curve].optimizer])
    return spec.budget.feasible * (state + slots * parameters)


def _processes(runners: int) -> str:
    return "one process" if runners == 1 else f"{runners} processes"


def _how(spec: StudySpec, measured: bool) -> tuple[str, ...]:
    budget = spec.budget
    reach = (
        f"to all {spec.steps} steps" if budget.full else f"to {budget.kappa:g} times those steps"
    )
    lines = [
        "how: steps and a whole validation pass were timed here with the plain loop, in seconds of one core; "
        "the engine chosen at the start of a run is never slower, and evaluations mostly end early. "
        f"Every search trains its {budget.feasible} trials {reach}."
    ]
    if not measured:
        lines.append(
            f"steps marked ~ are assumed, not measured: {spec.steps / budget.kappa:.0f} (max_steps / kappa) "
            f"at batch {spec.global_batches[0]}, falling as 1/B + 1/{_ASSUMED_KNEE}. Nothing short of "
            "training tells them; the first searches replace them."
        )
    return tuple(lines)
