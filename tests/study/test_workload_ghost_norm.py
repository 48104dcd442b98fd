"""Batch normalisation is refused unless it is of a fixed size, and the fixed-size one is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.study import (
    Budget,
    CurveSpec,
    GhostBatchNorm,
    Goal,
    Log,
    Space,
    StudySpec,
    Workload,
    cross_entropy,
    ghost_batch_norm,
)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def _workload(ghost: int | None = None, **settings: bool) -> Workload:
    x, y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    return Workload(
        name="w",
        model=_normed if ghost is None else lambda: ghost_batch_norm(_normed(), ghost_batch=ghost),
        loss=cross_entropy,
        train=(x, y),
        val=(x, y),
        **settings,
    )


def _spec(workload: Workload, **settings: bool) -> StudySpec:
    return StudySpec(
        name="s",
        workload=workload,
        curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=0.1, max=1)}))},
        global_batches=(8, 16),
        goals=(Goal(metric="val/classification_error", value=0.1),),
        budget=Budget(feasible=1, draws=1, steps=9),
        **settings,
    )


def test_batch_norm_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(UsageError) as refusal:
        _ = _spec(_workload()).resolved
    text = str(refusal.value)
    assert "\n" not in text
    for part in (
        "1: BatchNorm1d",
        "another objective",
        "ghost_batch_norm",
        "allow_batch_norm = true",
    ):
        assert part in text


def test_it_goes_on_when_told() -> None:
    assert _spec(_workload(allow_batch_norm=True)).resolved.name == "w"
    assert _spec(_workload(), allow_batch_norm=True).resolved.name == "w"


def test_ghost_normalisation_goes_on_with_batches_it_divides() -> None:
    assert _spec(_workload(ghost=8)).resolved.name == "w"
    with pytest.raises(UsageError, match=r"global_batches = \[8\]; .*ghost_batch = 16"):
        _ = _spec(_workload(ghost=16)).resolved


@pytest.mark.parametrize("shape", [(12, 3), (12, 3, 5), (12, 3, 4, 2)])
def test_one_group_is_batch_norm(shape: tuple[int, ...]) -> None:
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, momentum=0.3)
    nn.init.normal_(plain.weight)
    ghost = ghost_batch_norm(plain, ghost_batch=12)
    assert isinstance(ghost, GhostBatchNorm)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        a = torch.randn(shape, generator=generator).requires_grad_()
        b = a.detach().clone().requires_grad_()
        weights = torch.randn(shape, generator=generator)
        (plain(a) * weights).sum().backward()
        (ghost(b) * weights).sum().backward()
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ghost.running_mean, plain.running_mean)
    torch.testing.assert_close(ghost.running_var, plain.running_var)
    x = torch.randn(shape, generator=generator)
    torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))


def test_groups_are_normalised_on_their_own() -> None:
    layer = GhostBatchNorm(3, ghost_batch=4)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y = layer(x)
    alone = [GhostBatchNorm(3, ghost_batch=4) for _ in range(3)]
    parts = [net(part) for net, part in zip(alone, x.split(4), strict=True)]
    torch.testing.assert_close(y, torch.cat(parts))
    torch.testing.assert_close(
        layer.running_mean, torch.stack([net.running_mean for net in alone]).mean(0)
    )
    torch.testing.assert_close(
        layer.running_var, torch.stack([net.running_var for net in alone]).mean(0)
    )
    with pytest.raises(ValueError, match="must divide"):
        layer(x[:6])


def test_it_works_over_stacked_models() -> None:
    """The engines train models stacked along an axis, with buffers changed in place."""
    nets = [GhostBatchNorm(3, ghost_batch=4).train() for _ in range(2)]
    for i, net in enumerate(nets):
        nn.init.constant_(net.weight, i + 1.0)
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    parameters, buffers = torch.func.stack_module_state(nets)  # pyright: ignore
    stacked = torch.func.vmap(lambda p, b, x: torch.func.functional_call(nets[0], (p, b), (x,)))(
        parameters, buffers, x
    )
    for i, net in enumerate(nets):
        torch.testing.assert_close(stacked[i], net(x[i]))
        torch.testing.assert_close(buffers["running_mean"][i], net.running_mean)


def test_every_layer_is_replaced_with_its_state() -> None:
    model = _normed()
    model[1].running_mean.fill_(3.0)  # pyright: ignore
    model.eval()
    changed = ghost_batch_norm(model, ghost_batch=8)
    assert changed is model
    ghost = model[1]  # pyright: ignore
    assert isinstance(ghost, GhostBatchNorm) and not ghost.training
    assert ghost.running_mean.tolist() == [3.0] * 4
    assert "ghost_batch=8" in repr(model)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.BatchNorm1d(3, track_running_stats=False), "track_running_stats=True"),
        (nn.BatchNorm1d(3, momentum=None), "a fixed momentum"),
        (nn.LazyBatchNorm1d(), "not known yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_without_a_counterpart(layer: nn.Module, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ghost_batch_norm(layer)


def test_a_group_has_two_samples() -> None:
    with pytest.raises(UsageError, match="at least 2 samples"):
        GhostBatchNorm(3, ghost_batch=1)
