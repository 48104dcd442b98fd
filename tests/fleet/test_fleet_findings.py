"""Faults found by reading and by trying, each with the case that showed it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from small_fleet import classes, classifier, train
from torch import Tensor, nn
from torch.nn import functional

import shoal
from shoal.testing.threads import run_workers


class Branches(nn.Module):
    """Uses ``b`` only for batches whose first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.a * x.sum()
        return (out + self.b if x[0] > 0 else out).sum()


def test_zero_grad_left_in_the_loop_keeps_what_other_micro_batches_gave() -> None:
    def run(zeroes: bool) -> Branches:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fleet = shoal.init(model, optimizer, batch_policy="constant:8")
        x = torch.arange(8.0) - 3.5
        for _ in fleet.epochs(1):
            for batch in fleet.batches(x, local_batch=2):
                if zeroes:
                    optimizer.zero_grad()
                fleet.backward(model(batch))
                fleet.step()
        fleet.close()
        return model

    expected, found = run(False), run(True)
    assert expected.b.item() != 0
    assert torch.equal(expected.b, found.b) and torch.equal(expected.a, found.a)


@pytest.mark.parametrize("workers", [1, 2])
def test_torchs_own_clipping_between_backward_and_step_is_refused(workers: int) -> None:
    def body(world: Any) -> None:
        model = classifier()
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=8):
                fleet.backward(functional.cross_entropy(model(x), y))
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                with pytest.raises(shoal.UsageError, match=r"fleet\.clip_grad_norm_"):
                    fleet.step()
                return

    run_workers(workers, body)


def test_one_worker_alone_is_the_primary_before_the_first_step() -> None:
    def body(world: Any) -> bool:
        model = classifier()
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        first = fleet.is_primary
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=8):
                fleet.backward(functional.cross_entropy(model(x), y))
                fleet.step()
        assert fleet.is_primary == first
        return first

    assert sorted(run_workers(3, body)) == [False, False, True]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    def run(epochs: int, resume: bool) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet = shoal.init(model, optimizer, run_dir=tmp_path, resume=resume)
        for _ in fleet.epochs(epochs):
            for x, y in fleet.batches(classes(), local_batch=25):
                fleet.backward(functional.cross_entropy(model(x), y))
                fleet.step()
            fleet.checkpoint()
        fleet.close()

    run(2, resume=False)
    damaged = tmp_path / "checkpoints" / f"step-{8:012d}"
    largest = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
    whole = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-9])
    run(2, resume=True)
    assert largest.stat().st_size == whole


def test_files_that_are_no_checkpoints_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-of-mine").mkdir(parents=True)
    train(epochs=1, run_dir=tmp_path)


def test_resuming_with_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    train(epochs=1, run_dir=tmp_path)
    model = classifier(seed=9)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    fleet = shoal.init(model, optimizer, run_dir=tmp_path, resume=True)
    with pytest.raises(shoal.UsageError, match=r"optimizer = adam .* heavy_ball"):
        next(iter(fleet.epochs(2)))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    fleet.close()


def test_a_mistake_before_the_first_step_leaves_no_file(tmp_path: Path) -> None:
    model = classifier()
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    with pytest.raises(shoal.UsageError):
        fleet.batches(classes(), batch_size=8)
    fleet.close()
    assert not (tmp_path / "run").exists()


def test_leaving_the_tested_range_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    train(epochs=1, local_batch=50, scaling=shoal.scaling.Dynamic(reference_batch=1))
    said = capfd.readouterr().err
    assert said.count("shoal: ") == 1 and "50" in said


def test_a_model_with_batch_norm_can_be_copied_and_saved_whole() -> None:
    run = train(model=classifier(norm=True), epochs=1)
    x, _ = classes()
    run.model.eval()
    copied = copy.deepcopy(run.model)
    assert type(copied[1]) is nn.BatchNorm1d
    assert torch.equal(copied(x), run.model(x))
    stream = io.BytesIO()
    torch.save(run.model, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(x), run.model(x))


def test_weights_of_many_tokens_are_counted_exactly() -> None:
    def final(workers: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        world = shoal.VirtualWorld(workers)
        fleet = shoal.init(
            model, optimizer, world=world, batch_policy="constant:12", deterministic=True
        )
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=2):
                weight = 9_999_991 + int(y.sum())  # a step has more than 2**24 tokens
                fleet.backward(functional.cross_entropy(model(x), y), weight=weight)
                fleet.step()
        fleet.close()
        return model.weight.detach()

    assert all(torch.equal(final(1), final(workers)) for workers in (2, 3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_norm": "ghost:4"}, "batch_norm"),
        ({"batch_policy": "constant:8"}, "batch_policy"),
        ({"deterministic": True}, "deterministic"),
        ({"frozen": True}, "trained_parameters"),
        ({"local_batch": 5}, "local_batch"),
        ({"epochs": 7}, "epochs"),
    ],
)
def test_a_newcomer_with_another_script_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    def fleet_of(frozen: bool = False, **settings: Any) -> shoal.Fleet:
        model = classifier()
        if frozen:
            model[0].weight.requires_grad_(False)
        return shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)

    with fleet_of() as fleet:
        epochs = fleet.epochs(2)
        next(epochs)
        batches = fleet.batches(classes(), local_batch=8)
        x, y = next(batches)
        fleet.backward(functional.cross_entropy(fleet._model(x), y))
        fleet.step()
        tree = fleet._replica.snapshot()
    local_batch, total = change.pop("local_batch", 8), change.pop("epochs", 2)
    with fleet_of(**change) as newcomer, pytest.raises(shoal.UsageError, match=f"{named} = "):
        newcomer._replica.restore(tree)
        newcomer._loop.world._started = True  # it was healed, so it does not start a run
        epochs = newcomer.epochs(total)
        next(epochs)
        next(newcomer.batches(classes(), local_batch=local_batch))
    torch.use_deterministic_algorithms(False)
