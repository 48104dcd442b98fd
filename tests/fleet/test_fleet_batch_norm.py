"""BatchNorm on a fleet: per worker, of a ghost size, and synchronised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import Run, classes, classifier, plain, same_bits, train
from torch import Tensor, nn

import shoal
from shoal import VirtualWorld
from shoal.testing.threads import ThreadScript, run_workers


class Crossed(nn.Module):
    """Calls its BatchNorm layers in another order than it registers them, the first on the input."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.late = nn.BatchNorm1d(8)
        self.early = nn.BatchNorm1d(6, affine=False)
        self.bare = nn.BatchNorm1d(8, track_running_stats=False)
        self.one, self.two, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(self.early(x)))
        return self.out(self.late(torch.tanh(self.two(self.bare(x)))))


def seeded(seed: int) -> nn.Sequential:
    return classifier(norm=True, seed=seed)


def on_threads(
    workers: int, make: Any = seeded, script: ThreadScript | None = None, **settings: Any
) -> list[Run]:
    def worker(world: Any) -> Run:
        return train(world, model=make(seed=world.number), **settings)

    return [run for run in run_workers(workers, worker, script) if isinstance(run, Run)]


def norms(model: nn.Module) -> list[Tensor]:
    return [b for name, b in model.named_buffers() if "running" in name or "tracked" in name]


@pytest.mark.parametrize("mode", ["worker", "ghost:2", "sync"])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_statistics_are_equal_on_all_workers(mode: str, workers: int) -> None:
    runs = on_threads(workers, batch_norm=mode, data=classes(53), local_batch=4)
    for run in runs:
        assert same_bits(run.model, runs[0].model)
        assert run.weights().isfinite().all()


@pytest.mark.parametrize("make", [seeded, Crossed])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_sync_equals_one_big_batch(make: Any, workers: int) -> None:
    """Weights (so gradients) and running statistics, on uneven shares."""
    shifted, y = classes(70)
    shifted = shifted * 3 + 40
    settings: dict[str, Any] = {"data": (shifted, y), "epochs": 3}
    runs = on_threads(
        workers, make=make, batch_norm="sync", batch_policy="constant:10", local_batch=-(-10 // workers),
        **settings,
    )  # fmt: skip
    big = plain(model=make(seed=0), batch=10, **settings)
    for (name, ours), theirs in zip(
        runs[0].model.state_dict().items(), big.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("make", [seeded, Crossed])
def test_sync_with_fewer_micro_batches_on_some(make: Any) -> None:
    """10 samples in micro-batches of 3 on 3 workers: [3+3, 3, 1]; a round is what runs at once."""
    settings: dict[str, Any] = {
        "batch_norm": "sync",
        "batch_policy": "constant:10",
        "local_batch": 6,
        "micro_batch": 3,
        "clip": 1.0,
        "evaluate": True,
    }
    runs = on_threads(3, make=make, **settings)
    assert all(same_bits(run.model, runs[0].model) for run in runs)
    assert runs[0].scores[-1]["loss"] < runs[0].scores[0]["loss"] * 1.2


def test_sync_with_empty_shares() -> None:
    """4 workers, one micro-batch a step: three go through the reductions without samples."""
    runs = on_threads(4, batch_norm="sync", batch_policy="constant:8", local_batch=8)
    assert all(same_bits(run.model, runs[0].model) for run in runs)
    big = Run(plain(model=seeded(0)), None, None)  # type: ignore[arg-type]
    torch.testing.assert_close(runs[0].weights(), big.weights(), rtol=1e-5, atol=1e-5)


def test_sync_joiner_knows_the_order_of_the_layers() -> None:
    """A joiner whose first step has no samples for it follows the others through their layers."""
    steps: list[int] = []

    def worker(world: Any) -> nn.Module:
        model = Crossed(seed=world.number)
        run = train(
            world,
            model=model,
            batch_norm="sync",
            batch_policy="constant:4",
            local_batch=2,
            data=classes(40),
        )
        steps.append(run.fleet.step_count)
        return model

    models: list[Any] = run_workers(3, worker, ThreadScript(joins={2: 3}))
    assert steps == [20, 20, 20]
    assert same_bits(models[0], models[1]) and same_bits(models[0], models[2])


def test_sync_survives_a_failure_inside_the_forward_pass() -> None:
    runs = on_threads(
        3,
        batch_norm="sync",
        local_batch=4,
        script=ThreadScript(failures={2: {1}, 4: {0, 2}, 5: {0}}),
    )
    assert len(runs) == 3 and all(same_bits(run.model, runs[0].model) for run in runs)


def test_sync_with_a_loss_that_is_not_finite_on_one_worker() -> None:
    """The others wait in backward for this worker's part; the step ends for all alike."""
    x, y = classes(40)

    def worker(world: Any) -> int:
        model = seeded(0)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            value = F.cross_entropy(m(batch[0]), batch[1])
            return value * float("nan") if world.number == 1 and world.exchange == 2 else value

        with pytest.raises(shoal.DivergedError) as error:
            train(world, model=model, data=(x, y), local_batch=4, batch_norm="sync", loss=loss)
        assert "step 2" in str(error.value)
        return world.exchange

    assert run_workers(3, worker) == [2, 2, 2]


def test_break_with_sync_does_not_strand_the_others() -> None:
    """One worker breaks between two micro-batches, or after its forward pass; the others go on."""
    for after_forward in (False, True):

        def worker(world: Any, after_forward: bool = after_forward) -> int:
            model = seeded(world.number)
            fleet = shoal.init(
                model,
                torch.optim.SGD(model.parameters(), lr=0.05),
                world=world,
                batch_norm="sync",
            )
            for _ in fleet.epochs(1):
                for x, y in fleet.batches(classes(60), local_batch=6, micro_batch=3):
                    if world.number == 1 and fleet.step_count == 2:
                        if after_forward:
                            model(x)
                        break
                    fleet.backward(F.cross_entropy(model(x), y))
                    fleet.step()
            fleet.close()
            return fleet.samples_seen

        assert run_workers(3, worker) == [60, 36, 60]


def test_sync_is_refused_in_a_virtual_world() -> None:
    model = seeded(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(shoal.UsageError, match="one after the other"):
        shoal.init(model, optimizer, world=VirtualWorld(2), batch_norm="sync")


@pytest.mark.parametrize("mode", ["worker", "ghost:2", "sync"])
def test_a_share_of_one_sample_is_defined(mode: str) -> None:
    """21 samples, batches of 4 on one worker: the last one is a single sample."""
    run = on_threads(1, batch_norm=mode, data=classes(21), local_batch=4, epochs=3)[0]
    assert run.weights().isfinite().all()


def test_one_sample_uses_and_keeps_the_running_statistics() -> None:
    model = seeded(0)
    with shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.0)) as fleet:
        for _ in fleet.epochs(1):
            for x, _y in fleet.batches(classes(5), local_batch=4):
                if len(x) == 1:
                    held = [b.clone() for b in norms(model)]
                    out = model(x)
                    model.eval()
                    torch.testing.assert_close(out, model(x))
                    model.train()
                else:
                    out = model(x)
                fleet.backward(out.mean())
                fleet.step()
    for before, after in zip(held[:2], norms(model)[:2], strict=True):
        assert torch.equal(before, after)


def test_ghost_batches_are_normalised_apart() -> None:
    """ghost:4 on a batch of 8 is what two forward passes of 4 give."""
    x, _ = classes(8)
    model = nn.Sequential(nn.BatchNorm1d(6))
    twin = copy.deepcopy(model)
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm="ghost:4")
    ours = model(x)
    halves = [copy.deepcopy(twin) for _ in range(2)]
    theirs = torch.cat([half(part) for half, part in zip(halves, x.split(4), strict=True)])
    torch.testing.assert_close(ours, theirs)
    mean = (halves[0][0].running_mean + halves[1][0].running_mean) / 2
    torch.testing.assert_close(model[0].running_mean, mean)
    fleet.close()


def test_a_ghost_rest_of_one_joins_its_neighbour() -> None:
    x, _ = classes(5)
    model = nn.Sequential(nn.BatchNorm1d(6))
    with shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm="ghost:2"):
        assert model(x).isfinite().all()


def test_running_statistics_do_not_depend_on_the_cut() -> None:
    """Cut into micro-batches or not, by one or three workers: the sample-weighted mean movement."""
    x, y = classes(24)
    settings: dict[str, Any] = {
        "data": (x, y),
        "epochs": 1,
        "batch_policy": "constant:12",
        "until": 1,
    }
    alone = train(model=seeded(0), local_batch=12, micro_batch=5, **settings)
    threads = on_threads(3, local_batch=5, **settings)[0]
    for ours, theirs in zip(norms(alone.model), norms(threads.model), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6)
    rows = torch.as_tensor(shoal.data.Order(n=24, seed=0, epoch=0).take(0, 12))
    fresh = seeded(0)
    moved = torch.zeros(8)
    for piece in rows.split(5):
        trial = copy.deepcopy(fresh)
        trial(x[piece])
        moved += trial[1].running_mean.detach() * len(piece) / 12
    torch.testing.assert_close(alone.model[1].running_mean, moved)
    assert int(alone.model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("momentum", [0.0, None, 0.3])
def test_momentum_of_the_layer_is_respected(momentum: float | None) -> None:
    def make(seed: int) -> nn.Sequential:
        model = seeded(seed)
        model[1].momentum = momentum
        return model

    big = plain(model=make(0), batch=10)
    for mode in ("worker", "sync"):
        run = on_threads(1, make=make, batch_norm=mode, local_batch=10)[0]
        for ours, theirs in zip(norms(run.model), norms(big), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_forward_beside_a_step_moves_nothing_for_the_fleet() -> None:
    """Train-mode passes outside the loop leave the fleet's statistics alone, synchronised or not."""

    def worker(world: Any) -> nn.Module:
        model = seeded(world.number)
        fleet = shoal.init(
            model, torch.optim.SGD(model.parameters(), lr=0.05), world=world, batch_norm="sync"
        )
        for epoch in fleet.epochs(2):
            if epoch and world.number == 0:
                model(torch.randn(4, 6) + 100)
            for x, y in fleet.batches(classes(24), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
        fleet.close()
        return model

    a, b = run_workers(2, worker)
    assert isinstance(a, nn.Module) and isinstance(b, nn.Module) and same_bits(a, b)


def test_instance_norm_statistics_belong_to_the_fleet() -> None:
    def make(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Unflatten(1, (2, 4)),
            nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    runs = on_threads(3, make=make, local_batch=4)
    assert all(same_bits(run.model, runs[0].model) for run in runs)
    assert not torch.equal(runs[0].model[2].running_mean, torch.zeros(2))


@pytest.mark.parametrize("mode", ["ghost:1", "ghost:", "ghost", "synced", "sync:3"])
def test_unknown_modes(mode: str) -> None:
    model = seeded(0)
    with pytest.raises(shoal.UsageError, match="batch_norm = "):
        shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm=mode)
