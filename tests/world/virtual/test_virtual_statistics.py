"""Models with BatchNorm and workers with momentum: what follows a pull, and what it costs."""

import pytest
import torch
from fleets import run as _run
from fleets import setup, tiny
from torch import nn

from shoal.errors import UsageError
from shoal.sync import Leader, LocalSGD
from shoal.workloads.study_workload import Workload, cross_entropy
from shoal.world.virtual.crew import Crew
from shoal.world.virtual.faults import Fault
from shoal.world.virtual.simulate import run_crew, simulate

STATISTICS = 4 * (6 + 6) + 8
"""Bytes of a mean, a variance and a count."""


def normed():
    base = tiny()
    return Workload(
        name="normed",
        model=lambda: nn.Sequential(
            nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
        ),
        loss=cross_entropy,
        train=base.split("train"),
        val=base.split("val"),
        allow_batch_norm=True,
    )


def run(rule, **changes):
    from dataclasses import replace

    return simulate(replace(setup(rule, **changes), workload=normed()))


@pytest.mark.parametrize("trigger", ["fixed", "total-count", "background"])
@pytest.mark.parametrize("policy", ["own", "leader", "recompute"])
def test_statistics_follow_the_leader_and_are_paid_for(policy, trigger):
    found = run(Leader(sync_every=16, statistics_policy=policy), trigger=trigger, samples=3200)
    own = run(Leader(sync_every=16), trigger=trigger, samples=3200)
    assert found.engine == "vmap"
    assert found.counted_bytes == found.payload_bytes
    more = sum(found.counted_bytes.values()) - sum(own.counted_bytes.values())
    assert (more > 0) == (policy == "leader")
    if policy == "leader" and trigger == "fixed":
        assert more == found.rounds * 3 * STATISTICS
    assert found.evaluations[-1].scores["leader"]["cross_entropy_error"] < 0.7


def test_mean_statistics_are_the_same_on_all_workers():
    from dataclasses import replace

    rule = LocalSGD(sync_every=16, statistics_policy="mean")
    crew = Crew(replace(setup(rule), workload=normed()))
    run_crew(crew)
    for rows in crew.stack.buffers.values():
        assert all(torch.equal(row, rows[0]) for row in rows)
    rule = LocalSGD(sync_every=16)
    crew = Crew(replace(setup(rule), workload=normed()))
    run_crew(crew)
    assert not torch.equal(
        crew.stack.buffers["1.running_mean"][0], crew.stack.buffers["1.running_mean"][1]
    )


@pytest.mark.parametrize("mode", ["vectorised", "loop"])
def test_momentum_is_reset_or_interpolated_and_a_leader_s_momentum_is_paid_for(mode):
    bytes_by = {}
    for policy in ("keep", "reset", "interpolate"):
        crew = Crew(setup(Leader(sync_every=16, momentum_policy=policy), mode=mode))
        record = run_crew(crew)
        bytes_by[policy] = sum(record.counted_bytes.values())
        zero = [not bool(row.any()) for row in crew.stack.slots["momentum"]]
        assert sum(zero) == (3 if policy == "reset" else 0)
    assert bytes_by["keep"] == bytes_by["reset"] < bytes_by["interpolate"]


@pytest.mark.parametrize("trigger", ["fixed", "background"])
def test_a_replaced_worker_loses_its_momentum_and_takes_the_leader_s_statistics(trigger):
    from dataclasses import replace

    faults = {1: (Fault(kind="nan", from_step=20),)}
    crew = Crew(
        replace(setup(Leader(sync_every=16), faults=faults), workload=normed(), trigger=trigger)
    )
    record = run_crew(crew)
    assert any(event["kind"] == "replaced" for event in record.events)
    if trigger == "fixed":
        assert all(bool(rows.isfinite().all()) for rows in crew.stack.buffers.values())
        assert bool(crew.x.isfinite().all())


def test_background_snapshots_cannot_average():
    with pytest.raises(UsageError, match="snapshots hold"):
        _run(Leader(statistics_policy="mean"), trigger="background")
