"""What rounds do to momentum buffers and BatchNorm statistics."""

from math import nan

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.sync import Leader, LocalSGD, Lookahead, Pull, Signals, Stacked
from shoal.sync.policies import Carried, carry, merge_momentum, merge_statistics, recomputed

TO_LEADER = Pull(toward="workers", fraction=0.25, rows=(1, 2), sources=(0, 0, 0))
REPAIR = Pull(
    toward="workers",
    fraction=0.25,
    rows=(1, 2),
    sources=(0, 0, 0),
    replaced=(2,),
    is_repairing=True,
)
BUFFERS = {
    "w.momentum_buffer": torch.tensor([[8.0, 0.0], [0.0, 4.0], [4.0, 4.0]]),
    "w.step": torch.tensor([3.0, 5.0, 7.0]),
}


def test_keep_leaves_momentum_alone_and_sends_nothing() -> None:
    exchange = Stacked(3)
    assert merge_momentum("keep", BUFFERS, TO_LEADER, exchange) is BUFFERS
    assert exchange.traffic.total_bytes() == 0


def test_a_replaced_worker_keeps_no_momentum_of_its_ruins() -> None:
    ill = {"b": torch.tensor([[1.0], [2.0], [nan]])}
    kept = merge_momentum("keep", ill, REPAIR, Stacked(3))
    assert kept["b"].tolist() == [[1.0], [2.0], [0.0]]
    moved = merge_momentum("interpolate", ill, REPAIR, Stacked(3))
    assert moved["b"].tolist() == [[1.0], [1.75], [1.0]]


def test_reset_zeroes_the_rows_that_moved_step_counts_too() -> None:
    reset = merge_momentum("reset", BUFFERS, TO_LEADER, Stacked(3))
    assert reset["w.momentum_buffer"].tolist() == [[8.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert reset["w.step"].tolist() == [3.0, 0.0, 0.0]


def test_interpolate_moves_momentum_as_the_weights_were_moved() -> None:
    exchange = Stacked(3)
    moved = merge_momentum("interpolate", BUFFERS, TO_LEADER, exchange)
    assert moved["w.momentum_buffer"].tolist() == [[8.0, 0.0], [2.0, 3.0], [5.0, 3.0]]
    assert moved["w.step"].tolist() == [3.0, 5.0, 7.0]
    assert exchange.traffic.sent_bytes == {"broadcast": 2 * 2 * 4}
    mean = Pull(toward="mean", fraction=1.0, rows=(0, 1, 2))
    together = merge_momentum("interpolate", BUFFERS, mean, Stacked(3))
    assert torch.equal(together["w.momentum_buffer"], torch.tensor([[4.0, 8 / 3]] * 3))


def test_lookahead_pulls_momentum_back_to_its_past() -> None:
    rule, exchange = Lookahead(sync_every=1, momentum_policy="interpolate"), Stacked(1)
    carried = Carried(momentum={"b": torch.tensor([[8.0]])})
    state, x = rule.init(torch.zeros(1, 1), exchange), torch.zeros(1, 1)
    for expected in (4.0, 6.0):
        outcome = rule.after_step(state, x, exchange, Signals())
        carried = carry(rule, outcome, carried, exchange)
        assert carried.momentum["b"].item() == expected
        carried = Carried(
            momentum={"b": torch.tensor([[8.0]])}, slow_momentum=carried.slow_momentum
        )
    reset = Lookahead(sync_every=1, momentum_policy="reset")
    outcome = reset.after_step(state, x, exchange, Signals())
    assert carry(reset, outcome, carried, exchange).momentum["b"].item() == 0.0


def statistics_of(shift: float, batches: int) -> dict[str, torch.Tensor]:
    """What a BatchNorm layer has after ``batches`` batches of inputs shifted by ``shift``."""
    layer = nn.BatchNorm1d(3, momentum=None)
    generator = torch.Generator().manual_seed(7)
    for _ in range(batches):
        layer(torch.randn(64, 3, generator=generator) + shift)
    return {f"bn.{name}": value.clone() for name, value in layer.named_buffers()}


def stacked(*workers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([worker[name] for worker in workers]) for name in workers[0]}


def test_mean_statistics_are_those_of_all_inputs_together() -> None:
    own = stacked(statistics_of(0.0, 4), statistics_of(5.0, 6))
    mean = Pull(toward="mean", fraction=1.0, rows=(0, 1))
    merged = merge_statistics("mean", own, mean, Stacked(2))
    means, variances = merged["bn.running_mean"], merged["bn.running_var"]
    assert torch.equal(means[0], means[1])
    assert means[0].mean().item() == pytest.approx(2.5, abs=0.2)
    # half the inputs around 0, half around 5: variance 1 + 2.5^2
    assert torch.equal(variances[0], variances[1])
    assert variances[0].mean().item() == pytest.approx(1 + 2.5**2, rel=0.1)
    assert merged["bn.num_batches_tracked"].tolist() == [6, 6]


def test_mean_statistics_leave_out_a_worker_that_is_being_repaired() -> None:
    own = stacked(*(statistics_of(0.0, 2) for _ in range(3)))
    own["bn.running_mean"][2] = nan
    merged = merge_statistics("mean", own, REPAIR, Stacked(3))
    assert torch.equal(merged["bn.running_mean"][2], own["bn.running_mean"][0])
    assert torch.isfinite(merged["bn.running_var"]).all()


def test_leader_statistics_go_to_those_that_were_pulled_and_own_stay() -> None:
    own = stacked(*(statistics_of(float(shift), shift + 1) for shift in range(3)))
    taken = merge_statistics("leader", own, TO_LEADER, Stacked(3))
    for name in own:
        assert torch.equal(taken[name], own[name][:1].expand_as(own[name]))
    exchange = Stacked(3)
    assert merge_statistics("own", own, TO_LEADER, exchange) is own
    assert merge_statistics("recompute", own, TO_LEADER, exchange) is own
    assert exchange.traffic.total_bytes() == 0
    repaired = merge_statistics("own", own, REPAIR, Stacked(3))
    assert repaired["bn.num_batches_tracked"].tolist() == [1, 2, 1]


@pytest.mark.parametrize("policy", ["own", "leader", "mean", "recompute"])
def test_after_a_whole_round_everything_is_finite_again(policy: str) -> None:
    rule = Leader(sync_every=1, momentum_policy="interpolate", statistics_policy=policy)  # pyright: ignore[reportArgumentType]
    exchange = Stacked(3)
    x = torch.tensor([[1.0], [2.0], [nan]])
    own = stacked(*(statistics_of(float(shift), 2) for shift in range(3)))
    own["bn.running_mean"][2] = nan
    carried = Carried(momentum={"b": torch.tensor([[1.0], [3.0], [nan]])}, statistics=own)
    outcome = rule.after_step(
        rule.init(x, exchange), x, exchange, Signals(losses=torch.tensor([0.1, 0.2, nan]))
    )
    carried = carry(rule, outcome, carried, exchange)
    assert torch.isfinite(outcome.x).all()
    assert torch.isfinite(carried.momentum["b"]).all()
    is_repaired = bool(torch.isfinite(carried.statistics["bn.running_mean"]).all())
    assert is_repaired is (policy != "recompute")  # there it is for the driver to measure anew


def test_a_step_without_a_round_carries_the_very_same() -> None:
    rule, exchange, x = LocalSGD(sync_every=2), Stacked(2), torch.zeros(2, 1)
    carried = Carried(momentum={"b": torch.ones(2, 1)})
    outcome = rule.after_step(rule.init(x, exchange), x, exchange, Signals())
    assert carry(rule, outcome, carried, exchange) is carried


def test_recomputed_statistics_are_the_plain_mean_over_batches_and_touch_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model.train()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, 2, generator=generator) for _ in range(3)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    found = recomputed(model, batches)
    with torch.no_grad():
        means = torch.stack([model[0](batch).mean(dim=0) for batch in batches]).mean(dim=0)
    assert set(found) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    torch.testing.assert_close(found["1.running_mean"], means)
    assert found["1.num_batches_tracked"].item() == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state) and model.training
    with pytest.raises(UsageError, match="0 batches"):
        recomputed(model, [])
    assert recomputed(nn.Linear(2, 1), batches) == {}
