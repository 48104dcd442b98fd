"""Double well and rings: where the rules end, against the figures of the notes (E1, E2)."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from shoal.sync import EASGD, Independent, Leader
from shoal.sync.descent import Objective, descend
from shoal.workloads import sinc_landscape as rings
from shoal.workloads.double_well import DoubleWell, elastic_rest, follower_rest
from shoal.workloads.sinc_landscape import SincLandscape


@pytest.mark.parametrize("task", [DoubleWell(), SincLandscape()])
def test_gradients_are_those_of_the_losses(task: Objective) -> None:
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    points.requires_grad_()
    (expected,) = torch.autograd.grad(task.losses(points).sum(), points)
    torch.testing.assert_close(task.gradients(points.detach()), expected, rtol=1e-9, atol=1e-9)


def test_the_origin_is_a_maximum_without_a_slope() -> None:
    origin = torch.zeros(1, 2, dtype=torch.float64)
    assert SincLandscape().losses(origin).item() == 1.0
    assert SincLandscape().gradients(origin).tolist() == [[0.0, 0.0]]


# E1 -------------------------------------------------------------------------------------------------

LR, PENALTY = 0.1, 0.2
IN_BOTH_WELLS = torch.tensor([[-1.3], [0.8]], dtype=torch.float64)


def test_the_leader_is_stationary_and_its_follower_is_where_theory_says() -> None:
    # The pull comes after the step: this fraction has the penalty's own point of rest.
    pull = LR * PENALTY / (1 + LR * PENALTY)
    rule = Leader(sync_every=1, global_sync_every=1, pull=pull)
    found = descend(rule, DoubleWell(), IN_BOTH_WELLS, lr=LR, steps=2000).x
    assert abs(DoubleWell().gradients(found[:1]).item()) < 1e-10
    assert found[0].item() == pytest.approx(-1, abs=1e-10)
    assert found[1].item() == pytest.approx(0.723607, abs=1e-6)
    assert follower_rest(PENALTY) == pytest.approx(0.723607, abs=1e-6)
    assert found.mean().item() == pytest.approx(-0.138, abs=1e-3)  # on the barrier


@pytest.mark.parametrize("beta", [0.43, 0.9])
def test_elastic_averaging_rests_where_nobody_is_stationary(beta: float) -> None:
    rule = EASGD(sync_every=1, alpha=LR * PENALTY, beta=beta, synchronous=True)
    found = descend(rule, DoubleWell(), IN_BOTH_WELLS, lr=LR, steps=3000)
    assert found.x.flatten().tolist() == pytest.approx([-0.894427, 0.894427], abs=1e-6)
    assert elastic_rest(PENALTY) == pytest.approx(0.894427, abs=1e-6)
    center = found.center(rule)
    assert center is not None and abs(center.item()) < 1e-6


def test_above_a_quarter_the_follower_joins_its_leader() -> None:
    rule = Leader(sync_every=1, global_sync_every=1, pull=0.03)
    found = descend(rule, DoubleWell(), IN_BOTH_WELLS, lr=LR, steps=2000).x
    assert found.flatten().tolist() == pytest.approx([-1, -1], abs=1e-8)
    with pytest.raises(ValueError, match=r"penalty = 0.3; the far well"):
        follower_rest(0.3)


# E2 -------------------------------------------------------------------------------------------------


def test_the_deepest_ring_is_where_it_is_said_to_be() -> None:
    task = SincLandscape()
    point = torch.tensor([[rings.GLOBAL_RADIUS, 0.0]], dtype=torch.float64)
    assert abs(task.gradients(point)).max().item() < 1e-12
    assert task.losses(point).item() == pytest.approx(rings.GLOBAL_VALUE, abs=1e-15)
    start = task.losses(task.starts()).tolist()
    assert start == pytest.approx([-0.027175, -0.013265, 0.007271, 0.010455], abs=1e-6)


def test_leaders_of_the_figure_alternate_and_all_reach_the_deepest_ring() -> None:
    rule, task = Leader(sync_every=1, global_sync_every=1, pull=0.1), SincLandscape()
    found = descend(rule, task, task.starts(), lr=0.1, steps=100)
    runs = [(leader, len(list(rounds))) for leader, rounds in groupby(found.leaders)]
    assert runs == [(0, 7), (3, 6), (0, 10), (2, 77)]
    assert task.losses(found.x).tolist() == pytest.approx([-0.2172336] * 4, abs=1e-7)
    # The same arithmetic, many runs at once.
    together = rings.descend_to_leader(task.starts().unsqueeze(0), steps=100)[0]
    torch.testing.assert_close(together, found.x, rtol=1e-12, atol=1e-12)


def test_coupled_steps_end_where_the_figure_does() -> None:
    starts = SincLandscape().starts().unsqueeze(0)
    ends = rings.descend_to_leader(starts, steps=100, coupled=True)[0]
    expected = torch.tensor([1.4292, 0.056], dtype=torch.float64).expand_as(ends)
    torch.testing.assert_close(ends, expected, rtol=0, atol=3e-3)


def test_elastic_averaging_of_the_figure_ends_in_the_second_ring() -> None:
    rule, task = EASGD(sync_every=1, beta=0.43, synchronous=True), SincLandscape()
    found = descend(rule, task, task.starts(), lr=0.1, steps=100)
    expected = torch.tensor([[3.4296, -0.6021]], dtype=torch.float64)
    torch.testing.assert_close(found.x, expected.expand_as(found.x), rtol=0, atol=3e-4)
    assert task.losses(found.x).tolist() == pytest.approx([-0.0912693] * 4, abs=1e-6)
    center = found.center(rule)
    assert center is not None
    torch.testing.assert_close(
        center, torch.tensor([[3.4317, -0.6025]], dtype=torch.float64), rtol=0, atol=1e-4
    )
    points, centers = rings.descend_elastically(task.starts().unsqueeze(0), steps=100)
    torch.testing.assert_close(points[0], found.x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(centers[0], center, rtol=1e-10, atol=1e-10)


def test_random_starts_run_at_once_are_the_rules_own_runs() -> None:
    task = SincLandscape()
    starts = task.random_starts(trials=3, workers=4, seed=5)
    by_rule = [
        (rings.descend_to_leader, Leader(sync_every=1, global_sync_every=1, pull=0.1)),
        (rings.descend_alone, Independent()),
    ]
    for many, rule in by_rule:
        together = many(starts, steps=40)
        for trial, start in enumerate(starts):
            alone = descend(rule, task, start, lr=0.1, steps=40).x
            torch.testing.assert_close(together[trial], alone, rtol=1e-12, atol=1e-12)


def shares(workers: int, trials: int) -> tuple[float, float, float]:
    """Share of random runs in which the best worker reaches the deepest ring: leader, elastic, alone."""
    starts = SincLandscape().random_starts(trials=trials, workers=workers)

    def share(points: torch.Tensor) -> float:
        return float(rings.reached(points).double().mean())

    elastic, _ = rings.descend_elastically(starts)
    return (
        share(rings.descend_to_leader(starts)),
        share(elastic),
        share(rings.descend_alone(starts)),
    )


def test_four_workers_that_follow_their_leader_get_there_far_more_often() -> None:
    leader, elastic, alone = shares(4, trials=400)
    assert leader - max(elastic, alone) >= 0.25
    assert (leader, elastic, alone) == pytest.approx((0.425, 0.082, 0.041), abs=0.08)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("workers", "table", "margin"),
    [
        (4, (0.425, 0.082, 0.041), 0.25),
        (8, (0.841, 0.138, 0.096), 0.5),
        (16, (0.989, 0.121, 0.186), 0.5),
    ],
)
def test_two_thousand_random_starts(
    workers: int, table: tuple[float, float, float], margin: float
) -> None:
    found = shares(workers, trials=2000)
    assert found == pytest.approx(table, abs=0.05)
    assert found[0] - max(found[1:]) >= margin
