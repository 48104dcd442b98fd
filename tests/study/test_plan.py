"""The plan: its arithmetic by hand, and everything it says before a study runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study import (
    Budget,
    CurveSpec,
    Goal,
    Grid,
    Integer,
    Log,
    ReverseLog,
    Space,
    StudySpec,
    Workload,
    classification_error,
    cross_entropy,
)
from shoal.study.plan import Plan, assumed_steps, plan, render
from shoal.study.plan_probe import (
    InitialError,
    evaluation_seconds,
    initial_error,
    step_seconds,
)
from shoal.study.plan_text import duration, size
from shoal.study.plan_warnings import needed_val_samples

LR = Log(min=1e-3, max=1.0)
SPACE = Space({"lr": LR, "momentum": ReverseLog(min=0.0, max=0.99)})


def _workload(val: int = 4_000, test: bool = True, **changes: object) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(val, 3, generator=generator), torch.arange(val) % 4
    settings: dict[str, object] = {
        "name": "w",
        "model": lambda: nn.Linear(3, 4),
        "loss": cross_entropy,
        "train": (x, y),
        "val": (x, y),
        "test": (x, y) if test else None,
    }
    return Workload(**(settings | changes))  # pyright: ignore


def _spec(**changes: object) -> StudySpec:
    settings: dict[str, object] = {
        "name": "s",
        "workload": _workload(),
        "curves": {
            "sgd": CurveSpec(optimizer="sgd", space=Space({"lr": LR})),
            "nesterov": CurveSpec(optimizer="nesterov", space=SPACE),
            "adamw": CurveSpec(optimizer="adamw", space=Space({"lr": LR})),
        },
        "global_batches": (4, 8),
        "goals": (Goal(metric="val/classification_error", value=0.1),),
        "budget": Budget(feasible=20, draws=80, steps=1_000),
    }
    return StudySpec(**(settings | changes))  # pyright: ignore


def _plan(spec: StudySpec, *, errors: Sequence[float] = (0.75,), **settings: object) -> Plan:
    given: dict[str, object] = {
        "seconds_per_step": lambda spec, curve, batch: 1e-3 * batch,
        "seconds_per_evaluation": lambda workload: 1e-2,
        "initial": lambda workload, metric: InitialError(mean=tuple(errors), is_zero_one=True),
    }
    return plan(spec, **(given | settings))  # pyright: ignore


def test_seconds_by_hand() -> None:
    spec = _spec()
    made = _plan(spec, steps={("sgd", 8): 40}, runners=2)
    assert made.searches == 3 * 2 * 5 and made.trials == 600 and made.draws == 80
    point = next(p for p in made.points if (p.curve, p.global_batch) == ("sgd", 8))
    assert point.steps == 40 and point.steps_measured
    # 5 repeats x 20 trials to the grid's floor of 3 x 40, and 66 grid points up to there.
    end, points = spec.grid.floor(120), len(spec.grid.points(120))
    assert (end, points) == (116, 66)
    assert point.seconds == pytest.approx(100 * (116 * 8e-3 + 66 * 1e-2))
    last, every = spec.steps, len(spec.grid.points(1_000))
    assert point.seconds_at_most == pytest.approx(100 * (last * 8e-3 + every * 1e-2))
    assert point.evaluations == 20 * 66
    assert made.seconds == pytest.approx(sum(p.seconds for p in made.points) / 2)
    assert made.seconds < made.seconds_at_most


def test_paused_bytes_count_weights_and_what_the_optimizer_keeps() -> None:
    made = _plan(_spec(), runners=3)
    numbers = 3 * 4 + 4
    by_curve = {p.curve: p.paused_bytes for p in made.points}
    assert by_curve == {
        "sgd": 20 * 4 * numbers,
        "nesterov": 20 * 8 * numbers,
        "adamw": 20 * 12 * numbers,
    }
    assert made.paused_bytes == 3 * by_curve["adamw"]


def test_steps_that_nobody_knows_are_assumed_and_said_to_be() -> None:
    spec = _spec(global_batches=(1, 64), budget=Budget(feasible=20, draws=80, steps=3_000))
    first = assumed_steps(spec, 1)
    assert first == round(spec.steps / 3)
    assert assumed_steps(spec, 64) == pytest.approx(first * (2 / 64) / (65 / 64), abs=1)
    made = _plan(spec)
    assert not any(point.steps_measured for point in made.points)
    assert any("assumed, not measured" in line for line in made.how)
    known = {(c, b): 50 for c in spec.curves for b in spec.global_batches}
    assert not any("assumed" in line for line in _plan(spec, steps=known).how)


def test_full_trains_everything_to_the_budget() -> None:
    full = _spec(budget=Budget(feasible=20, draws=80, steps=1_000, full=True))
    made = _plan(full)
    assert made.seconds == made.seconds_at_most
    assert made.unanswered == ()
    assert any("--full" in line for line in _plan(_spec()).unanswered)


def _says(made: Plan, text: str) -> bool:
    return any(text in line for line in made.warnings)


def test_a_plain_study_has_nothing_to_be_warned_of() -> None:
    assert _plan(_spec()).warnings == ()


@pytest.mark.parametrize(
    ("error", "need"), [(0.1, 2_025), (0.035, 6_204), (0.5, 225), (0.01, 22_275)]
)
def test_validation_samples_that_an_error_goal_needs(error: float, need: int) -> None:
    assert needed_val_samples(error) == need


@pytest.mark.parametrize(("samples", "warned"), [(2_024, True), (2_025, False)])
def test_validation_too_small_for_the_goal(samples: int, warned: bool) -> None:
    made = _plan(_spec(workload=_workload(val=samples)))
    assert _says(made, "val/classification_error < 0.1 wants about 2025") == warned
    assert _says(made, f"validation: {samples} samples") == warned


def test_validation_too_small_for_a_loss() -> None:
    goals = (Goal(metric="val/cross_entropy_error", value=0.1),)
    untrained = InitialError(mean=(1.4,), is_zero_one=False)
    for samples, warned in ((3_599, True), (3_600, False)):
        made = _plan(
            _spec(workload=_workload(val=samples), goals=goals),
            initial=lambda workload, metric: untrained,
        )
        assert _says(made, "225 (sd / mean)^2") == warned


def test_a_goal_met_at_step_0_is_reported() -> None:
    goals = tuple(Goal(metric="val/classification_error", value=v) for v in (0.8, 0.1))
    made = _plan(_spec(goals=goals), errors=(0.75, 0.85, 0.7))
    assert _says(made, "< 0.8 is met at step 0 by 2 of 3 untrained models (best 0.7)")
    assert not _says(made, "< 0.1 is met")
    # A tie does not count.
    assert not _says(_plan(_spec(goals=goals), errors=(0.8,)), "met at step 0")


def test_steps_too_few_to_resolve() -> None:
    spec = _spec()
    assert _says(_plan(spec, steps={("sgd", 8): 19}), "sgd at batch 8 reaches the goal in 19 steps")
    assert not _says(_plan(spec, steps={("sgd", 8): 20}), "too few")
    assert _says(_plan(_spec(budget=Budget(feasible=20, draws=80, steps=19))), "max_steps = 19")


def test_gaps_between_batch_sizes() -> None:
    made = _plan(_spec(global_batches=(4, 8, 17)))
    assert _says(made, "8 to 17 is more than a factor 2") and _says(made, "add 16")
    assert not _says(made, "4 to 8")


def test_a_coarse_grid() -> None:
    assert _says(_plan(_spec(grid=Grid(ratio=1.1))), "up to 1.1 apart")
    assert _says(_plan(_spec(grid=Grid(stride=2))), "grid")
    assert not _says(_plan(_spec(grid=Grid(ratio=1.02))), "grid")


def _decaying(length: object, **fixed: float) -> StudySpec:
    scales = {"lr": LR} | ({} if length is None else {"decay_steps": length})
    curve = CurveSpec(
        optimizer="sgd",
        schedule="linear_decay",
        space=Space(scales),  # pyright: ignore
        fixed={"end_factor": 0.1, **fixed},
    )
    return _spec(curves={"decay": curve})


def test_a_decay_tied_to_the_budget() -> None:
    tied = _plan(_decaying(Integer(min=500, max=1_000)))
    assert _says(tied, "curves.decay: decay_steps is drawn uniformly")
    assert _says(tied, "below 1000 they are void")
    assert sum("void" in line for line in tied.warnings) == 1
    assert _plan(_decaying(Log(min=20, max=1_000))).warnings == ()
    assert _plan(_decaying(Integer(min=20, max=1_000, log=True))).warnings == ()
    assert _says(_plan(_decaying(None, decay_steps=700.0)), "fixed at 700")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repeats": 2}, "repeats = 2"),
        ({"budget": Budget(feasible=10, draws=40, steps=1_000)}, "trials = 10"),
        ({"budget": Budget(feasible=20, draws=39, steps=1_000)}, "room for 19 diverged"),
    ],
)
def test_designs_that_say_little(changes: dict[str, object], text: str) -> None:
    assert _says(_plan(_spec(**changes)), text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "best error under a step or sample budget"),
        ({}, "ever have reached the goal"),
        ({}, "goals harder than the hardest"),
        ({}, "share of trials that diverge"),
        ({"budget": Budget(feasible=20, draws=80, steps=1_000, kappa=1)}, "kappa = 1"),
        ({"repeats": 1}, "intervals"),
        ({"workload": _workload(test=False)}, "no test data"),
    ],
)
def test_what_is_not_answered(changes: dict[str, object], text: str) -> None:
    assert any(text in line for line in _plan(_spec(**changes)).unanswered)


def test_lines_and_json_hold_the_same() -> None:
    made = _plan(_spec(repeats=2), runners=2, steps={("sgd", 8): 40})
    facts = json.loads(json.dumps(made.to_dict()))
    assert facts["searches"] == 12 and facts["trials"] == 240
    assert facts["seconds"] == pytest.approx(made.seconds)
    assert len(facts["points"]) == 6
    text = "\n".join(render(made))
    for part in (
        "study s: 12 searches of 20 feasible trials (240 trials, at most 80 draws a search)",
        f"estimated {duration(made.seconds)} on 2 processes",
        f"up to {size(made.paused_bytes)} on disk",
        "not answered by this study:",
        "warnings:",
        *made.warnings,
        *made.unanswered,
    ):
        assert part in text
    rows = {(r[0], r[1]): r[4] for r in map(str.split, text.splitlines()) if len(r) > 8}
    assert rows[("sgd", "8")] == "40" and rows[("sgd", "4")].startswith("~")


def test_probes_measure_the_real_thing() -> None:
    spec = _spec()
    for curve in spec.curves:
        assert 0 < step_seconds(spec, curve, 4, seconds=0.002) < 5
    assert 0 <= evaluation_seconds(spec.resolved) < 5
    threads = torch.get_num_threads()
    made = plan(spec, seconds_per_step=lambda s, c, b: step_seconds(s, c, b, seconds=0.002))
    assert made.seconds > 0 and torch.get_num_threads() == threads


def test_untrained_models_are_measured_on_validation_data() -> None:
    class Says(nn.Module):
        """Always class 1, with one trainable number."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(torch.ones(len(x), dtype=torch.int64), 4) + self.a

    y = torch.tensor([1, 1, 1, 2] * 600)
    workload = _workload(val=2_400, model=Says)
    workload = dataclasses.replace(workload, val=(workload.split("val")[0], y))
    found = initial_error(workload, "classification_error", seeds=2)
    assert found == InitialError(mean=(0.25, 0.25), is_zero_one=True)
    assert not initial_error(workload, "cross_entropy_error").is_zero_one


def test_a_step_that_fails_is_one_line() -> None:
    def detached(output: Tensor, target: Tensor) -> Tensor:
        return classification_error(output.detach(), target)

    spec = _spec(workload=_workload(loss=detached, metrics={"classification_error": detached}))
    with pytest.raises(UsageError, match=r"a training step at global_batch = 4 failed") as refusal:
        step_seconds(spec, "sgd", 4)
    assert "\n" not in str(refusal.value)


def test_mistakes_show_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="global_batches = 8192"):
        _plan(_spec(global_batches=(4_096, 8_192), workload=_workload(val=4_096)))
    with pytest.raises(UsageError, match="runners = 0"):
        _plan(_spec(), runners=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (42, "42 s"), (180, "3 min"), (9_000, "2.5 h"), (200_000, "2.3 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (3_482, "3.4 KiB"), (125_829_120, "120 MiB"), (2**40, "1024 GiB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
