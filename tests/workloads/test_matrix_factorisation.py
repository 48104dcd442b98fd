"""Low-rank matrices, against the figures of the notes (E3)."""

from __future__ import annotations

import pytest
import torch

from shoal.data.fashion_mnist import DataMissing, load_fashion_mnist
from shoal.sync import EASGD, Independent, Leader
from shoal.sync.descent import Objective, descend
from shoal.workloads.matrix_factorisation import (
    STARTING_LOSS_PER_RANK,
    Completion,
    Factorisation,
    elastic_floor,
)

LR, PENALTY = 5e-4, 0.2
PULL = LR * PENALTY


@pytest.mark.parametrize(
    ("task", "numbers"),
    [
        (Factorisation.random(size=7, rank=3), 21),
        (Completion.random(rows=6, columns=4, rank=2, seen_share=0.5), 20),
    ],
)
def test_gradients_are_those_of_the_losses(task: Objective, numbers: int) -> None:
    x = torch.randn(4, numbers, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    if isinstance(task, Factorisation):
        factor = x.reshape(-1, 7, 3)
        goal = task.factor @ task.factor.mT
        losses = (factor @ factor.mT - goal).square().sum(dim=(1, 2)) / 4
        torch.testing.assert_close(task.losses(x.detach()), losses.detach())
    else:
        losses = task.losses(x)
    (expected,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(task.gradients(x.detach()), expected, rtol=1e-9, atol=1e-10)


def test_tiny_losses_do_not_drown_in_cancellation() -> None:
    task = Factorisation.random(size=200, rank=2)
    off = 1e-9 * torch.ones(1, 400, dtype=torch.float64)
    x = task.factor.reshape(1, -1) + off
    # F of a small step d is |d U^T + U d^T|^2 / 4 up to terms of third order.
    step = off.reshape(200, 2)
    change = step @ task.factor.mT
    expected = (change + change.mT).square().sum().item() / 4
    assert task.losses(x).item() == pytest.approx(expected, rel=1e-3)


def ends(rank: int, seed: int) -> dict[str, float]:
    """The lowest loss of 8 workers at iteration 49."""
    task = Factorisation.random(rank=rank, seed=seed)
    starts = task.starts(8, seed=seed)
    assert task.losses(starts).tolist() == pytest.approx(
        [STARTING_LOSS_PER_RANK * rank] * 8, rel=0.25
    )
    rules = {
        "leader": Leader(sync_every=1, global_sync_every=1, pull=PULL),
        "elastic": EASGD(sync_every=1, alpha=PULL, beta=8 * PULL, synchronous=True),
        "independent": Independent(),
    }
    return {
        name: descend(rule, task, starts, lr=LR, steps=49).best[-1] for name, rule in rules.items()
    }


@pytest.mark.parametrize("rank", [1, 10])
def test_averaging_leaves_a_floor_and_the_leader_none(rank: int) -> None:
    found = [ends(rank, seed) for seed in range(3)]
    floor = sum(run["elastic"] for run in found) / len(found)
    assert 0.0115 * rank <= floor <= 0.0127 * rank
    assert elastic_floor(rank) == pytest.approx(0.0125 * rank)
    for run in found:
        assert run["leader"] < 1e-10
        # No communication does as well: the leader does no harm here, and no good.
        assert run["independent"] == pytest.approx(run["leader"], rel=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "bound"), [(50, 5e-6), (100, 2e-2)])
def test_higher_ranks(rank: int, bound: float) -> None:
    found = ends(rank, seed=0)
    assert 0.0115 * rank <= found["elastic"] <= 0.0127 * rank
    assert found["leader"] < bound


def test_completion_finds_the_entries_it_has_not_seen() -> None:
    task = Completion.random(rows=40, columns=30, rank=2, seen_share=0.5)
    assert task.seen.double().mean().item() == pytest.approx(0.5, abs=0.05)
    rule = Leader(sync_every=4, global_sync_every=4)
    found = descend(rule, task, task.starts(4), lr=10.0, steps=600)
    unseen = task.unseen_losses(found.x)
    assert unseen[found.leaders[-1]].item() < 1e-3 * task.matrix.square().mean().item()


def test_pixels_of_which_a_third_is_seen_are_completed_better_than_by_their_mean() -> None:
    try:
        images = load_fashion_mnist().train_images[:100]
    except DataMissing:
        # The folder is a matter of the machine; other pictures serve as well.
        draw = torch.Generator().manual_seed(0)
        shapes = torch.rand(5, 28, 28, generator=draw)
        images = (torch.rand(100, 5, generator=draw) @ shapes.reshape(5, -1) * 51).reshape(
            -1, 28, 28
        )
    task = Completion.of_pixels(images, rank=5)
    assert task.seen.double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert abs(task.matrix[task.seen].mean().item()) < 1e-12
    by_mean = task.unseen_losses(torch.zeros(1, 5 * sum(task.matrix.shape)).double()).item()
    found = descend(Independent(), task, task.starts(2), lr=500.0, steps=100)
    assert task.unseen_losses(found.x).max().item() < 0.5 * by_mean
