"""One worker is the plain loop, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_fleet import OPTIMIZERS, classes, classifier, plain, same_bits, train
from torch import nn

import shoal


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_equals_plain_loop(kind: str, norm: bool, clip: float | None) -> None:
    ours = train(model=classifier(norm=norm), optimizer=kind, clip=clip)
    theirs = plain(model=classifier(norm=norm), optimizer=kind, clip=clip)
    assert same_bits(ours.model, theirs)


def test_another_seed_is_another_order() -> None:
    assert same_bits(train(seed=5).model, plain(model=classifier(), seed=5))
    assert not same_bits(train(seed=5).model, train(seed=6).model)


class Branches(nn.Module):
    """Uses one of two branches, by the batch; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x[0, 0] > 0 else self.two(x)


@pytest.mark.parametrize("kind", ["heavy_ball", "adamw"])
def test_unused_parameters_are_left_alone(kind: str) -> None:
    """Momentum and weight decay must not move a branch that a step did not use."""
    ours = train(model=Branches(), optimizer=kind)
    assert same_bits(ours.model, plain(model=Branches(), optimizer=kind))
    assert torch.equal(ours.model.never.weight, Branches().never.weight)


def grouped(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.01},
            {"params": model[2].parameters()},
        ],
        lr=0.02,
        momentum=0.9,
    )


def test_parameter_groups_keep_their_rates() -> None:
    a, b = classifier(), classifier()
    run = train(model=a, optimizer=grouped(a), scaling=shoal.scaling.Linear(reference_batch=8))
    assert same_bits(a, plain(model=b, optimizer=grouped(b)))
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.1, 0.02]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(torch.tanh(self.a(x))))


def test_tied_weights() -> None:
    assert same_bits(train(model=Tied(), clip=0.3).model, plain(model=Tied(), clip=0.3))


def frozen() -> nn.Sequential:
    model = classifier(norm=True)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def test_frozen_parameters() -> None:
    ours = train(model=frozen(), optimizer="adam")
    assert same_bits(ours.model, plain(model=frozen(), optimizer="adam"))
    assert torch.equal(ours.model[0].weight, classifier(norm=True)[0].weight)


class Twice(nn.Module):
    """Calls its BatchNorm layer twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(torch.tanh(self.norm(x))))


def test_batch_norm_called_twice() -> None:
    assert same_bits(train(model=Twice()).model, plain(model=Twice()))


def in_double() -> nn.Module:
    return classifier(norm=True).double()


def test_double_precision_model() -> None:
    x, y = classes()
    data = (x.double(), y)
    assert same_bits(train(model=in_double(), data=data).model, plain(model=in_double(), data=data))


def test_left_over_zero_grad_is_harmless() -> None:
    x, y = classes()
    model = classifier()
    optimizer = OPTIMIZERS["heavy_ball"](model.parameters())
    with shoal.init(model, optimizer) as fleet:
        for _ in fleet.epochs(2):
            for a, b in fleet.batches((x, y), local_batch=8, micro_batch=4):
                optimizer.zero_grad()
                fleet.backward(F.cross_entropy(model(a), b))
                fleet.step()
                optimizer.zero_grad()
    other = train(micro_batch=4)
    assert same_bits(model, other.model)


def test_gradients_are_views_of_the_buckets() -> None:
    run = train(close=False)
    storages = {b.flat.untyped_storage().data_ptr() for b in run.fleet._stepper.reducer.buckets}
    grads = [p.grad for p in run.model.parameters()]
    assert all(g is not None and g.untyped_storage().data_ptr() in storages for g in grads)
    run.fleet.close()


def test_a_copy_of_the_model_trains_by_itself() -> None:
    import copy

    run = train(model=classifier(norm=True), epochs=1, close=False)
    twin = copy.deepcopy(run.model)
    assert same_bits(twin, run.model)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    x, y = classes()
    F.cross_entropy(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert not same_bits(twin, run.model)
    assert all(torch.equal(before[k], v) for k, v in run.model.state_dict().items())
    run.fleet.close()


def test_compiled_model() -> None:
    compiled = torch.compile(classifier(norm=True), backend="eager")
    ours = train(model=compiled)
    assert same_bits(ours.model._orig_mod, plain(model=classifier(norm=True)))
    assert "0.weight" in ours.fleet._replica.snapshot()["model"]


def test_bf16_keeps_parameters_and_outputs_in_float32() -> None:
    seen: set[torch.dtype] = set()

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(x.dtype)
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Watch(), nn.Linear(8, 3))
    outputs: set[torch.dtype] = set()

    def loss(m: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        out = m(batch[0])
        outputs.add(out.dtype)
        return F.cross_entropy(out, batch[1])

    run = train(model=model, precision="bf16", loss=loss, epochs=3, evaluate=True)
    assert seen == {torch.bfloat16} and outputs == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert run.scores[-1]["loss"] < run.scores[0]["loss"]


def test_a_weight_of_other_units_gives_the_mean_over_them() -> None:
    """Tokens, say: the fleet's gradient is that of one mean over all units of the step."""
    x, y = classes(40)
    units = torch.arange(40) % 5 + 1

    def loss(m: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        each = F.cross_entropy(m(batch[0]), batch[1], reduction="none")
        return (each * batch[2]).sum() / batch[2].sum()

    model, optimizer = classifier(), torch.optim.SGD
    with shoal.init(model, optimizer(model.parameters(), lr=0.05)) as fleet:
        for _ in fleet.epochs(1):
            for batch in fleet.batches((x, y, units), local_batch=8, micro_batch=3):
                fleet.backward(loss(model, batch), weight=batch[2].sum())
                fleet.step()
    other = classifier()
    theirs = optimizer(other.parameters(), lr=0.05)
    order = torch.as_tensor(shoal.data.Order(n=40, seed=0, epoch=0).take(0, 40))
    for rows in order.split(8):
        theirs.zero_grad()
        loss(other, [x[rows], y[rows], units[rows]]).backward()
        theirs.step()
    for ours, plain_one in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, plain_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_sum_reduction_equals_mean(micro: int) -> None:
    x, y = classes(30)
    model = classifier()
    with shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.05)) as fleet:
        for _ in fleet.epochs(1):
            for a, b in fleet.batches((x, y), local_batch=8, micro_batch=micro):
                fleet.backward(F.cross_entropy(model(a), b, reduction="sum"), reduction="sum")
                fleet.step()
    other = plain(model=classifier(), optimizer="sgd", data=(x, y), epochs=1)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
