"""The choice of an engine: what is refused and why, what is kept, and that choices survive as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study.engines.build import Candidate, build_engine
from shoal.study.engines.contest import Choice, contest
from shoal.study.engines.equality import (
    Refused,
    accepted,
    largest_difference,
    same_bits,
    sizes_of,
    trained,
    trials_of,
)
from shoal.study.engines.task import Task
from shoal.study.space import Log, Space
from shoal.study.spec import CurveSpec
from shoal.study.workload import Workload, cross_entropy


def task(model, *, inputs=(12,), batch: int = 4) -> Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((40, *inputs), generator=generator)
    y = torch.randint(0, 4, (40,), generator=generator)
    workload = Workload(
        name="small",
        model=model,
        loss=cross_entropy,
        train=(x, y),
        val=(x[:8], y[:8]),
        allow_batch_norm=True,
    )
    curve = CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=1e-3, max=0.3)}))
    return Task(workload=workload, curve=curve, global_batch=batch)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(12, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


class Reassigning(nn.Module):
    """Its buffer is a new tensor after every step, which a stack loses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean()
        return self.layer(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool(x.sum() > 0) else self.layer(-x)


class WrongSlope(torch.autograd.Function):
    """Another function under vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info, in_dims, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, in_dims[0]


class Slanted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return WrongSlope.apply(self.layer(x))


@pytest.mark.parametrize("engine", ("vmap", "layers"))
def test_equal_engines_are_accepted_with_sizes(engine) -> None:
    verdict = accepted(task(mlp), Candidate(engine=engine, slots=5))
    assert isinstance(verdict, Candidate)
    assert verdict.sizes[-1] == 5
    trials = trials_of(task(mlp), 3)
    plain = trained(build_engine(task(mlp), Candidate(engine="pool")), trials, 3)
    ours = trained(build_engine(task(mlp), verdict), trials, 3)
    assert all(largest_difference(ours[n], plain[n])[0] < 1e-5 for n in plain)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Dropping, "RuntimeError: vmap: called random operation"),
        (Branching, "RuntimeError: vmap: It looks like you"),
        (Reassigning, "buffer seen differs from the plain loop's"),
        (Slanted, "parameter layer.* differs from the plain loop's"),
    ],
)
def test_refusals_carry_their_reason(model, reason: str) -> None:
    verdict = accepted(task(model), Candidate(engine="vmap", slots=3))
    assert isinstance(verdict, Refused)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.reason)
    assert "\n" not in verdict.reason and len(verdict.reason) <= 200


def test_refused_models_fall_back_to_the_plain_loop() -> None:
    choice = contest(task(Branching))
    assert choice.candidate == Candidate(engine="pool")
    assert choice.speedup == 1.0
    assert choice.refusals.keys() == {"vmap", "layers"}
    assert "cannot be traced" in choice.refusals["layers"]


def test_a_choice_goes_through_json() -> None:
    choice = contest(task(mlp), trials=8)
    assert set(choice.step_seconds) >= {"pool"}
    again = Choice.from_json(json.loads(json.dumps(choice.as_json())))
    assert again == choice
    trials = trials_of(task(mlp), 4)
    one = trained(build_engine(task(mlp), choice.candidate), trials, 5)
    other = trained(build_engine(task(mlp), again.candidate), trials, 5)
    assert all(same_bits(one[n], other[n]) for n in one)


def test_what_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.study.engines.contest.LEAST_SECONDS", 0.0)
    choice = contest(task(mlp))
    assert choice.candidate.engine == "pool"
    assert all("not tried" in reason for reason in choice.refusals.values())


def test_a_small_gain_does_not_replace_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.study.engines.contest.CLEAR_GAIN", 1e9)
    assert contest(task(mlp), trials=8).candidate.engine == "pool"


def test_sizes_rise_to_the_slots() -> None:
    assert sizes_of(1) == [1]
    assert sizes_of(8) == [1, 2, 3, 4, 5, 6, 8]
    for slots in range(1, 70):
        sizes = sizes_of(slots)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == slots


def test_differences_are_found_where_they_are() -> None:
    one = {"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}
    other = {"a": torch.ones(3) * 1.01, "b": torch.tensor([1.0, float("nan")])}
    difference, name = largest_difference(one, other)
    assert name == "a" and difference == pytest.approx(0.01 / 1.01)
    assert same_bits(one, {n: t.clone() for n, t in one.items()})
    assert not same_bits(one, other)
    assert not same_bits(one, {**one, "b": torch.tensor([float("nan"), 1.0])})
    assert largest_difference(one, {"a": one["a"]}) == (float("inf"), "b")
    finite = {"a": one["a"], "b": torch.ones(2)}
    assert largest_difference(finite, one) == (float("inf"), "b")


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="known are pool, vmap, layers"):
        Candidate(engine="jax")  # pyright: ignore[reportArgumentType]
