"""The virtual cluster against a plain Python loop over its workers, on the same trajectories.

`virtual_MODEL_bB_full`    every worker makes the same number of steps between rounds: all rows are filled.
`virtual_MODEL_bB_total`   total-count rounds with workers of four speeds: rows make unequal numbers of steps.
`virtual_MODEL_bB_background`  every worker keeps its own time, none waits.
`virtual_MODEL_bB_allreduce`   gradients are exchanged in every step.

Both sides are whole simulations: clock, links, prices, rounds of the leader rule and the account of samples,
without evaluations; ours trains neighbouring rows as one program, the other one worker after another with a
module and a fused `torch.optim` optimizer each. A unit of cost is the processor's seconds for one step of one
virtual worker. Before anything is timed, the two are run side by side, and their models must agree.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from benchmarks.pairing import Row, paired
from shoal.study.workload import load_workload
from shoal.sync import AllReduce, Leader
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.crew import Crew
from shoal.world.virtual.setup import Setup
from shoal.world.virtual.simulate import run_crew
from shoal.world.virtual.stack import Optimizer

MODELS: Mapping[str, str] = {
    "digits3k": "digits_mlp",
    "mlp200k": "fashion_fc",
    "cnn20k": "fashion_cnn",
}
BATCHES = (1, 8)
WORKERS = 16
SYNC_EVERY = 64
PEER = "a plain Python loop over the workers"
UNIT = "CPU seconds per virtual-worker step"
AGREE = 1e-4
"""Largest relative difference of the mean model after two short rounds: rounding, grown by training."""
SHORT = 8
"""Steps of such a round. Later steps say nothing: training is chaotic."""


def rows(quick: bool) -> list[Row]:
    """Rows for each model and batch; the goal of `_full` is 0.5 at mlp200k and 0.7 at cnn20k."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _compare(f"virtual_{name}_b{batch}_{case}", setup, 3 if quick else 9)
            for name, workload_name in MODELS.items()
            for workload in [load_workload(workload_name)]
            for batch in BATCHES
            for case, setup in _cases(workload, batch).items()
        ]
    finally:
        torch.set_num_threads(threads)


def _cases(workload: Workload, batch: int) -> dict[str, Setup]:
    period = WORKERS * SYNC_EVERY * batch
    speeds = {worker: (1.0, 1.3, 2.0, 4.0)[worker % 4] for worker in range(WORKERS)}
    full = Setup(
        workload=workload,
        rule=Leader(sync_every=SYNC_EVERY),
        samples=period,
        workers=WORKERS,
        local_batch=batch,
        optimizer=Optimizer(kind="nesterov", lr=0.01, momentum=0.9),
        models=(),
    )
    return {
        "full": full,
        "total": replace(full, trigger="total-count", slowdowns=speeds),
        "background": replace(full, trigger="background"),
        "allreduce": replace(full, rule=AllReduce()),
    }


def _compare(name: str, setup: Setup, pairs: int) -> Row:
    ours, theirs = setup, replace(setup, mode="loop")
    difference = _difference(_short(ours), _short(theirs))
    assert difference <= AGREE, f"{name}: models differ by {difference:.1e}"
    costs: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        sides = list(zip(costs, (ours, theirs), strict=True))
        for kept, side in sides if number % 2 else reversed(sides):
            kept.append(_cost(side))
    rate = sum(costs[0]) and len(costs[0]) / sum(costs[0])
    note = f"{rate:,.0f} virtual-worker steps per CPU-second; models agree to {difference:.0e}"
    return paired(name, UNIT, *costs, peer=PEER, note=note)


def _short(setup: Setup) -> Setup:
    """Two rounds of few steps."""
    rule = Leader(sync_every=SHORT) if isinstance(setup.rule, Leader) else setup.rule
    return replace(setup, rule=rule, samples=2 * SHORT * setup.workers * setup.local_batch)


def _cost(setup: Setup) -> float:
    """CPU seconds per step; memory, modules and programs are made before."""
    crew = Crew(setup)
    begun = time.process_time()
    record = run_crew(crew)
    return (time.process_time() - begun) / record.steps


def _difference(ours: Setup, theirs: Setup) -> float:
    """Of the mean models, relative."""
    means: list[torch.Tensor] = []
    for setup in (ours, theirs):
        crew = Crew(setup)
        run_crew(crew)
        means.append(crew.x.double().mean(0))
    return float((means[0] - means[1]).norm() / means[1].norm())
