"""The leader rule on vectors that can be followed by hand."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from shoal.errors import DivergedError, UsageError
from shoal.sync import Leader, Signals, Stacked, pull_scalings
from shoal.sync.contract import Outcome
from shoal.sync.leader import LeaderState
from shoal.sync.states import reseat


def once(rule: Leader, x: Tensor, losses: list[float], exchange: Stacked) -> Outcome[LeaderState]:
    """One step and its round, by a rule with ``sync_every=1``."""
    signals = Signals(losses=torch.tensor(losses, dtype=torch.float64))
    return rule.after_step(rule.init(x, exchange), x, exchange, signals)


def test_followers_move_by_the_fraction_and_the_leader_stays() -> None:
    x = torch.tensor([[0.0, 4.0], [8.0, 0.0], [4.0, 4.0]])
    outcome = once(Leader(sync_every=1, pull=0.25), x, [0.9, 0.1, 0.5], Stacked(3))
    assert outcome.x.tolist() == [[2.0, 3.0], [8.0, 0.0], [5.0, 3.0]]
    assert x.tolist() == [[0.0, 4.0], [8.0, 0.0], [4.0, 4.0]]
    (event,) = outcome.events
    assert (event.kind, event.step, event.values["leader"]) == ("round", 1, 1)
    assert event.values["margin"] == 0.4
    assert outcome.pulls[0].rows == (0, 2)


def test_the_first_round_comes_after_the_last_step_of_the_period_and_nothing_pulls_before() -> None:
    rule, exchange = Leader(sync_every=3, global_sync_every=3, pull=1.0), Stacked(2)
    x = torch.tensor([[1.0], [2.0]])
    state, moved = rule.init(x, exchange), []
    for _ in range(7):
        outcome = rule.after_step(state, x, exchange, Signals(losses=torch.tensor([0.1, 0.2])))
        moved.append(outcome.is_round)
        state, x = outcome.state, outcome.x + torch.tensor([[0.0], [1.0]])
    assert moved == [False, False, True, False, False, True, False]


def test_local_pull_first_then_the_global_one_on_what_it_left() -> None:
    x = torch.tensor([[0.0], [16.0], [100.0], [116.0]])
    rule = Leader(sync_every=1, global_sync_every=2, pull=0.5, global_pull=0.25, groups=2)
    exchange = Stacked(4, groups=rule.groups)
    losses = Signals(losses=torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64))
    first = rule.after_step(rule.init(x, exchange), x, exchange, losses)
    assert first.x.tolist() == [[0.0], [8.0], [108.0], [116.0]]
    second = rule.after_step(first.state, first.x, exchange, losses)
    # local: 8 -> 4, 108 -> 112; then 25 % toward 0 for all but the leader of all
    assert second.x.tolist() == [[0.0], [3.0], [84.0], [87.0]]
    assert [pull.rows for pull in second.pulls] == [(1, 2), (1, 2, 3)]


def test_bytes_of_a_multi_leader_run_equal_the_formula_on_each_link() -> None:
    groups, each, period = 4, 4, 128
    rule = Leader(sync_every=64, global_sync_every=period, groups=groups)
    workers, numbers = groups * each, 10
    exchange = Stacked(workers, groups=groups)
    x = torch.randn(workers, numbers, generator=torch.Generator().manual_seed(0))
    state = rule.init(x, exchange)
    losses = torch.linspace(1.0, 0.1, workers, dtype=torch.float64)
    for _ in range(period):
        outcome = rule.after_step(state, x, exchange, Signals(losses=losses))
        x, state = outcome.x, outcome.state
    size = 4 * numbers
    assert exchange.traffic.sent_bytes == {
        "scores": 2 * 12 * workers * (workers - 1),
        "broadcast": 2 * groups * (each - 1) * size + (workers - 1) * size,
    }
    pairs_inside = groups * each * (each - 1)
    assert exchange.traffic.payload_bytes["inter"] == (
        2 * 12 * (workers * (workers - 1) - pairs_inside) + (groups - 1) * size
    )


def test_a_worker_that_is_not_finite_never_leads_and_is_replaced_whole() -> None:
    x = torch.tensor([[nan, 1.0], [2.0, 3.0], [6.0, 7.0]])
    outcome = once(Leader(sync_every=1, pull=0.5), x, [0.0, 0.2, 0.5], Stacked(3))
    assert outcome.x.tolist() == [[2.0, 3.0], [2.0, 3.0], [4.0, 5.0]]
    replaced = [event for event in outcome.events if event.kind == "replaced"]
    assert [event.values for event in replaced] == [{"worker": 0, "leader": 1}]
    assert outcome.state.filled.tolist() == [0, 1, 1]
    assert outcome.pulls[0].replaced == (0,)


def test_a_group_that_is_ill_is_cured_by_the_leader_of_all() -> None:
    x = torch.tensor([[1.0], [2.0], [nan], [inf]])
    rule = Leader(sync_every=1, global_sync_every=4, pull=0.5, groups=2)
    outcome = once(rule, x, [0.1, 0.2, nan, 0.0], Stacked(4, groups=2))
    assert outcome.x.tolist() == [[1.0], [1.5], [1.0], [1.0]]


def test_all_scores_not_finite_stops_with_the_step() -> None:
    with pytest.raises(DivergedError, match="at step 1"):
        once(Leader(sync_every=1), torch.zeros(2, 1), [nan, inf], Stacked(2))


def test_a_worker_without_samples_does_not_lead() -> None:
    rule, exchange, x = Leader(sync_every=1, pull=1.0), Stacked(2), torch.tensor([[1.0], [5.0]])
    signals = Signals(losses=torch.tensor([0.0, 0.7]), counts=torch.tensor([0, 8]))
    outcome = rule.after_step(rule.init(x, exchange), x, exchange, signals)
    assert outcome.x.tolist() == [[5.0], [5.0]]


def liar_round(verify: bool) -> Outcome[LeaderState]:
    """Worker 0 is far from the minimum at 0, and reports the lowest loss."""

    def judge(weights: Tensor) -> list[float]:
        return weights.square().sum(dim=1).tolist()

    x = torch.tensor([[100.0], [2.0], [1.0]])
    rule, exchange = Leader(sync_every=1, pull=0.5, verify=verify), Stacked(3)
    signals = Signals(losses=torch.tensor([-1.0, 0.2, 0.1]), judge=judge)
    return rule.after_step(rule.init(x, exchange), x, exchange, signals)


def test_a_false_low_loss_does_harm_without_verify_and_none_with_it() -> None:
    assert liar_round(verify=False).x.tolist() == [[100.0], [51.0], [50.5]]
    outcome = liar_round(verify=True)
    assert outcome.x.tolist() == [[100.0], [2.0], [1.0]]
    assert [event.kind for event in outcome.events] == ["round", "refused", "refused"]


def test_verify_lets_a_better_leader_pull() -> None:
    rule, exchange = Leader(sync_every=1, pull=0.5, verify=True), Stacked(2)
    x = torch.tensor([[4.0], [1.0]])
    signals = Signals(
        losses=torch.tensor([0.9, 0.1]), judge=lambda w: w.square().sum(dim=1).tolist()
    )
    outcome = rule.after_step(rule.init(x, exchange), x, exchange, signals)
    assert outcome.x.tolist() == [[2.5], [1.0]]
    with pytest.raises(UsageError, match="without a judge"):
        rule.after_step(rule.init(x, exchange), x, exchange, replace(signals, judge=None))


def test_given_scores_count_for_auto_and_probe_but_not_for_own() -> None:
    x, exchange = torch.tensor([[1.0], [5.0]]), Stacked(2)
    signals = Signals(losses=torch.tensor([0.1, 0.9]), scores=torch.tensor([0.9, 0.1]))
    leaders = []
    for score in ("own", "auto", "probe", "held_out"):
        rule = Leader(sync_every=1, score=score)
        outcome = rule.after_step(rule.init(x, exchange), x, exchange, signals)
        leaders.append(outcome.state.leader)
    assert leaders == [0, 1, 1, 1]
    rule = Leader(sync_every=1, score="probe")
    with pytest.raises(UsageError, match="without scores at step 1"):
        rule.after_step(rule.init(x, exchange), x, exchange, replace(signals, scores=None))


def test_the_alarm_rings_once_when_one_worker_leads_on_and_on() -> None:
    rule, exchange, x = Leader(sync_every=1), Stacked(2), torch.zeros(2, 1)
    state, alarms = rule.init(x, exchange), []
    for _ in range(15):
        outcome = rule.after_step(state, x, exchange, Signals(losses=torch.tensor([0.1, 0.2])))
        state = outcome.state
        alarms += [event.step for event in outcome.events if event.kind == "lock_in"]
    assert alarms == [10]


def test_the_anchor_pulls_between_rounds_and_spares_leaders() -> None:
    rule = Leader(sync_every=2, global_sync_every=2, pull=0.5, anchor=0.5)
    exchange, x = Stacked(2), torch.tensor([[0.0], [8.0]])
    state = rule.init(x, exchange)
    signals = Signals(losses=torch.tensor([0.1, 0.2]))
    outcome = rule.after_step(state, x, exchange, signals)
    assert outcome.x is x  # no leader has been received yet
    outcome = rule.after_step(outcome.state, x, exchange, signals)
    assert outcome.x.tolist() == [[0.0], [4.0]]
    moved = outcome.x + torch.tensor([[4.0], [0.0]])
    outcome = rule.after_step(outcome.state, moved, exchange, signals)
    # a quarter of the way to the leader as received at 0; the leader itself is not held back
    assert outcome.x.tolist() == [[4.0], [3.0]]


def test_with_two_groups_the_anchor_pulls_to_the_global_leader_first() -> None:
    rule = Leader(
        sync_every=2, global_sync_every=4, pull=0.5, global_pull=0.5, anchor=1.0, groups=2
    )
    exchange = Stacked(4, groups=2)
    x = torch.tensor([[0.0], [8.0], [16.0], [32.0]])
    state = rule.init(x, exchange)
    signals = Signals(losses=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    for _ in range(4):
        outcome = rule.after_step(state, x, exchange, signals)
        state, x = outcome.state, outcome.x
    assert state.global_anchor is not None and state.leads_fleet is not None
    assert state.leads_fleet.tolist() == [True, False, False, False]
    before, local = x.clone(), state.local_anchor
    assert local is not None
    expected = before.clone()
    expected[1:] = expected[1:] + (0.0 - expected[1:]) / 4
    expected[[1, 3]] = expected[[1, 3]] + (local[[1, 3]] - expected[[1, 3]]) / 2
    outcome = rule.after_step(state, x, exchange, signals)
    assert torch.equal(outcome.x, expected)


def test_bf16_on_the_wire_halves_the_bytes_and_leaves_the_leader_exact() -> None:
    x = torch.tensor([[1.001], [3.0]])
    exchange = Stacked(2, wire="bf16")
    outcome = once(Leader(sync_every=1, pull=1.0), x, [0.1, 0.2], exchange)
    assert outcome.x[0].item() == x[0].item()
    assert outcome.x[1].item() == 1.0
    assert exchange.traffic.sent_bytes["broadcast"] == 2


def test_a_newcomer_takes_its_donors_place_without_its_losses() -> None:
    rule, exchange, x = Leader(sync_every=4, global_sync_every=4), Stacked(2), torch.zeros(2, 1)
    state = rule.init(x, exchange)
    for _ in range(3):
        state = rule.observe(state, Signals(losses=torch.tensor([0.1, 0.2])))
    grown = reseat(state, [0, 1, 0], joined=[2])
    assert grown.filled.tolist() == [3, 3, 0]
    assert (grown.steps, grown.since) == (3, 3)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    outcome = rule.after_step(grown, x, Stacked(3), Signals(losses=torch.tensor([0.3, 0.2, 0.1])))
    assert outcome.is_round and outcome.state.leader == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pull": 1.5}, r"pull = 1.5; Leader needs a number in \[0, 1\]"),
        ({"global_pull": -0.1}, "global_pull = -0.1"),
        ({"pull": nan}, "pull = nan"),
        ({"global_sync_every": 100}, "needs a multiple of sync_every = 64 .*global_sync_every=128"),
        ({"sync_every": 0}, "sync_every = 0"),
        ({"window": 0}, "window = 0"),
        ({"score": "vote"}, "score = 'vote'"),
        ({"momentum_policy": "drop"}, "momentum_policy = 'drop'"),
        ({"statistics_policy": "theirs"}, "statistics_policy = 'theirs'"),
        ({"verify": 1}, "verify = 1"),
        ({"anchor": 0.1, "pull": 0.0}, "anchor = 0.1 with pull = 0"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Leader(**settings)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


def test_groups_must_divide_the_workers() -> None:
    with pytest.raises(UsageError, match=r"groups = 3 with 8 workers.*use 1, 2, 4, 8"):
        Stacked(8, groups=3)


def test_the_workers_must_form_the_groups_that_the_rule_asks_for() -> None:
    with pytest.raises(UsageError, match=r"groups = 2; the workers at the start form 1"):
        Leader(groups=2).init(torch.zeros(4, 1), Stacked(4))


def test_both_scalings_of_the_pull_are_printed() -> None:
    assert str(pull_scalings(0.1, lr=5e-4)) == "pull fraction 0.1 = penalty weight 200"


def test_alone_it_says_what_it_comes_to() -> None:
    event = Leader().degenerates(1, step=7)
    assert event is not None and event.step == 7 and "plain SGD" in str(event.values["comes_to"])
    assert Leader().degenerates(2, step=7) is None
