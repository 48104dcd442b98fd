"""The long experiment on a handful of made-up images: equality, stop, resume, verdicts."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shoal.data import Order
from shoal.errors import UsageError
from shoal.reproduce.claims import Verdict
from shoal.reproduce.dynamic import long, spot_trace
from shoal.reproduce.dynamic.long import Images, LongSettings
from shoal.reproduce.progress import Progress
from shoal.workloads.fashion_cnn import SmallCNN, evaluate

SETTINGS = LongSettings(seeds=(1, 2, 3), epochs=3, block_epochs=1, worker_samples=4)


@pytest.fixture(scope="module")
def images() -> Images:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 10
    pixels = torch.randn(90, 1, 28, 28, generator=generator)
    return Images(
        train=pixels[:70], train_labels=labels[:70], test=pixels[70:], test_labels=labels[70:]
    )


def cell(scenario: str, method: str, seed: int = 1) -> long.LongCell:
    return long.LongCell(scenario=scenario, method=method, seed=seed)


def test_a_static_cell_equals_an_ordinary_loop(images: Images) -> None:
    found = long.run_cell(cell("static", "1x"), SETTINGS, images)
    model = SmallCNN(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    samples, total, warmup = 0, 210, 70
    for epoch in range(3):
        order = torch.from_numpy(Order(n=70, seed=1, epoch=epoch).take(0, 70))
        for chosen in order.split(4):
            after = (samples - warmup) / (total - warmup)
            factor = samples / warmup if samples < warmup else 0.5 * (1 + np.cos(np.pi * after))
            optimizer.param_groups[0]["lr"] = 0.01 * factor
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(images.train[chosen]), images.train_labels[chosen]
            ).backward()
            optimizer.step()
            samples += len(chosen)
    accuracy, loss = evaluate(model, images.test, images.test_labels)
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["steps"] == 3 * 18 and found["workers"] == [[0, 1]]


def test_one_large_batch_equals_workers_that_each_take_a_share(images: Images) -> None:
    model = SmallCNN(5)
    inputs, labels = images.train[:22], images.train_labels[:22]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for x, y in zip(inputs.split(4), labels.split(4), strict=True):
        loss = nn.functional.cross_entropy(model(x), y) * (len(y) / 22)
        loss.backward()
    for gradient, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_drawn_workers_depend_on_seed_and_block_alone_and_cover_1_to_16() -> None:
    workers = long.availability("drawn", LongSettings())
    draws = [[workers(seed, 2 * block, 0) for block in range(40)] for seed in range(20)]
    assert {number for row in draws for number in row} == set(range(1, 17))
    assert workers(7, 4, 0) == workers(7, 5, 999)
    assert len({tuple(row) for row in draws}) == 20


def test_trace_falls_off_a_cliff_and_repeats() -> None:
    first = [spot_trace.available(row * spot_trace.ROW_STEPS) for row in range(5)]
    assert first == [16, 16, 10, 9, 8]
    assert spot_trace.available(2 * spot_trace.ROW_STEPS - 1) == 16
    length = len(spot_trace.WORKERS) * spot_trace.ROW_STEPS
    assert spot_trace.available(length + 300) == spot_trace.available(300)
    assert set(spot_trace.WORKERS) <= set(range(1, 17))


def run(
    images: Images, directory: Path, most_cells: int | None = None
) -> tuple[long.Finished, str]:
    stream = io.StringIO()
    progress = Progress(15 * 3 * 70, stream=stream)
    store = long.cell_store(directory, SETTINGS, images)
    finished = long.run_long(SETTINGS, images, store, progress, most_cells=most_cells)
    return finished, stream.getvalue()


def test_a_stopped_experiment_goes_on_where_it_was(images: Images, tmp_path: Path) -> None:
    first, _ = run(images, tmp_path, most_cells=2)
    assert list(first) == ["static-1x-1", "drawn-linear-at-once-1"]
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    everything, said = run(images, tmp_path)
    assert len(everything) == 15
    assert said.count("kept from an earlier call") == 2
    assert all((tmp_path / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    alone = long.run_cell(cell("drawn", "dynamic", 3), SETTINGS, images)
    kept = dict(everything["drawn-dynamic-3"])
    assert {**alone, "seconds": None} == {**kept, "seconds": None}


def test_cells_of_other_settings_are_refused(images: Images, tmp_path: Path) -> None:
    run(images, tmp_path, most_cells=1)
    other = LongSettings(seeds=(1, 2, 3), epochs=3, block_epochs=1, worker_samples=4, lr=0.02)
    store = long.cell_store(tmp_path, other, images)
    with pytest.raises(UsageError, match="other settings"):
        store.read("static-1x-1")
    more_seeds = LongSettings(seeds=(1, 2, 3, 4), epochs=3, block_epochs=1, worker_samples=4)
    assert long.cell_store(tmp_path, more_seeds, images).read("static-1x-1")


def made_up(seeds: int, *, dynamic: float = 90.0, spike: float | None = 0.1) -> long.Finished:
    finished: long.Finished = {}
    for one in long.cells(SETTINGS):
        if one.seed <= seeds:
            is_dynamic = one.method == "dynamic"
            finished[one.name] = {
                "accuracy": dynamic if is_dynamic else 90.0,
                "spike": spike if is_dynamic else 1.0,
            }
    return finished


def test_verdicts_need_three_whole_seeds() -> None:
    def verdicts(finished: long.Finished) -> list[Verdict]:
        return [claim.verdict for claim in long.judge_long(SETTINGS, finished)]

    assert verdicts({}) == [Verdict.NOT_RUN] * 4
    assert verdicts(made_up(2)) == [Verdict.NOT_RUN] * 4
    partial = made_up(3)
    del partial["trace-dynamic-3"]
    assert verdicts(partial) == [Verdict.NOT_RUN] * 4
    assert verdicts(made_up(3)) == [Verdict.SHOWN] * 4
    assert long.judge_long(SETTINGS, made_up(3))[0].seeds == (1, 2, 3)
    shown, missed = Verdict.SHOWN, Verdict.NOT_SHOWN
    assert verdicts(made_up(3, dynamic=89.5)) == [shown] * 4
    assert verdicts(made_up(3, dynamic=89.4)) == [missed, shown, missed, shown]
    assert verdicts(made_up(3, spike=0.5)) == [shown] * 4
    assert verdicts(made_up(3, spike=0.51)) == [shown, missed, shown, missed]
    assert verdicts(made_up(3, spike=None)) == [shown, missed, shown, missed]
