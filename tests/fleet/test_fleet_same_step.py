"""The same step whoever computes it: virtual and threaded workers, uneven and empty shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import OPTIMIZERS, Run, classes, classifier, plain, same_bits, train
from torch import nn

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import ThreadScript, run_workers


def on_threads(workers: int, script: ThreadScript | None = None, **settings: Any) -> list[Run]:
    """Train on so many threads, each with a model of its own seed: the first one's weights count."""
    make = settings.pop("make", classifier)

    def worker(world: Any) -> Run:
        return train(world, model=make(seed=world.number), **settings)

    runs = run_workers(workers, worker, script)
    for run in runs:
        assert isinstance(run, Run)
        assert same_bits(run.model, runs[0].model)
    return runs


def close(a: Run, b: Run, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a.weights(), b.weights(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("micro", [2, 3, 4])
def test_threads_equal_virtual_equal_one_batch(workers: int, micro: int) -> None:
    settings: dict[str, Any] = {
        "batch_policy": "constant:16",
        "local_batch": 4,
        "micro_batch": micro,
        "epochs": 2,
    }
    one = Run(plain(model=classifier(), batch=16), None, None)  # type: ignore[arg-type]
    virtual = train(VirtualWorld(workers), **settings)
    threads = on_threads(workers, **settings)[0]
    close(one, virtual)
    close(one, threads)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_every_optimizer(kind: str) -> None:
    """Adam divides by roots of tiny numbers, so its weights are compared after a few steps."""
    settings: dict[str, Any] = {"optimizer": kind, "local_batch": 5, "epochs": 1, "clip": 0.5}
    one = train(batch_policy="constant:15", micro_batch=5, **settings)
    for workers in (2, 3):
        settings["batch_policy"] = "constant:15"
        close(one, train(VirtualWorld(workers), **settings), 1e-5)
        close(one, on_threads(workers, **settings)[0], 1e-5)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_proportional_virtual_equals_threads(workers: int) -> None:
    rule = shoal.scaling.Dynamic(reference_batch=8)
    virtual = train(VirtualWorld(workers), scaling=rule, local_batch=8)
    threads = on_threads(workers, scaling=rule, local_batch=8)[0]
    close(virtual, threads, 1e-5)
    assert virtual.batches == threads.batches
    assert virtual.lrs == threads.lrs


def dropping(seed: int) -> nn.Sequential:
    return classifier(norm=True, dropout=0.3, seed=seed)


@pytest.mark.parametrize("kind", ["heavy_ball", "adamw"])
def test_deterministic_is_the_same_bits(kind: str) -> None:
    """Dropout, BatchNorm and clipping among it, for 1 to 4 workers, virtual and threaded."""
    settings: dict[str, Any] = {
        "batch_policy": "constant:16",
        "local_batch": 4,
        "deterministic": True,
        "optimizer": kind,
        "clip": 0.5,
    }
    one = train(model=dropping(0), **settings)
    assert one.weights().isfinite().all()
    for workers in (2, 3, 4):
        assert same_bits(
            one.model, train(VirtualWorld(workers), model=dropping(0), **settings).model
        )
        assert same_bits(one.model, on_threads(workers, make=dropping, **settings)[0].model)


def test_deterministic_under_a_script() -> None:
    settings: dict[str, Any] = {
        "batch_policy": "constant:12",
        "local_batch": 3,
        "deterministic": True,
    }
    script = [
        VirtualEvent(kind="join", workers=3, at_step=3),
        VirtualEvent(kind="kill", workers=2, at_step=7),
        VirtualEvent(kind="leave", at_step=9),
    ]
    moved = train(VirtualWorld(1, script), model=dropping(0), **settings)
    assert same_bits(moved.model, train(model=dropping(0), **settings).model)


def test_without_it_rounding_is_all_that_differs() -> None:
    settings: dict[str, Any] = {"batch_policy": "constant:16", "local_batch": 4}
    one = train(model=dropping(0), **settings)
    for workers in (2, 3, 4):
        close(one, train(VirtualWorld(workers), model=dropping(0), **settings), 2e-6)
        close(one, on_threads(workers, make=dropping, **settings)[0], 2e-6)


def test_accumulation_equals_one_pass() -> None:
    """Micro 8, global 64 on one worker: 8 backward passes, one step, the lr does not move."""
    calls: list[int] = []

    def loss(m: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch[1]))
        return F.cross_entropy(m(batch[0]), batch[1])

    data = classes(128)
    rule = shoal.scaling.Linear(reference_batch=64)
    run = train(local_batch=64, micro_batch=8, data=data, epochs=1, loss=loss, scaling=rule)
    assert calls == [8] * 16 and run.batches == [64, 64] and run.lrs == [0.05, 0.05]
    whole = train(local_batch=64, data=data, epochs=1, scaling=rule)
    close(run, whole)


def test_rank_means_are_weighted_by_samples() -> None:
    """Rank means 1 (n=3) and 5 (n=1) give 2."""
    data = torch.tensor([1.0, 1.0, 1.0, 5.0])[
        shoal.data.Order(n=4, seed=0, epoch=0).positions(torch.arange(4).numpy())
    ]

    def worker(world: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        fleet = shoal.init(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            world=world,
            batch_policy="constant:4",
        )
        for _ in fleet.epochs(1):
            for x in fleet.batches(data[:, None], local_batch=3):
                fleet.backward(model(x).mean())
                fleet.step()
        fleet.close()
        return -float(model.weight.detach())

    assert run_workers(2, worker) == [2.0, 2.0]


class Branch(nn.Module):
    """Uses its second layer only where a sample says so."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.always, self.sometimes, self.never = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.always(x)
        rare = x[:, 0] > 1.2
        if rare.any():
            out = out + rare[:, None] * self.sometimes(x)
        return out


@pytest.mark.parametrize("kind", ["heavy_ball", "adamw"])
def test_parameters_that_only_some_workers_use(kind: str) -> None:
    """A parameter is updated if any worker used it, with all weights, and else left alone on all."""
    settings: dict[str, Any] = {"batch_policy": "constant:8", "local_batch": 2, "optimizer": kind}
    one = Run(plain(model=Branch(), batch=8, optimizer=kind), None, None)  # type: ignore[arg-type]
    for workers in (2, 3):
        runs = on_threads(workers, make=Branch, **settings)
        close(one, runs[0], 1e-5)
        assert torch.equal(runs[0].model.never.weight, Branch().never.weight)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_shares_neither_hang_nor_spoil(norm: bool, deterministic: bool) -> None:
    """5 workers, a global batch of two micro-batches, clipped: three workers never see a sample."""

    def make(seed: int) -> nn.Sequential:
        return classifier(norm=norm, seed=seed)

    settings: dict[str, Any] = {
        "batch_policy": "constant:8",
        "local_batch": 4,
        "clip": 0.05,
        "deterministic": deterministic,
        "evaluate": True,
    }
    runs = on_threads(5, make=make, **settings)
    assert [len(run.lrs) > 0 for run in runs] == [True, True, False, False, False]
    assert runs[0].weights().isfinite().all()
    close(train(model=make(0), **settings), runs[0])
    assert all(run.scores == runs[0].scores for run in runs)


def test_a_last_batch_smaller_than_the_fleet() -> None:
    """13 samples, 4 workers of 3: the last step has one sample for one worker."""
    run = on_threads(4, data=classes(13), local_batch=3, epochs=3)[0]
    assert run.batches == [12, 1] * 3


@pytest.mark.parametrize("correction", [True, False])
def test_momentum_correction_through_a_change(correction: bool) -> None:
    """Gradient 1 always, mu .9, lr .1 five times then .4 five times: -12.6092 or -8.0814."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    fleet = shoal.init(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        world=VirtualWorld(1, [VirtualEvent(kind="join", workers=3, at_step=5)]),
        scaling=shoal.scaling.Linear(reference_batch=1, momentum_correction=correction),
    )
    for _ in fleet.epochs(1):
        for x in fleet.batches(torch.ones(25, 1, dtype=torch.float64), local_batch=1):
            fleet.backward(model(x).mean())
            fleet.step()
    assert fleet.step_count == 10
    fleet.close()
    assert float(model.weight.detach()) == pytest.approx(
        -12.6092 if correction else -8.0814, abs=1e-4
    )


def test_ramp_values() -> None:
    """lr .1 -> .4 over a ramp of 8: multipliers 1, 1.375 at offset 1, 2.5 at 4, 3.625 at 7, 4 at 8."""
    run = train(
        VirtualWorld(1, [VirtualEvent(kind="join", workers=3, at_step=2)]),
        scaling=shoal.scaling.Dynamic(reference_batch=2, ramp_steps=8),
        local_batch=2,
        epochs=1,
    )
    base = [lr / 0.05 for lr in run.lrs]
    assert [base[2 + k] for k in (0, 1, 4, 7, 8)] == pytest.approx([1, 1.375, 2.5, 3.625, 4])


class Recording:
    """Wraps AdaScale to keep what it was told."""

    def __init__(self, rule: Any) -> None:
        self._rule, self.told = rule, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def commit(self, state: Any, at: Any, noise: Any) -> Any:
        self.told.append(noise)
        return self._rule.commit(state, at, noise)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_noise_is_that_of_the_micro_batches(workers: int, clip: float | None) -> None:
    """Pieces and squares agree with gradients computed one by one, clipping notwithstanding."""
    x, y = classes(30)
    rule = Recording(shoal.scaling.AdaScale(reference_batch=10))
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "data": (x, y),
        "epochs": 1,
        "local_batch": 4,
        "batch_policy": "constant:10",
        "clip": clip,
        "until": 1,
    }
    train(VirtualWorld(workers), scaling=rule, **settings)
    told = rule.told[0]
    rows = torch.as_tensor(shoal.data.Order(n=30, seed=0, epoch=0).take(0, 10))
    squares = 0.0
    total = torch.zeros(0)
    for piece in rows.split(4):
        model = classifier()
        F.cross_entropy(model(x[piece]), y[piece]).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        squares += len(piece) * float(flat.square().sum())
        total = flat * len(piece) / 10 + (total if len(total) else 0)
    assert told.pieces == 3 and told.samples == 10
    assert told.weighted_squares == pytest.approx(squares, rel=1e-4)
    assert told.mean_square == pytest.approx(float(total.square().sum()), rel=1e-4)


@pytest.mark.parametrize(
    "rule",
    [
        shoal.scaling.AdaScale(reference_batch=8),
        shoal.scaling.NoiseMatched(reference_batch=8),
        shoal.scaling.Legw(reference_batch=8, warmup_epochs=1),
        shoal.scaling.SquareRoot(reference_batch=8),
    ],
    ids=lambda rule: rule.name,
)
def test_every_rule_runs_and_agrees_between_worlds(rule: Any) -> None:
    settings: dict[str, Any] = {"scaling": rule, "optimizer": "sgd", "local_batch": 8}
    virtual = train(VirtualWorld(3), **settings)
    threads = on_threads(3, **settings)
    assert virtual.lrs == pytest.approx(threads[0].lrs, rel=1e-3)
    # A worker without samples in the last step does not see its lr; the others agree to the bit.
    assert all(run.lrs == threads[0].lrs for run in threads if len(run.lrs) == len(virtual.lrs))
