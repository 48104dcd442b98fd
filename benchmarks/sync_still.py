"""How long workers stand still on the virtual clock, per rule and trigger, beside one slow worker.

`still_RULE_TRIGGER`  share of all worker time in which nothing is computed: 16 virtual workers, 50 ms steps
with 10 % jitter, one worker 4x slower, period 64, 1 Gbit/s between workers, weights of 13.9 kB. Simulated: no
hardware is measured. Nobody stands still under `Independent`, which is the control. Rounds by total count and
in the background may cost 5 %; the others are reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pairing import Row, bounded, measured
from shoal.study.workload import load_workload
from shoal.sync import (
    EASGD,
    AllReduce,
    DiLoCo,
    Downpour,
    Independent,
    Leader,
    LocalSGD,
    ShippedRule,
    SlowMo,
)
from shoal.world.virtual.clock import Pace
from shoal.world.virtual.setup import Setup
from shoal.world.virtual.simulate import simulate
from shoal.world.virtual.triggers import TriggerName

WORKERS, SLOWDOWN, PERIOD, ROUNDS = 16, 4.0, 64, 6
BOUND = 0.05
UNIT = "share of worker time (simulated)"

CASES: Mapping[str, tuple[ShippedRule, TriggerName]] = {
    "independent": (Independent(), "fixed"),
    "leader_background": (Leader(sync_every=PERIOD), "background"),
    "leader_total_count": (Leader(sync_every=PERIOD), "total-count"),
    "leader_fixed": (Leader(sync_every=PERIOD), "fixed"),
    "local_sgd_total_count": (LocalSGD(sync_every=PERIOD), "total-count"),
    "local_sgd_fixed": (LocalSGD(sync_every=PERIOD), "fixed"),
    "slowmo_fixed": (SlowMo(sync_every=PERIOD), "fixed"),
    "diloco_fixed": (DiLoCo(sync_every=PERIOD), "fixed"),
    "easgd_server": (EASGD(sync_every=PERIOD), "fixed"),
    "downpour_server": (Downpour(sync_every=PERIOD), "fixed"),
    "allreduce_fixed": (AllReduce(), "fixed"),
}


def rows(quick: bool) -> list[Row]:
    """One row for each rule and trigger."""
    workload = load_workload("digits_mlp")
    found: list[Row] = []
    for name, (rule, trigger) in CASES.items():
        shares: list[float] = []
        for seed in range(2 if quick else 5):
            setup = Setup(
                workload=workload,
                rule=rule,
                trigger=trigger,
                workers=WORKERS,
                local_batch=1,
                samples=WORKERS * PERIOD * ROUNDS,
                pace=Pace(step_seconds=0.05, jitter=0.1, seed=seed),
                slowdowns={WORKERS - 1: SLOWDOWN},
                seed=seed,
                models=(),
            )
            shares.append(simulate(setup).idle_share)
        label, note = f"still_{name}", f"{len(shares)} seeds; simulated"
        if trigger == "fixed":
            found.append(measured(label, UNIT, shares, note))
        else:
            found.append(bounded(label, UNIT, shares, [BOUND] * len(shares), note))
    return found
