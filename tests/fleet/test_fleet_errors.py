"""A user's mistakes: one clear error each, with the value, the rule and the fix."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import classes, classifier, same_bits, train
from torch import Tensor, nn

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import Mismatch, run_workers


def fleet_of(model: nn.Module | None = None, **settings: Any) -> shoal.Fleet:
    model = classifier() if model is None else model
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return shoal.init(model, optimizer, **settings)


def scheduled() -> dict[str, Any]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer}


def with_optimizer(make: Callable[[nn.Module], Any], **more: Any) -> dict[str, Any]:
    model = classifier()
    return {"model": model, "optimizer": make(model), **more}


def frozen() -> dict[str, Any]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    return {"model": model, "optimizer": optimizer}


def lazy() -> dict[str, Any]:
    model = nn.LazyLinear(3)
    return {"model": model, "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)}


INIT: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch_size": (lambda: {"batch_size": 4}, r"batch_size = 4; .*local_batch=.*reference_batch="),
    "unknown": (lambda: {"worker": 4}, r"init\(worker\): no such argument; see help"),
    "model": (lambda: {"model": nn.Linear, "optimizer": 1}, "model = type; it is a torch.nn.Module"),
    "optimizers": (
        lambda: with_optimizer(lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)] * 2),
        "optimizer = 2 of them; .* parameter groups",
    ),
    "optimizer": (lambda: with_optimizer(lambda m: 3), "optimizer = int; it is a torch.optim"),
    "strangers": (
        lambda: with_optimizer(lambda m: torch.optim.SGD(classifier().parameters(), lr=0.1)),
        r"optimizer = holds 4 tensor\(s\).*build the optimizer from model.parameters",
    ),
    "lbfgs": (
        lambda: with_optimizer(lambda m: torch.optim.LBFGS(m.parameters())),
        "optimizer = LBFGS; .*use SGD",
    ),
    "scheduler": (scheduled, "lr scheduler attached; .*pass schedule="),
    "frozen": (frozen, "no parameter requires a gradient"),
    "lazy": (lazy, "weight has no shape yet; .*run one batch"),
    "refused": (
        lambda: with_optimizer(
            lambda m: torch.optim.AdamW(m.parameters()),
            scaling=shoal.scaling.Dynamic(reference_batch=8),
        ),
        "optimizer = AdamW .*'dynamic' is meant for .*SquareRoot",
    ),
    "class": (
        lambda: {"scaling": shoal.scaling.Unscaled},
        r"scaling = the class Unscaled; .*Unscaled\(\.\.\.\)",
    ),
    "sync": (lambda: {"sync": 3}, "sync = int; .*AllReduce"),
    "precision": (lambda: {"precision": "fp16"}, "precision = 'fp16'; known are fp32, bf16; .*use bf16"),
    "policy": (lambda: {"batch_policy": "fixed:3"}, "batch_policy = 'fixed:3'; known are"),
    "policy number": (lambda: {"batch_policy": "constant"}, "constant needs its global batch"),
    "policy zero": (lambda: {"batch_policy": "constant:0"}, r"Constant\(samples\) = 0; .*positive"),
    "cadence": (lambda: {"checkpoint_seconds": 0}, "checkpoint_seconds = 0; it is a time"),
    "noise": (
        lambda: {"deterministic": True, "scaling": shoal.scaling.AdaScale(reference_batch=8)},
        "deterministic = True with scaling = adascale; .*use another",
    ),
    "mixed statistics": (
        lambda: (
            lambda m: {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1)}
        )(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6).double())),
        "running statistics in torch.float32, torch.float64; .*one dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INIT)
def test_init(case: str, tmp_path: Path) -> None:
    make, text = INIT[case]
    with pytest.raises(shoal.UsageError, match=text):
        fleet_of(**make(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


BATCHES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch_size": (None, {"batch_size": 4}, "batch_size = 4; .*pass local_batch="),
    "unknown": (None, {"local_batch": 4, "shuffle": True}, r"batches\(shuffle\): no such argument"),
    "missing": (None, {}, "local_batch = None; .*pass local_batch="),
    "zero": (None, {"local_batch": 0}, "local_batch = 0; .*at least 1"),
    "half": (None, {"local_batch": 2.5}, "local_batch = 2.5; .*whole number"),
    "micro": (None, {"local_batch": 4, "micro_batch": 8}, "micro_batch = 8; .*local_batch = 4"),
    "micro zero": (None, {"local_batch": 4, "micro_batch": 0}, "micro_batch = 0; .*between 1"),
    "empty": (torch.zeros(0, 6), {"local_batch": 4}, "has no samples; .*at least one"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches(case: str) -> None:
    data, arguments, text = BATCHES[case]
    with fleet_of() as fleet, pytest.raises(shoal.UsageError, match=text):
        fleet.batches(classes() if data is None else data, **arguments)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_iterable_data_sets_are_refused_by_name() -> None:
    with fleet_of() as fleet:
        with pytest.raises(shoal.UsageError, match=r"IterableDataset .*map-style"):
            fleet.batches(Stream(), local_batch=2)
        with pytest.raises(shoal.UsageError, match=r"IterableDataset .*map-style"):
            fleet.evaluate(Stream(), lambda m, b: {})


def test_epochs() -> None:
    with fleet_of() as fleet:
        with pytest.raises(shoal.UsageError, match=r"epochs\(total\) = 0; .*at least one"):
            fleet.epochs(0)
        with pytest.raises(shoal.UsageError, match="drew no batches; iterate over"):
            for _ in fleet.epochs(2):
                pass


def loop(body: Callable[[shoal.Fleet, Tensor, Tensor], None], **settings: Any) -> None:
    with fleet_of(**settings) as fleet:
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=8, micro_batch=4):
                body(fleet, x, y)


def value(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(fleet._model(x), y)


def own_backward(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    value(fleet, x, y).backward()


def own_step(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))
    fleet._stepper.optimizer.step()


def own_rate(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))
    fleet.step()
    fleet._stepper.optimizer.param_groups[0]["lr"] *= 0.5


def no_backward(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.step()


def clip_first(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.clip_grad_norm_(1.0)


def twice(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))
    fleet.backward(value(fleet, x, y))


def two_steps(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))
    fleet.step()
    fleet.step()


def no_step(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))


def nothing(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    pass


def per_sample(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(F.cross_entropy(fleet._model(x), y, reduction="none"))


def no_tensor(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(3.0)  # type: ignore[arg-type]


def reduction(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y), reduction="none")


def weight(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y), weight=-1.0)


def no_number(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y), weight=float("nan"))


def clip_zero(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet.backward(value(fleet, x, y))
    fleet.clip_grad_norm_(0.0)


def wipe(fleet: shoal.Fleet, x: Tensor, y: Tensor) -> None:
    fleet._stepper.optimizer.zero_grad(set_to_none=False)
    fleet.backward(value(fleet, x, y))
    fleet.step()


LOOPS: dict[Callable[..., None], str] = {
    own_backward: r"loss.backward\(\) was called beside the fleet; .*call fleet.backward\(loss\)",
    own_step: r"optimizer.step\(\) was called beside the fleet; .*call fleet.step\(\)",
    own_rate: r"lr = \[0.05\], but shoal had set \[0.1\]; .*schedule=, scaling=",
    no_backward: r"fleet.step\(\) comes once .*call backward first",
    clip_first: r"fleet.clip_grad_norm_\(\) comes once",
    twice: "twice for one batch; add the losses up",
    two_steps: r"fleet.step\(\) comes once",
    no_step: r"fleet.step\(\) was not called for the last batch; call it in the loop",
    nothing: r"fleet.backward\(\) and step\(\) was not called for the last batch",
    per_sample: r"loss = \(4,\); backward needs a scalar tensor; take the mean",
    no_tensor: "loss = float; backward needs a scalar",
    reduction: 'reduction = \'none\'; known are "mean" and "sum"',
    weight: "weight = -1.0; .*units >= 0",
    no_number: "weight = nan; .*finite number",
    clip_zero: "max_norm = 0.0; it is positive",
    wipe: r"gradients = changed between two micro-batches.*leave zeroing to fleet.step\(\)",
}


@pytest.mark.parametrize("body", LOOPS, ids=lambda body: body.__name__)
def test_loops(body: Callable[..., None]) -> None:
    with pytest.raises(shoal.UsageError, match=LOOPS[body]):
        loop(body)


@pytest.mark.parametrize("body", LOOPS, ids=lambda body: body.__name__)
def test_loops_with_peers(body: Callable[..., None]) -> None:
    """The same error on every worker; nobody waits for ever."""

    def worker(world: Any) -> str:
        with pytest.raises(shoal.UsageError, match=LOOPS[body]) as error:
            loop(body, world=world)
        return str(error.value)

    assert len(set(run_workers(2, worker))) == 1


def test_outside_of_the_loop() -> None:
    with fleet_of() as fleet:
        loss = F.cross_entropy(fleet._model(classes()[0]), classes()[1])
        with pytest.raises(shoal.UsageError, match=r"outside of fleet.batches\(\); call it inside"):
            fleet.backward(loss)
        with pytest.raises(shoal.UsageError, match="inside the loop"):
            fleet.step()
        with pytest.raises(shoal.UsageError, match="beside the fleet"):
            loss.backward()


def test_a_backward_that_fails_is_never_committed() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError("out of memory")

    model = classifier()
    with fleet_of(model) as fleet:
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=8):
                hidden = Fails.apply(model[0](x))
                with pytest.raises(RuntimeError, match="out of memory"):
                    fleet.backward(F.cross_entropy(model[2](hidden), y))
                with pytest.raises(shoal.UsageError, match="call backward first"):
                    fleet.step()
                break
        assert fleet.step_count == 0
    assert same_bits(model, classifier())


def test_gradients_that_arrive_in_parts() -> None:
    """Reentrant checkpointing of one layer twice: the bucket could leave half full."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Linear(6, 6)

    def loss(m: nn.Module, batch: Any, reentrant: bool) -> Tensor:
        x = batch[0].requires_grad_()
        for _ in range(2):
            x = checkpoint(m, x, use_reentrant=reentrant)
        return x.square().mean()

    with pytest.raises(shoal.UsageError, match="use_reentrant=False"):
        train(model=model, loss=lambda m, b: loss(m, b, True))
    assert train(model=nn.Linear(6, 6), loss=lambda m, b: loss(m, b, False)).fleet.step_count == 26


def test_thawing_a_parameter_or_adding_a_group_later() -> None:
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fleet_of(model, optimizer=optimizer) as fleet:
        model[0].requires_grad_(True)
        with pytest.raises(shoal.UsageError, match=r"requires a gradient now .*before shoal.init"):
            next(fleet.batches(classes(), local_batch=4))
        model[0].requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(shoal.UsageError, match="2 parameter groups, but 1"):
            next(fleet.batches(classes(), local_batch=4))


def test_a_data_set_that_changes_its_length_stops_with_the_step() -> None:
    data = list(range(20))
    model = nn.Linear(1, 1)
    with (
        fleet_of(model) as fleet,
        pytest.raises(shoal.UsageError, match=r"at step 3: .*19 samples"),
    ):
        for _ in fleet.epochs(1):
            for batch in fleet.batches(data, local_batch=4):
                fleet.backward(model(batch.float()[:, None]).mean())
                fleet.step()
                if fleet.step_count == 3:
                    data.pop()


def test_another_data_set_in_mid_run() -> None:
    with (
        fleet_of() as fleet,
        pytest.raises(shoal.UsageError, match=r"90 samples, but .* begun on 100"),
    ):
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(100 - 10 * fleet.epoch), local_batch=50):
                fleet.backward(F.cross_entropy(fleet._model(x), y))
                fleet.step()


def test_a_new_data_set_in_the_same_place_is_read() -> None:
    """A temporary tuple gets the id of the one before; its tensors must not be mistaken for those."""
    seen: list[float] = []
    model = nn.Linear(1, 1)
    with fleet_of(model) as fleet:
        for epoch in fleet.epochs(4):
            for x, _ in fleet.batches(
                (torch.full((4, 1), float(epoch)), torch.zeros(4)), local_batch=4
            ):
                seen.append(float(x[0]))
                fleet.backward(model(x).mean())
                fleet.step()
    assert seen == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("where", ["loss", "second micro-batch"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_loss_that_is_not_finite(where: str, workers: int) -> None:
    """Agreed in the reduction: all workers stop at the same step, weights as they were."""

    def worker(world: Any) -> tuple[str, Any]:
        model = classifier(norm=True, seed=world.number)
        calls = 0

        def loss(m: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            value = F.cross_entropy(m(batch[0]), batch[1])
            bad = 7 if where == "loss" else 8
            return value * float("nan") if calls == bad and world.number == workers - 1 else value

        kept: list[Any] = []

        def note(fleet: shoal.Fleet) -> None:
            kept.append({k: v.clone() for k, v in model.state_dict().items()})

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fleet = shoal.init(model, optimizer, world=world)
        with pytest.raises(shoal.DivergedError, match=r"at step 3 .*try a smaller lr") as error:
            for _ in fleet.epochs(1):
                for batch in fleet.batches(classes(), local_batch=4, micro_batch=2):
                    fleet.backward(loss(model, batch))
                    note(fleet)
                    fleet.step()
        assert fleet.step_count == 3
        assert all(torch.equal(v, kept[-1][k]) for k, v in model.state_dict().items())
        fleet.close()
        return str(error.value), kept[-1]["0.weight"]

    results: list[Any] = run_workers(workers, worker)
    assert all(text == results[0][0] for text, _ in results)
    assert all(torch.equal(w, results[0][1]) for _, w in results)


def test_divergence_seen_by_a_worker_without_samples() -> None:
    def worker(world: Any) -> int:
        model = classifier(seed=world.number)
        with pytest.raises(shoal.DivergedError):
            train(
                world,
                model=model,
                batch_policy="constant:4",
                local_batch=4,
                loss=lambda m, b: m(b[0]).mean() * float("inf"),
            )
        return world.exchange

    assert run_workers(3, worker) == [0, 0, 0]


@pytest.mark.parametrize("arguments", [
    {"kind": "die", "at_step": 1}, {"kind": "join", "workers": 0, "at_step": 1}, {"kind": "join"},
    {"kind": "join", "at_step": 1, "at_samples": 2}, {"kind": "join", "at_step": -1},
])  # fmt: skip
def test_virtual_events(arguments: dict[str, Any]) -> None:
    with pytest.raises(shoal.UsageError, match="event "):
        VirtualEvent(**arguments)


def test_a_virtual_world_of_nobody() -> None:
    with pytest.raises(shoal.UsageError, match="workers = 0"):
        VirtualWorld(0)


def test_a_worker_that_fails_stops_its_threads() -> None:
    def worker(world: Any) -> None:
        def loss(m: nn.Module, batch: Any) -> Tensor:
            if world.number == 1 and world.exchange == 2:
                raise ZeroDivisionError("a user's mistake")
            return F.cross_entropy(m(batch[0]), batch[1])

        train(world, loss=loss)

    with pytest.raises(ZeroDivisionError, match="a user's mistake"):
        run_workers(3, worker, timeout_seconds=20)


def test_workers_that_do_not_agree_are_found_out() -> None:
    def worker(world: Any) -> None:
        with fleet_of(world=world) as fleet:
            if world.number == 0:
                fleet.evaluate(classes(), lambda m, b: {"n": (0, 1)})
            else:
                for _ in fleet.batches(classes(), local_batch=4):
                    fleet.backward(F.cross_entropy(fleet._model(classes()[0]), classes()[1]))
                    fleet.step()

    with pytest.raises(Mismatch, match="exchange 0, reduction 0: worker 0 sends"):
        run_workers(2, worker, timeout_seconds=20)


def test_waiting_in_vain_ends() -> None:
    def worker(world: Any) -> None:
        with fleet_of(world=world) as fleet:
            if world.number == 0:
                fleet.evaluate(classes(), lambda m, b: {"n": (0, 1)})
            else:
                world._meeting.wait(lambda: False, "worker 1 sleeps")

    with pytest.raises(TimeoutError, match="nobody answers"):
        run_workers(2, worker, timeout_seconds=0.5)


SCRIPT = """
import torch, shoal
model = torch.nn.Linear(1, 1)
fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir={run!r})
for epoch in fleet.epochs(1):
    for x in fleet.batches(torch.ones(8, 1), local_batch=2):
        loss = model(x).mean(){bad}
        fleet.backward(loss)
        fleet.step()
"""


@pytest.mark.parametrize(("bad", "code", "text"), [
    (" * float('nan')", 1, "shoal: loss = not finite at step 0"),
    ("\n        loss.backward()", 2, "shoal: loss.backward() was called beside the fleet"),
])  # fmt: skip
def test_one_line_and_the_exit_status(tmp_path: Path, bad: str, code: int, text: str) -> None:
    script = SCRIPT.format(run=str(tmp_path / "run"), bad=bad)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(text) and "Traceback" not in done.stderr


HEAVY = [
    "scipy",
    "matplotlib",
    "typer",
    "sklearn",
    "rich",
    "torchft",
    "duckdb",
    "jinja2",
    "torchvision",
]


def test_import_is_light() -> None:
    """``import shoal`` brings torch, numpy and itself: everything heavy is imported on use."""
    code = f"import shoal, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
