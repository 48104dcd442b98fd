"""Whole simulated runs: every rule, both ways of computing, membership, faults, and what is counted."""

import math
import time

import pytest
from fleets import BYTES, kinds, plain_without_engine, run, setup

from shoal.errors import UsageError
from shoal.sync import (
    EAMSGD,
    EASGD,
    SGP,
    AllReduce,
    DiLoCo,
    Downpour,
    Independent,
    Leader,
    LocalSGD,
    PowerSGD,
)
from shoal.world.virtual.crew import Crew
from shoal.world.virtual.faults import Fault
from shoal.world.virtual.links import LinkClass, Network
from shoal.world.virtual.rounds import Rounds
from shoal.world.virtual.setup import Happening
from shoal.world.virtual.stack import Optimizer

SGD = Optimizer(kind="sgd", lr=0.02)

RUNS = {
    "all-reduce": (AllReduce(), {}),
    "leader": (Leader(sync_every=16), {}),
    "leader total": (Leader(sync_every=16), {"trigger": "total-count", "slowdowns": {1: 2.0}}),
    "leader background": (Leader(sync_every=16), {"trigger": "background", "slowdowns": {1: 2.0}}),
    "leader anchor": (Leader(sync_every=8, anchor=0.2), {}),
    "leader anchor total": (Leader(sync_every=8, anchor=0.2), {"trigger": "total-count"}),
    "leader groups": (Leader(sync_every=8, global_sync_every=16, groups=2), {}),
    "leader interpolate": (Leader(sync_every=8, momentum_policy="interpolate"), {}),
    "local": (LocalSGD(sync_every=16), {}),
    "post-local": (LocalSGD(sync_every=16, warmup_steps=8), {}),
    "easgd": (EASGD(sync_every=8), {"slowdowns": {1: 2.0}}),
    "easgd sync": (EASGD(sync_every=8, synchronous=True), {}),
    "eamsgd": (EAMSGD(sync_every=8, momentum=0.9), {"optimizer": SGD}),
    "downpour": (Downpour(sync_every=4), {"optimizer": SGD}),
    "diloco": (DiLoCo(sync_every=16, fragments=2, delay=3), {}),
    "sgp": (SGP(), {}),
    "powersgd": (PowerSGD(), {}),
    "independent": (Independent(), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_rows_together_tell_what_the_plain_loop_over_workers_tells(name):
    rule, changes = RUNS[name]
    ours = run(rule, **changes)
    plain = run(rule, **changes, mode="loop")
    assert (ours.engine, plain.engine) == ("layers", "loop")
    assert ours.virtual_seconds == plain.virtual_seconds
    assert ours.counted_bytes == plain.counted_bytes
    assert [w.steps for w in ours.workers] == [w.steps for w in plain.workers]
    for mine, theirs in zip(ours.evaluations, plain.evaluations, strict=True):
        assert mine.samples == theirs.samples
        for model, scores in theirs.scores.items():
            expected = scores["cross_entropy_error"]
            assert mine.scores[model]["cross_entropy_error"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_the_same_setup_gives_the_same_run_whatever_the_wall_clock_says(name, monkeypatch):
    rule, changes = RUNS[name]
    first = run(rule, **changes).to_dict()

    def never(*_):
        raise AssertionError("the wall clock was read")

    for reading in ("time", "monotonic", "perf_counter", "process_time", "time_ns"):
        monkeypatch.setattr(time, reading, never)
    second = run(rule, **changes).to_dict()
    monkeypatch.undo()
    assert first == second


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_the_same_by_the_rule_s_record_by_the_links_and_by_the_formulas(name):
    rule, changes = RUNS[name]
    found = run(rule, **changes)
    assert found.counted_bytes == found.payload_bytes
    assert sum(found.counted_bytes.values()) == found.formula_bytes
    assert found.drawn == found.used + found.discarded + found.pending
    assert (found.formula_bytes == 0) == (name == "independent")


def test_bytes_of_a_leader_round_are_those_of_section_5():
    found = run(Leader(sync_every=16))
    assert found.rounds == 6
    assert found.counted_bytes["inter"] == found.rounds * (3 * BYTES + 12 * 4 * 3)


def test_bytes_of_averaging_and_of_all_reduce():
    assert run(LocalSGD(sync_every=16)).counted_bytes["inter"] == 6 * 2 * 3 * BYTES
    assert run(AllReduce()).counted_bytes["inter"] == 96 * 2 * 3 * BYTES


def test_half_precision_on_the_wire_counts_half():
    found = run(Leader(sync_every=16), wire="bf16")
    assert found.counted_bytes["inter"] == found.rounds * (3 * BYTES // 2 + 12 * 4 * 3)


def test_all_reduce_workers_stay_equal():
    crew = Crew(setup(AllReduce(), samples=4 * 4 * 8))
    Rounds(crew).run()
    assert all(bool((row == crew.x[0]).all()) for row in crew.x)


def test_a_fleet_learns_and_tells_when_its_target_was_reached():
    found = run(LocalSGD(sync_every=16), samples=9600, target=("classification_error", 0.2))
    assert found.evaluations[-1].scores["mean"]["classification_error"] <= 0.2
    reached = found.reached["mean"]
    assert 0 < reached.samples <= 9600
    assert 0 < reached.virtual_seconds <= found.virtual_seconds
    never = run(LocalSGD(sync_every=16), target=("classification_error", 0.0))
    assert never.reached["mean"].samples is None


# -- E12: stragglers --------------------------------------------------------------------------------

IDLE = {
    ("fixed", 2.0): 0.465,
    ("fixed", 4.0): 0.70,
    ("total-count", 2.0): 0.011,
    ("total-count", 4.0): 0.021,
    ("background", 2.0): 0.0,
    ("background", 4.0): 0.0,
}


@pytest.mark.parametrize(("trigger", "slowdown"), IDLE)
def test_e12_idle_share_with_one_straggler(trigger, slowdown):
    """16 workers, period 64, 50 ms steps, jitter 10 %: section 6.3, E12."""
    found = run(
        Leader(),
        workers=16,
        local_batch=1,
        samples=16 * 64 * 6,
        trigger=trigger,
        slowdowns={15: slowdown},
        models=("leader",),
    )
    assert found.waiting_share == pytest.approx(IDLE[trigger, slowdown], abs=0.015)
    assert found.exchange_share < 0.001
    if trigger != "fixed":
        assert found.idle_share <= 0.03
    if trigger == "total-count":
        others = [w.steps for w in found.workers[:15]]
        share = found.workers[15].steps / (sum(others) / len(others))
        assert share == pytest.approx(1 / slowdown, abs=0.05)


# -- E11: groups ------------------------------------------------------------------------------------


def test_e11_multi_leader_sends_fewer_bytes_between_nodes_and_takes_less_time():
    """4 groups of 4 on 4 nodes, 10 GB/s inside, 117 MB/s between: section 6.3, E11."""
    common = {
        "workers": 16,
        "local_batch": 1,
        "samples": 16 * 16 * 8,
        "models": ("mean",),
        "network": Network(workers_per_node=4),
    }
    single = run(Leader(sync_every=4), **common)
    multi = run(Leader(sync_every=4, global_sync_every=16, groups=4), **common)
    rounds = 32
    scores = {"intra": 4 * 4 * 3 * 12, "inter": 16 * 12 * 12}
    assert single.rounds == multi.rounds == rounds
    assert single.counted_bytes["inter"] == rounds * (3 * BYTES + scores["inter"])
    assert single.counted_bytes["intra"] == rounds * (12 * BYTES + scores["intra"])
    # n (l - 1) N inside nodes at every round; the global leader's (n - 1) N at every fourth.
    whole = rounds // 4
    assert multi.counted_bytes["inter"] == whole * 3 * BYTES + rounds * scores["inter"]
    assert multi.counted_bytes["intra"] == (rounds + whole) * 12 * BYTES + rounds * scores["intra"]
    assert multi.virtual_seconds < single.virtual_seconds


# -- background -------------------------------------------------------------------------------------


def test_background_workers_never_wait_and_snapshots_have_an_age():
    found = run(Leader(sync_every=16), trigger="background", slowdowns={2: 4.0})
    assert found.idle_share == 0
    assert len(found.snapshot_ages) == len(found.snapshot_lags) > 0
    assert all(0 < age < 20 * 0.05 * 4 for age in found.snapshot_ages)
    assert max(found.snapshot_lags) >= 1
    assert found.late_pulls == 0


def test_a_snapshot_that_takes_longer_than_a_period_is_late_and_stops_nobody():
    slow = Network(inter=LinkClass(latency_seconds=2.0, bytes_per_second=1e6))
    found = run(Leader(sync_every=4), trigger="background", network=slow)
    assert found.late_pulls > 0
    assert found.idle_share == 0
    assert min(found.snapshot_ages) >= 2.0


def test_with_pull_0_background_rounds_are_no_communication():
    """Weights that nobody moves: the same as if workers had trained alone."""
    pulled = run(Leader(sync_every=16, pull=0.0), trigger="background", samples=1024)
    assert pulled.snapshot_ages == []
    assert pulled.counted_bytes["inter"] == pulled.rounds * 3 * 12


# -- membership -------------------------------------------------------------------------------------

CHANGES = (
    Happening(kind="join", at_samples=300, workers=2, slowdown=2.0),
    Happening(kind="kill", at_seconds=2.03, worker=1),
    Happening(kind="leave", at_samples=900, worker=0),
    Happening(kind="kill", at_samples=1100),
)


@pytest.mark.parametrize("name", [n for n in RUNS if n not in ("powersgd", "leader groups")])
def test_workers_come_and_go_under_every_rule(name):
    rule, changes = RUNS[name]
    found = run(rule, **changes, events=CHANGES, samples=2600)
    membership = [kind for kind in kinds(found) if kind in ("join", "leave", "kill")]
    assert sorted(membership) == ["join", "kill", "kill", "leave"]
    assert found.ended == "finished"
    assert found.used >= 2600
    assert found.drawn == found.used + found.discarded + found.pending
    assert found.counted_bytes == found.payload_bytes
    assert sum(found.counted_bytes.values()) == found.formula_bytes
    lives = {w.worker: w.how for w in found.workers}
    assert lives == {0: "left", 1: "killed", 2: "there", 3: "there", 4: "there", 5: "killed"}
    assert found.workers[1].left == 2.03
    assert all(math.isfinite(e.scores["mean"]["cross_entropy_error"]) for e in found.evaluations)


def test_a_killed_worker_s_last_samples_are_discarded_and_a_left_one_s_are_used():
    killed = run(
        LocalSGD(sync_every=16), events=(Happening(kind="kill", at_seconds=1.0, worker=2),)
    )
    steps = killed.workers[2].steps
    assert killed.discarded == 4 * (steps - steps // 16 * 16) > 0
    left = run(LocalSGD(sync_every=16), events=(Happening(kind="leave", at_seconds=1.0, worker=2),))
    assert left.discarded == 0


def test_nobody_left_is_an_end():
    events = tuple(Happening(kind="kill", at_seconds=1.0, worker=w) for w in range(4))
    for trigger in ("fixed", "background"):
        found = run(Leader(sync_every=16), events=events, trigger=trigger)
        assert found.ended == "nobody left"


def test_a_death_in_a_leader_round_costs_that_round_only_if_it_was_the_leader_s():
    slow = Network(inter=LinkClass(latency_seconds=0.1, bytes_per_second=1e6))
    quiet = run(Leader(sync_every=16), network=slow, samples=4 * 4 * 16 * 3)
    rounds = [event for event in quiet.events if event["kind"] == "round"]
    leader, end = rounds[1]["leader"], rounds[1]["virtual_seconds"]
    for victim in range(4):
        kill = Happening(kind="kill", at_seconds=end - 0.05, worker=victim)
        found = run(Leader(sync_every=16), network=slow, samples=4 * 4 * 16 * 3, events=(kill,))
        assert found.lost_rounds == (victim == leader)
        assert found.ended == "finished"


def test_groups_are_rebalanced_when_one_has_died_out():
    events = tuple(Happening(kind="kill", at_seconds=0.5, worker=w) for w in (0, 1))
    rule = Leader(sync_every=8, global_sync_every=16, groups=2)
    found = run(rule, events=events)
    assert "rebalanced" in kinds(found)
    assert {w.group for w in found.workers if w.how == "there"} == {0, 1}


# -- bad workers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="flip"),
        Fault(kind="noise", scale=1.0),
        Fault(kind="nan", from_step=20),
        Fault(kind="frozen"),
        Fault(kind="lr", scale=100.0),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_bad_worker_leads_no_round_and_the_leader_learns_all_the_same(fault):
    clean = run(Leader(sync_every=16), samples=6400, models=("leader",))
    found = run(Leader(sync_every=16), samples=6400, models=("leader",), faults={1: (fault,)})
    leaders = [event["leader"] for event in found.events if event["kind"] == "round"]
    assert leaders.count(1) <= (2 if fault.kind in ("frozen", "nan") else 0)
    error = "classification_error"
    assert found.evaluations[-1].scores["leader"][error] <= (
        clean.evaluations[-1].scores["leader"][error] + 0.05
    )


def test_a_lie_does_harm_unless_followers_verify():
    bad = {1: (Fault(kind="flip"), Fault(kind="lie", scale=0.0))}
    loss = "cross_entropy_error"
    ends = {}
    for verify in (False, True):
        rule = Leader(sync_every=16, pull=0.5, verify=verify)
        found = run(rule, samples=6400, faults=bad, models=("best",))
        ends[verify] = found.evaluations[-1].scores["best"][loss]
        if verify:
            assert "refused" in kinds(found)
    assert ends[True] < 0.6 < ends[False]


def test_a_worker_that_is_not_finite_is_replaced():
    rule = Leader(sync_every=16)
    for trigger in ("fixed", "total-count", "background"):
        found = run(
            rule, faults={1: (Fault(kind="nan", from_step=20),)}, trigger=trigger, samples=3200
        )
        assert "replaced" in kinds(found), trigger


def test_all_workers_diverged_is_an_outcome():
    bad = {w: (Fault(kind="nan"),) for w in range(4)}
    found = run(Leader(sync_every=16), faults=bad)
    assert found.ended == "diverged"
    assert "no worker can lead" in found.notes[0]


# -- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        (AllReduce(), {"trigger": "total-count"}, "exchanges gradients in every step"),
        (EASGD(sync_every=8), {"trigger": "background"}, "visit a server alone"),
        (LocalSGD(), {"trigger": "background"}, "only the leader rule"),
        (Leader(momentum_policy="interpolate"), {"trigger": "background"}, "snapshots hold"),
        (Leader(anchor=0.1), {"trigger": "background"}, "anchor = 0.1"),
    ],
)
def test_a_rule_that_cannot_have_a_trigger_is_named(rule, changes, message):
    with pytest.raises(UsageError, match=message):
        run(rule, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers = 0"),
        ({"trigger": "random"}, "trigger = 'random'"),
        ({"groups": 3}, "groups = 3"),
        ({"models": ("teacher",)}, "models = 'teacher'"),
        ({"target": ("accuracy", 0.1)}, "target metric = 'accuracy'"),
        ({"split": "test"}, "split = 'test'"),
        ({"slowdowns": {9: 2.0}}, "slowdowns of worker 9"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_a_setting_out_of_range_is_named(changes, message):
    with pytest.raises(UsageError, match=message):
        setup(Leader(), **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "pause", "at_seconds": 1.0}, "kind = 'pause'"),
        ({"kind": "join"}, "exactly one of"),
        ({"kind": "kill", "at_seconds": 1.0, "workers": 2}, "workers = 2"),
        ({"kind": "join", "at_seconds": 1.0, "worker": 1}, "worker = 1"),
    ],
)
def test_an_event_out_of_range_is_named(values, message):
    with pytest.raises(UsageError, match=message):
        Happening(**values)


def test_the_record_is_plain_and_labelled():
    import json

    found = plain_without_engine(run(Leader(sync_every=16)))
    assert "simulated" in found["simulated"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_hundreds_of_workers_come_and_go_in_one_process():
    events = tuple(Happening(kind="kill", at_seconds=0.1 * w, worker=w) for w in range(1, 40, 2))
    found = run(
        Leader(sync_every=8),
        workers=300,
        local_batch=1,
        samples=300 * 8 * 4,
        trigger="total-count",
        slowdowns={w: 1 + w % 4 for w in range(300)},
        events=(*events, Happening(kind="join", at_samples=3000, workers=50)),
        models=("leader",),
    )
    assert found.ended == "finished"
    assert len(found.workers) == 350
    assert kinds(found).count("join") == 1
    assert found.drawn == found.used + found.discarded + found.pending
    assert found.idle_share < 0.5
