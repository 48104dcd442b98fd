"""What makes a study's answers worse than they look, said before it runs.

Source: sections 9.1, 9.3, 9.5 and 9.7 of the notes on Shallue et al. 2019; the numbers are measured
there on digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from shoal.study.plan_probe import InitialError
from shoal.study.schedule import Decay
from shoal.study.space import Discrete, Integer, Log, Scale
from shoal.study.spec import StudySpec
from shoal.study.workload import Workload

FEW_STEPS = 20
_RELATIVE_VARIANCE = 225
# sd / mean of the per-sample cross entropy of nets at a goal of 0.13 on digits: 4.1 to 4.5.
_LOSS_SPREAD = 4.0


def needed_val_samples(error: float) -> int:
    """n_val that keeps steps to an error goal within about 10 %: 225 (1 - p) / p.

    The relative error of the measured rate is then 1/15, and steps move 1.4 times as much.

    Args:
        error: the goal p, in (0, 1).
    """
    # The quotient of two decimals may lie a rounding above a whole number.
    return math.ceil(_RELATIVE_VARIANCE * (1 - error) / error - 1e-9)


def unanswered(spec: StudySpec) -> list[str]:
    """Questions that this study's records will not answer, each with what would."""
    found: list[str] = []
    if not spec.budget.full:
        horizon = "the horizon (kappa times the steps to the hardest goal)"
        found += [
            "best error under a step or sample budget: trials stop at " + horizon + "; --full",
            "whether a trial would ever have reached the goal (lr-momentum scatters show 'not by the "
            "horizon'); --full",
            "goals harder than the hardest declared one; declare them now, or --full",
            "the share of trials that diverge over the whole budget; --full",
        ]
        if spec.budget.kappa < 3:
            found.append(
                f"whether an optimum lies at the edge of its range, reliably: at kappa = "
                f"{spec.budget.kappa:g} often fewer than 5 trials reach the goal; kappa = 3"
            )
    if spec.repeats == 1:
        found.append("intervals: one search per point shows no spread; repeats = 5")
    if spec.resolved.test is None:
        found.append("the test error at the crossing: the workload has no test data")
    return found


def warnings(
    spec: StudySpec,
    workload: Workload,
    initial: InitialError,
    steps: Mapping[tuple[str, int], int],
) -> list[str]:
    """What to say about a study before it runs.

    Args:
        spec: the study.
        workload: its own.
        initial: the goals' metric before training.
        steps: known steps to the goal by (curve, batch), possibly none.
    """
    return [
        *_met_at_start(spec, initial),
        *_validation(spec, workload, initial),
        *_resolution(spec, steps),
        *_decays(spec),
        *_design(spec),
    ]


def _met_at_start(spec: StudySpec, initial: InitialError) -> Iterator[str]:
    for goal in spec.goals:
        met = sum(error < goal.value for error in initial.mean)
        if met:
            yield (
                f"the goal {goal.metric} < {goal.value:g} is met at step 0 by {met} of "
                f"{len(initial.mean)} untrained models (best {min(initial.mean):.4g}): its steps to result "
                "are 0; choose a harder goal"
            )


def _validation(spec: StudySpec, workload: Workload, initial: InitialError) -> Iterator[str]:
    count, goal = workload.samples("val"), spec.hardest_goal
    if initial.is_zero_one and goal.value < 1:
        need, why = needed_val_samples(goal.value), f"225 (1 - p) / p at p = {goal.value:g}"
    else:
        need = round(_RELATIVE_VARIANCE * _LOSS_SPREAD**2)
        why = (
            "225 (sd / mean)^2 over samples at the goal, with sd / mean = 4 as a cross entropy near a low "
            "goal has; not known before training"
        )
    if count < need:
        yield (
            f"validation: {count} samples; {goal.metric} < {goal.value:g} wants about {need} ({why}) "
            "to keep the steps within 10 %; with fewer, which samples they are moves all batch sizes "
            "together: read the interval over validation samples, or take an easier goal or more data"
        )


def _resolution(spec: StudySpec, steps: Mapping[tuple[str, int], int]) -> Iterator[str]:
    for (curve, batch), count in sorted(steps.items()):
        if count < FEW_STEPS:
            yield (
                f"{curve} at batch {batch} reaches the goal in {count} steps; fewer than {FEW_STEPS} are "
                "too few to resolve; take a harder goal"
            )
    if spec.steps < FEW_STEPS:
        yield (
            f"max_steps = {spec.budget.steps}: anything reached in fewer than {FEW_STEPS} steps is too "
            "coarse to resolve; take a harder goal and a longer budget"
        )
    if spec.grid.ratio**spec.grid.stride > 1.05 + 1e-9:
        yield (
            f"grid: points lie up to {spec.grid.ratio**spec.grid.stride:.3g} apart, so steps are known to "
            f"{100 * (spec.grid.ratio**spec.grid.stride - 1):.0f} % at best; 1.05 is the usual ratio"
        )
    for low, high in itertools.pairwise(spec.global_batches):
        if high > 2 * low:
            yield (
                f"global_batches: {low} to {high} is more than a factor 2; a regime's border between them "
                f"cannot be placed; add {2 * low}"
            )


def _decays(spec: StudySpec) -> Iterator[str]:
    for name, curve in spec.curves.items():
        if curve.schedule != "linear_decay":
            continue
        said: set[str] = set()
        for batch in spec.global_batches:
            scale = curve.space_at(batch).get("decay_steps")
            decay = (
                _range(scale)
                if scale is not None
                else Decay(
                    low=curve.fixed["decay_steps"],
                    high=curve.fixed["decay_steps"],
                    is_log=False,
                    is_fixed=True,
                )
            )
            for line in decay.warnings(spec.steps):
                if line not in said:
                    said.add(line)
                    yield f"curves.{name}: {line}"


def _range(scale: Scale) -> Decay:
    is_log = isinstance(scale, Log | Discrete) or (isinstance(scale, Integer) and scale.log)
    return Decay(low=scale.min, high=scale.max, is_log=is_log)


def _design(spec: StudySpec) -> Iterator[str]:
    if 1 < spec.repeats < 5:
        yield (
            f"repeats = {spec.repeats}: intervals need the spread pooled over batch sizes; 5 give each point "
            "its own"
        )
    if spec.budget.feasible < 20:
        yield (
            f"trials = {spec.budget.feasible}: the best of so few depends much on luck, and steps to the "
            "goal still fall as trials are added; the paper takes 50 to 100"
        )
    if spec.budget.draws < 2 * spec.budget.feasible:
        yield (
            f"draw_limit = {spec.budget.draws}: leaves room for {spec.budget.draws - spec.budget.feasible} "
            "diverged trials; a search that needs more is short and left out of the fit; 4 x trials is usual"
        )
