"""Evaluation: early ends are exact, divergence by its rule, memory survives a restart."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study.engines.build import Candidate, build_engine
from shoal.study.engines.equality import trials_of
from shoal.study.engines.task import Task
from shoal.study.evaluation import Evaluator, SampleOutcomes
from shoal.study.records import Goal, Measured
from shoal.study.space import Log, Space
from shoal.study.spec import CurveSpec
from shoal.study.validation_pass import BLOCK_SAMPLES
from shoal.study.workload import Workload, classification_error, cross_entropy

ERROR = "val/classification_error"
NAN = (math.nan, math.nan)


class Given(nn.Module):
    """Its parameter holds the logits of every sample; the input is the sample's number."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(samples, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()]


def given(samples: int) -> Workload:
    """A workload whose outcomes a test writes into the weights; targets are all 0."""
    x = torch.arange(samples, dtype=torch.float32)[:, None]
    y = torch.zeros(samples, dtype=torch.int64)
    return Workload(
        name="given",
        model=lambda: Given(samples),
        loss=cross_entropy,
        train=(x, y),
        val=(x, y),
        test=(x[:50], y[:50]),
    )


def outcomes(wrong: np.ndarray, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Weights that are wrong on exactly these samples."""
    bad = torch.from_numpy(wrong)
    logits = torch.zeros(len(wrong), 2)
    logits[:, 0] = torch.where(bad, -scale, scale)
    return {"logits": logits}


def goals(*values: float, metric: str = ERROR) -> list[Goal]:
    return [Goal(metric=metric, value=value) for value in values]


@pytest.mark.parametrize("metric", ("classification_error", "cross_entropy_error"))
def test_bounds_and_values_agree_with_whole_passes(metric: str) -> None:
    n = 1500
    workload = given(n)
    ours = Evaluator(workload, goals(0.2, 0.1, 0.05, metric=f"val/{metric}"))
    generator = np.random.default_rng(1)
    order = generator.random(n)
    kinds = set()
    for step, share in enumerate(
        [0.9, 0.5, 0.35, 0.25, 0.21, 0.2, 0.19, 0.12, 0.3, 0.101, 0.1, 0.04]
    ):
        wrong = (order + generator.normal(0, 0.02, n)) < share
        weights = outcomes(wrong, scale=2.0 if metric == "cross_entropy_error" else 1.0)
        evaluation = ours.evaluate(0, step, weights, NAN if step == 0 else (1.0, 1.0))
        value, bound = evaluation.metrics[f"val/{metric}"]
        function = classification_error if metric == "classification_error" else cross_entropy
        values = function(weights["logits"], torch.zeros(n, dtype=torch.int64)).double().numpy()
        kinds.add(bound)
        if bound == "=":
            assert value == values.mean()
        else:
            assert 0.2 <= value <= values.mean() + 1e-12
        for goal in goals(0.2, 0.1, 0.05, metric=f"val/{metric}"):
            assert goal.is_met_by(Measured(value, bound)) == (values.mean() < goal.value)
    assert kinds == {"=", ">="}


def test_a_value_on_the_goal_is_measured_whole() -> None:
    wrong = np.zeros(1000, dtype=bool)
    wrong[:100] = True
    evaluation = Evaluator(given(1000), goals(0.1)).evaluate(0, 0, outcomes(wrong), NAN)
    assert evaluation.metrics[ERROR] == Measured(0.1, "=")
    assert not goals(0.1)[0].is_met_by(evaluation.metrics[ERROR])


def _counting(workload: Workload) -> list[int]:
    """Makes the workload's metric count the samples it is asked for."""
    seen: list[int] = []
    counted = workload.metrics["classification_error"]

    def counts(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return counted(output, target)

    workload.metrics["classification_error"] = counts  # pyright: ignore[reportIndexIssue]
    return seen


def test_samples_that_were_wrong_come_first() -> None:
    n = 20_000
    workload = given(n)
    seen = _counting(workload)
    evaluator = Evaluator(workload, goals(0.1))
    wrong = np.random.default_rng(2).random(n) < 0.15
    evaluator.evaluate(0, 0, outcomes(wrong), NAN)
    first = sum(seen)
    assert first > 0.6 * n
    seen.clear()
    evaluation = evaluator.evaluate(0, 1, outcomes(wrong), (1.0, 1.0))
    assert evaluation.metrics[ERROR].bound == ">="
    assert sum(seen) < 0.2 * n


def test_what_is_far_from_the_goal_costs_the_block_alone() -> None:
    workload = given(5000)
    seen = _counting(workload)
    wrong = np.random.default_rng(2).random(5000) < 0.9
    Evaluator(workload, goals(0.02)).evaluate(0, 0, outcomes(wrong), NAN)
    assert seen == [BLOCK_SAMPLES]


def test_full_measures_everything_everywhere() -> None:
    wrong = np.random.default_rng(3).random(800) < 0.7
    evaluation = Evaluator(given(800), goals(0.1), full=True).evaluate(0, 0, outcomes(wrong), NAN)
    names = {f"{s}/{m}" for s in ("train", "val", "test") for m in given(4).metrics}
    assert set(evaluation.metrics) == names
    assert all(m.bound == "=" for m in evaluation.metrics.values())
    assert evaluation.metrics[ERROR].value == wrong.mean()
    assert evaluation.metrics["test/classification_error"].value == wrong[:50].mean()


def test_other_splits_are_measured_where_a_goal_is_first_met() -> None:
    evaluator = Evaluator(given(400), goals(0.3, 0.1))
    measured = []
    for step, count in enumerate([200, 100, 90, 130, 20, 10]):
        wrong = np.zeros(400, dtype=bool)
        wrong[:count] = True
        evaluation = evaluator.evaluate(0, step, outcomes(wrong), (1.0, 1.0))
        measured.append("test/classification_error" in evaluation.metrics)
    assert measured == [False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("scale", "losses", "diverged"),
    [
        (1.0, (1.0, 1.0), False),
        (9.0, (1.0, 1.0), False),
        (11.0, (1.0, 1.0), True),
        (math.inf, (1.0, 1.0), True),
        (math.nan, (1.0, 1.0), True),
        (1.0, (1.0, 9.9), False),
        (1.0, (1.0, 10.1), True),
        (1.0, (0.001, 5.0), False),  # a lucky first batch; the block's loss was 1
        (1.0, (1.0, math.nan), True),
        (1.0, (1.0, math.inf), True),
        (1.0, (math.nan, math.nan), False),
    ],
)
def test_divergence_is_ten_times_step_zero(scale, losses, diverged: bool) -> None:
    workload = given(300)
    target = float(np.log(np.e - 1))  # the logit difference at which the loss is 1
    start = {"logits": torch.tensor([[-target, 0.0]]).repeat(300, 1)}
    evaluator = Evaluator(workload, goals(0.5))
    assert not evaluator.evaluate(0, 0, start, NAN).diverged
    # Far from the right side the loss is the logit difference.
    later = {"logits": torch.tensor([[-scale if scale > 1 else -target, 0.0]]).repeat(300, 1)}
    if not math.isfinite(scale):
        later["logits"][7, 1] = scale
    assert evaluator.evaluate(0, 1, later, losses).diverged is diverged


def test_memory_survives_a_restart_as_json() -> None:
    workload = given(3000)
    generator = np.random.default_rng(4)
    order = generator.random(3000)
    shares = [0.6, 0.3, 0.22, 0.15, 0.18, 0.09, 0.12]
    points = [outcomes(order + generator.normal(0, 0.03, 3000) < s) for s in shares]
    straight = Evaluator(workload, goals(0.1))
    expected = [straight.evaluate(5, t, w, (1.0, 1.0)) for t, w in enumerate(points)]
    for cut in range(len(points)):
        first = Evaluator(workload, goals(0.1))
        for t in range(cut):
            first.evaluate(5, t, points[t], (1.0, 1.0))
        second = Evaluator(workload, goals(0.1))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [second.evaluate(5, t, points[t], (1.0, 1.0)) for t in range(cut, len(points))]
        assert rest == expected[cut:]
    with pytest.raises(UsageError, match="format"):
        straight.load_state_dict({"format": 2, "trials": {}})


def test_an_unknown_trial_in_mid_course_is_refused() -> None:
    evaluator = Evaluator(given(40), goals(0.1))
    weights = outcomes(np.zeros(40, dtype=bool))
    evaluator.evaluate(1, 0, weights, NAN)
    evaluator.forget(1)
    evaluator.forget(1)
    with pytest.raises(ValueError, match="step 0"):
        evaluator.evaluate(1, 3, weights, (1.0, 1.0))


def test_single_outcomes_are_kept_near_a_goal_only() -> None:
    evaluator = Evaluator(given(1000), goals(0.1))
    for step, (count, kept) in enumerate([(300, False), (110, True), (85, True), (50, False)]):
        wrong = np.random.default_rng(step).permutation(1000) < count
        evaluator.evaluate(0, step, outcomes(wrong), (1.0, 1.0))
        found = {o.metric: o for o in evaluator.outcomes(0)}
        assert bool(found) is kept
        if found:
            assert np.array_equal(found[ERROR].values > 0, wrong)
            packed = np.frombuffer(base64.b64decode(found[ERROR].packed()), np.uint8)
            assert np.array_equal(np.unpackbits(packed, count=1000).astype(bool), wrong)
            assert not found["val/cross_entropy_error"].is_binary
    with pytest.raises(ValueError, match="bits"):
        SampleOutcomes(metric="val/x", values=np.array([0.5], dtype=np.float32)).packed()


def norm_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


class _Counts(nn.Module):
    """Writes a buffer even in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize(("model", "shape"), [(norm_model, (1, 6, 6)), (_Counts, (4,))])
def test_evaluation_leaves_no_trace_and_equals_the_module(model, shape) -> None:
    x = torch.randn((300, *shape), generator=torch.Generator().manual_seed(1))
    y = torch.arange(300) % 3
    workload = Workload(
        name="w", model=model, loss=cross_entropy, train=(x, y), val=(x, y), allow_batch_norm=True
    )
    module = workload.build(3)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    evaluator = Evaluator(workload, goals(0.9))
    evaluation = evaluator.evaluate(0, 0, weights, NAN)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    wrong = (module.eval()(x).argmax(1) != y).double().mean()
    assert evaluation.metrics[ERROR] == Measured(float(wrong))
    assert evaluator.measure(weights, "train")["train/classification_error"].value == float(wrong)


def test_larger_is_better_ends_no_pass_early() -> None:
    goal = Goal(metric=ERROR, value=0.05, larger_is_better=True)
    evaluation = Evaluator(given(600), [goal]).evaluate(
        0, 0, outcomes(np.ones(600, dtype=bool)), NAN
    )
    assert evaluation.metrics[ERROR] == Measured(1.0)


def test_goals_it_cannot_measure_are_refused() -> None:
    for bad in ("val/accuracy", "test/classification_error"):
        with pytest.raises(UsageError, match="measures val/classification_error"):
            Evaluator(given(4), goals(0.1, metric=bad))
    with pytest.raises(UsageError, match="at least one goal"):
        Evaluator(given(4), [])
    with pytest.raises(UsageError, match="near"):
        Evaluator(given(4), goals(0.1), near=0.5)


def test_a_negative_metric_is_refused_when_it_shows() -> None:
    workload = given(20)
    workload.metrics["classification_error"] = lambda o, t: o[:, 0]  # pyright: ignore
    evaluator = Evaluator(workload, goals(0.1))
    with pytest.raises(UsageError, match="never negative"):
        evaluator.evaluate(0, 0, outcomes(np.ones(20, dtype=bool)), NAN)


@pytest.mark.parametrize("engine", ("pool", "layers"))
@pytest.mark.parametrize("metric", ("classification_error", "cross_entropy_error"))
def test_portions_are_measured_as_single_trials_are(engine, metric: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((700, 6), generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
    workload = Workload(
        name="w",
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)),
        loss=cross_entropy,
        train=(x, y),
        val=(x, y),
    )
    curve = CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=0.01, max=1.0)}))
    task = Task(workload=workload, curve=curve, global_batch=16)
    held = build_engine(task, Candidate(engine=engine, slots=4 if engine == "layers" else 1))
    trials = trials_of(task, 7)
    for trial in trials:
        held.admit(trial)
    limits = goals(0.25, 0.12, metric=f"val/{metric}")
    together, alone = Evaluator(workload, limits), Evaluator(workload, limits)
    kinds = set()
    for step in (0, 1, 5, 20, 60, 150):
        held.advance({trial.id: step for trial in trials})
        for portion in held.portions([trial.id for trial in trials]):
            found = together.evaluate_portion(held, dict.fromkeys(portion, step))
            assert list(found) == list(portion)
            for number, ours in found.items():
                theirs = alone.evaluate(number, step, held.weights(number), held.losses(number))
                assert (ours.step, ours.diverged) == (step, theirs.diverged)
                assert ours.metrics.keys() == theirs.metrics.keys()
                for name, (value, bound) in ours.metrics.items():
                    kinds.add(bound)
                    assert bound == theirs.metrics[name].bound
                    assert value == pytest.approx(theirs.metrics[name].value, rel=1e-5)
    assert kinds == {"=", ">="}
