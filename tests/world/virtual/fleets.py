"""A tiny workload and short ways to simulate with it."""

import torch
from torch import nn

from shoal.workloads.study_workload import Workload, cross_entropy
from shoal.world.virtual.clock import Pace
from shoal.world.virtual.setup import Setup
from shoal.world.virtual.simulate import simulate
from shoal.world.virtual.stack import Optimizer

PARAMETERS = 8 * 6 + 6 + 6 * 3 + 3
BYTES = 4 * PARAMETERS


def tiny():
    """Three classes around three points: learnable in a few hundred steps."""
    draw = torch.Generator().manual_seed(0)
    centers = torch.randn(3, 8, generator=draw)
    y = torch.randint(0, 3, (600,), generator=draw)
    x = centers[y] + 0.8 * torch.randn(600, 8, generator=draw)
    return Workload(
        name="tiny",
        model=lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        loss=cross_entropy,
        train=(x[:480], y[:480]),
        val=(x[480:], y[480:]),
    )


def setup(rule, **changes):
    values = {
        "samples": 4 * 4 * 16 * 6,
        "workers": 4,
        "local_batch": 4,
        "optimizer": Optimizer(kind="heavy_ball", lr=0.02),
        "pace": Pace(step_seconds=0.05, seed=5),
        "models": ("leader", "mean", "best", "center"),
    }
    return Setup(workload=tiny(), rule=rule, **(values | changes))


def run(rule, **changes):
    return simulate(setup(rule, **changes))


def kinds(record):
    return [event["kind"] for event in record.events if event["kind"] != "round"]


def plain_without_engine(record):
    found = record.to_dict()
    del found["engine"]
    return found
