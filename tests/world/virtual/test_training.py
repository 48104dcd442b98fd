"""Rows trained together against the plain loop over workers."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.workloads.study_workload import Workload, cross_entropy
from shoal.world.virtual.faults import Fault, Faults
from shoal.world.virtual.loop import LoopTraining
from shoal.world.virtual.stack import Optimizer, Stack
from shoal.world.virtual.training import Work
from shoal.world.virtual.vectorised import VectorisedTraining

WORKERS, BATCH = 7, 4
# One shorter than its neighbours, in the first, the middle and the last place of a chunk of three.
STEPS = (5, 6, 6, 6, 2, 7, 6)


class Normed(nn.Module):
    """Not a chain of plain layers, and with running statistics."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(9, 6, bias=False)  # one would have no gradient but rounding
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.norm(self.inner(x.flatten(1)))) + 1)


MODELS = {
    "layers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)),
    "images": lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    "vmap": Normed,
}


def workload(name):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, 3, 3, generator=draw)
    y = torch.randint(0, 3, (50,), generator=draw)
    return Workload(
        name=name,
        model=MODELS[name],
        loss=cross_entropy,
        train=(x, y),
        val=(x, y),
        allow_batch_norm=True,
    )


def trained(name, optimizer, mode, *, faults=None, rounds=2):
    task = workload(name)
    stack = Stack(task.build(0), optimizer, WORKERS)
    for row in range(WORKERS):
        stack.load(row, task.build(row))
    if mode == "loop":
        training = LoopTraining(stack, task, optimizer)
    else:
        training = VectorisedTraining(stack, task, optimizer, local_batch=BATCH, together=3)
    rng = np.random.default_rng(0)
    losses = {}
    for number in range(rounds):
        work = [
            Work(
                row=row,
                samples=rng.integers(0, 50, (steps, BATCH)),
                lr=np.full(steps, optimizer.lr * (1 + row / 10)),
                first=number * steps,
                faults=Faults(worker=row, listed=(faults or {}).get(row, ())),
            )
            for row, steps in enumerate(STEPS)
        ]
        losses = training.advance(work)
    return stack, losses, training.name


def difference(ours, theirs):
    """The largest relative difference of any row."""
    ours, theirs = ours.reshape(WORKERS, -1), theirs.reshape(WORKERS, -1)
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-12)).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["sgd", "heavy_ball", "nesterov", "adamw"])
def test_rows_together_are_the_plain_loop_to_rounding(name, kind):
    optimizer = Optimizer(kind=kind, lr=0.05, weight_decay=0.01)
    plain, plain_losses, _ = trained(name, optimizer, "loop")
    ours, losses, engine = trained(name, optimizer, "vectorised")
    assert engine == ("vmap" if name == "vmap" else "layers")
    # AdamW divides by the root of gradients that may be next to nothing.
    tolerance = 1e-4 if kind == "adamw" else 1e-5
    assert difference(ours.parameters, plain.parameters) < tolerance
    for slot, rows in plain.slots.items():
        assert difference(ours.slots[slot], rows) < tolerance
    for buffer, rows in plain.buffers.items():
        assert difference(ours.buffers[buffer].double(), rows.double()) < tolerance
    assert ours.steps == plain.steps == [2 * steps for steps in STEPS]
    for row, steps in enumerate(STEPS):
        assert losses[row].shape == (steps,)
        np.testing.assert_allclose(losses[row], plain_losses[row], rtol=1e-4)


FAULTS = {
    0: (Fault(kind="flip"),),
    2: (Fault(kind="noise", scale=0.3, from_step=3),),
    4: (Fault(kind="nan", from_step=3),),
    5: (Fault(kind="flip", from_step=2), Fault(kind="lie", scale=0.0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_faults_do_the_same_to_both(name):
    optimizer = Optimizer(kind="heavy_ball", lr=0.05)
    plain, _, _ = trained(name, optimizer, "loop", faults=FAULTS)
    ours, _, _ = trained(name, optimizer, "vectorised", faults=FAULTS)
    well, _, _ = trained(name, optimizer, "loop")
    assert torch.equal(ours.parameters.isnan(), plain.parameters.isnan())
    assert difference(ours.parameters.nan_to_num(), plain.parameters.nan_to_num()) < 1e-5
    same = [torch.equal(plain.parameters[row], well.parameters[row]) for row in range(WORKERS)]
    assert same == [row not in FAULTS for row in range(WORKERS)]
    assert bool(plain.parameters[4].isnan().all())


def test_a_plain_loop_of_its_own_gives_the_same_bits():
    """The reference itself, against a module and an optimizer that know nothing of rows."""
    optimizer = Optimizer(kind="nesterov", lr=0.05, weight_decay=0.01)
    task = workload("layers")
    stack = Stack(task.build(0), optimizer, 2)
    stack.load(0, task.build(0))
    stack.load(1, task.build(1))
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 50, (6, BATCH))
    LoopTraining(stack, task, optimizer).advance(
        [Work(row=1, samples=samples, lr=np.full(6, 0.05))]
    )
    model = task.build(1)
    plain = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    )
    x, y = task.split("train")
    for rows in torch.from_numpy(samples):
        plain.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).mean().backward()
        plain.step()
    weights = stack.weights(1)
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(weights[parameter_name], parameter)
    assert torch.equal(stack.weights(0)["1.weight"], task.build(0)[1].weight)


def test_rows_hold_the_parameters_and_nothing_else():
    stack = Stack(workload("layers").build(0), Optimizer(kind="sgd"), 3)
    assert stack.parameters.shape == (3, 9 * 8 + 8 + 8 * 3 + 3)


def test_reordered_rows_carry_everything_with_them():
    optimizer = Optimizer(kind="adamw", lr=0.01)
    stack, _, _ = trained("vmap", optimizer, "loop")
    before = [{k: v.clone() for k, v in stack.weights(row).items()} for row in range(WORKERS)]
    steps = list(stack.steps)
    stack.reorder([6, 0, 3])
    for row, was in enumerate([6, 0, 3]):
        assert all(torch.equal(v, before[was][k]) for k, v in stack.weights(row).items())
        assert stack.steps[row] == steps[was]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer(kind="lars"), "kind = 'lars'"),
        (lambda: Optimizer(momentum=1.0), "momentum = 1"),
        (lambda: Fault(kind="sleep"), "kind = 'sleep'"),
        (lambda: Fault(kind="noise", scale=-1.0), "scale = -1"),
        (lambda: Fault(kind="flip", from_step=-1), "from_step = -1"),
    ],
)
def test_a_setting_out_of_range_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()
