"""Every engine against the shipped conformance suite, and the suite against engines that break it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.data import Order
from shoal.errors import UsageError
from shoal.study.engines.block import Layout, NotStackable
from shoal.study.engines.chain import Convolution, Linear, MaxPool, chain_of
from shoal.study.engines.contract import Engine
from shoal.study.engines.layers import LayersProgram
from shoal.study.engines.order import TrialOrder
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.stack import StackEngine
from shoal.study.engines.task import Task
from shoal.study.engines.vmap import VmapProgram
from shoal.study.space import Integer, Log, ReverseLog, Scale, Space
from shoal.study.spec import CurveSpec, OptimizerName
from shoal.study.workload import Workload, cross_entropy
from shoal.testing import engines as suite

OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "heavy_ball", "nesterov", "adamw")


def curve(kind: OptimizerName, *, decays: bool = False, **fixed: float) -> CurveSpec:
    scales: dict[str, Scale] = {"lr": Log(min=1e-3, max=0.3)}
    if kind in ("heavy_ball", "nesterov"):
        scales["momentum"] = ReverseLog(min=0.0, max=0.99)
    if decays:
        scales["decay_steps"] = Integer(min=2, max=9)
        fixed["end_factor"] = 0.1
    return CurveSpec(
        optimizer=kind,
        space=Space(scales),
        schedule="linear_decay" if decays else "constant",
        fixed=fixed,
    )


def workload(model, *, inputs=(12,), samples: int = 40, loss=cross_entropy) -> Workload:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((samples, *inputs), generator=generator)
    y = torch.randint(0, 4, (samples,), generator=generator)
    return Workload(
        name="small",
        model=model,
        loss=loss,
        train=(x, y),
        val=(x[:8], y[:8]),
        allow_batch_norm=True,
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.Linear(7, 4))


def wide_mlp() -> nn.Module:
    """Rows long enough to be updated one by one."""
    return nn.Sequential(nn.Linear(12, 1300), nn.ReLU(), nn.Linear(1300, 4, bias=False))


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, (2, 1), stride=(1, 2), bias=False),
        nn.MaxPool2d((2, 1), stride=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def wide_image_net() -> nn.Module:
    """Convolutions in rows that are updated one by one."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 300), nn.Linear(300, 4)
    )


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.top = nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.drop(self.layer(x)))


def stack(name: str, slots: int, sizes=None):
    def make(task: Task) -> Engine:
        layout = Layout(task.initial(0))
        program = (
            VmapProgram(task, layout) if name == "vmap" else LayersProgram(task, layout, slots)
        )
        return StackEngine(name, task, layout, program, slots=slots, sizes=sizes)

    return make


ENGINES = {
    "pool": PoolEngine,
    "vmap": stack("vmap", 4),
    "vmap-sizes": stack("vmap", 3, (2, 3)),
    "layers": stack("layers", 4),
    "layers-sizes": stack("layers", 4, (2, 3, 4)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_engine_keeps_the_contract(engine: str, kind: OptimizerName) -> None:
    task = Task(workload=workload(mlp), curve=curve(kind, weight_decay=0.01), global_batch=6)
    suite.check_engine(ENGINES[engine], task)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ("nesterov", "adamw"))
def test_long_rows_and_own_schedules(engine: str, kind: OptimizerName) -> None:
    task = Task(workload=workload(wide_mlp), curve=curve(kind, decays=True), global_batch=3)
    suite.check_engine(ENGINES[engine], task, trials=3)
    trials = suite.trials_of(task, 5)
    assert len({t.parameters["decay_steps"] for t in trials}) > 2
    suite.check_equals_plain_loop(ENGINES[engine], task, trials, steps=12)


@pytest.mark.parametrize("engine", ("pool", "vmap"))
def test_buffers_that_a_forward_pass_changes(engine: str) -> None:
    task = Task(
        workload=workload(norm_net, inputs=(1, 6, 6)), curve=curve("heavy_ball"), global_batch=4
    )
    suite.check_engine(ENGINES[engine], task, trials=3)
    trained = suite.trained(ENGINES[engine](task), suite.trials_of(task, 1), 3)[0]
    assert int(trained["1.num_batches_tracked"]) == 3


@pytest.mark.parametrize(
    ("engine", "model", "batch"),
    [
        ("vmap", image_net, 5),
        ("layers", image_net, 5),
        ("layers-sizes", image_net, 1),
        ("layers", wide_image_net, 1),
        ("layers-sizes", wide_image_net, 5),
    ],
)
def test_images(engine: str, model, batch: int) -> None:
    side = 8 if model is image_net else 6
    task = Task(
        workload=workload(model, inputs=(2, side, side)),
        curve=curve("nesterov"),
        global_batch=batch,
    )
    suite.check_engine(ENGINES[engine], task, trials=4)


def test_equal_maxima_get_their_gradient_in_the_same_place() -> None:
    """Blank image parts give windows of equal numbers."""
    flat = workload(image_net, inputs=(2, 8, 8))
    x, _ = flat.split("train")
    x[:, :, :5] = -0.5
    task = Task(workload=flat, curve=curve("sgd"), global_batch=6)
    suite.check_equals_plain_loop(ENGINES["layers"], task, suite.trials_of(task, 4))


def test_dropout_is_a_function_of_seed_and_step_in_the_pool() -> None:
    task = Task(workload=workload(Dropping), curve=curve("sgd"), global_batch=4)
    suite.check_engine(PoolEngine, task, trials=3)
    before = torch.get_rng_state()
    suite.trained(PoolEngine(task), suite.trials_of(task, 2), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("engine", ("vmap", "layers"))
def test_a_loss_of_the_users_own(engine: str) -> None:
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output - target[:, None]).square().mean(1)

    task = Task(workload=workload(mlp, loss=squared), curve=curve("nesterov"), global_batch=5)
    suite.check_engine(ENGINES[engine], task, trials=3)


def test_a_batch_of_one_and_one_of_everything() -> None:
    for batch in (1, 40):
        task = Task(workload=workload(mlp), curve=curve("nesterov"), global_batch=batch)
        for make in ENGINES.values():
            suite.check_equals_plain_loop(make, task, suite.trials_of(task, 3))
            suite.check_company(make, task, suite.trials_of(task, 3))


def test_plain_loop_is_what_a_user_would_write() -> None:
    task = Task(workload=workload(mlp), curve=curve("nesterov", weight_decay=0.1), global_batch=6)
    (trial,) = suite.trials_of(task, 1)
    model = task.initial(trial.seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=trial.parameters["lr"],
        momentum=trial.parameters["momentum"],
        weight_decay=0.1,
        nesterov=True,
    )
    x, y = task.workload.split("train")
    passes = [Order(n=40, seed=trial.seed, epoch=e).take(0, 40) for e in range(2)]
    stream = np.concatenate(passes)
    for step in range(9):
        rows = torch.from_numpy(stream[6 * step : 6 * step + 6])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    ours = suite.trained(PoolEngine(task), [trial], 9)[trial.id]
    assert suite.largest_difference(ours, dict(model.named_parameters()))[0] < 1e-6


# -- the suite itself ---------------------------------------------------------------------------------


class _Leaky(StackEngine):
    """Trains whatever else is in the stack one step further."""

    def __init__(self, task: Task) -> None:
        layout = Layout(task.initial(0))
        super().__init__("leaky", task, layout, VmapProgram(task, layout), slots=4)

    def advance(self, targets: Mapping[int, int]) -> None:
        super().advance(targets)
        for number in self._held:
            if number not in targets:
                for tensor in self.weights(number).values():
                    tensor.mul_(1.001)


class _Slanted(PoolEngine):
    """Forgets the weight decay."""

    def admit(self, trial, saved=None) -> None:
        super().admit(trial, saved)
        for group in self._optimizers[trial.id].param_groups:
            group["weight_decay"] = 0.0


class _Forgetful(PoolEngine):
    """Restores without the optimizer's slots."""

    def admit(self, trial, saved=None) -> None:
        super().admit(trial, saved)
        self._optimizers[trial.id].state.clear()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (_Leaky, "company|touched"),
        (_Slanted, "differs from the plain loop"),
        (_Forgetful, "restoring"),
    ],
)
def test_suite_finds_what_is_broken(broken, complaint: str) -> None:
    task = Task(workload=workload(mlp), curve=curve("nesterov", weight_decay=0.5), global_batch=6)
    with pytest.raises(AssertionError, match=complaint):
        suite.check_engine(broken, task)


# -- what an engine is made of ----------------------------------------------------------------------------


@pytest.mark.parametrize("samples", (3, 10, 1000, 1437, 9000))
@pytest.mark.parametrize("batch", (1, 7, 64))
def test_batches_are_a_row_of_passes(samples: int, batch: int) -> None:
    steps = 30_000 // batch if samples == 9000 else 200
    order = TrialOrder(seed=5, samples=samples, global_batch=batch)
    passes = [
        Order(n=samples, seed=5, epoch=e).take(0, samples)
        for e in range(-(-(steps + 1) * batch // samples))
    ]
    stream = np.concatenate(passes)
    got = np.concatenate([order.take(step, min(37, steps - step)) for step in range(0, steps, 37)])
    assert np.array_equal(got.reshape(-1), stream[: steps * batch])
    assert np.array_equal(order.take(1, 1).reshape(-1), stream[batch : 2 * batch])


def test_chain_is_found_in_modules_of_ones_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU())
            self.top = nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(nn.functional.relu(self.body(torch.flatten(x, 1))))

    chain = [layer for layer in chain_of(Own()) if isinstance(layer, Linear)]
    assert [(e.weight, e.bias, e.relu) for e in chain] == [
        ("body.1.weight", "body.1.bias", True),
        ("top.weight", None, False),
    ]


def test_chain_of_functions_over_images() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3, padding="same")
            self.top = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.max_pool2d(torch.relu(self.one(x)), 2)
            return self.top(torch.flatten(x, 1))

    convolution, pool, _, _ = chain_of(Own())
    assert isinstance(convolution, Convolution) and not convolution.relu
    assert isinstance(pool, MaxPool) and pool.relu and pool.stride == (2, 2)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool(x.sum() > 0) else self.layer(-x)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_Residual(), "not a chain"),
        (_Branching(), "cannot be traced"),
        (_Twice(), "uses a layer twice"),
        (nn.Sequential(nn.Linear(12, 4), nn.Tanh()), "Tanh"),
        (nn.Sequential(nn.ReLU(), nn.Linear(12, 4)), "ReLU"),
        (nn.Sequential(nn.Flatten()), "not end with a linear layer"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(3, 4)), "not flattened"),
        (nn.Sequential(nn.Flatten(), nn.Conv2d(1, 2, 3), nn.Linear(3, 4)), "not flattened"),
        (nn.Sequential(nn.Linear(3, 4), nn.Conv2d(1, 2, 3), nn.Linear(3, 4)), "behind a linear"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(2, 4)), "groups=2"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Linear(2, 4)), "MaxPool2d"),
        (nn.Sequential(nn.Linear(12, 4), nn.Flatten(0, -1)), "Flatten"),
    ],
)
def test_what_is_no_chain_is_refused_with_its_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(NotStackable, match=reason):
        chain_of(model)


def test_bad_sizes_are_refused() -> None:
    task = Task(workload=workload(mlp), curve=curve("sgd"), global_batch=2)
    for slots, sizes in ((0, None), (4, (2, 3)), (4, (4, 2)), (4, (0, 4))):
        with pytest.raises(UsageError, match="slots"):
            stack("vmap", slots, sizes)(task)
    with pytest.raises(UsageError, match="global_batch"):
        Task(workload=workload(mlp), curve=curve("sgd"), global_batch=0)
