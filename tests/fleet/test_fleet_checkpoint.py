"""Checkpoints: whole or not there, of any number of workers, off the step path."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_fleet import Run, classes, classifier, count, digest, same_bits, train

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.fleet import checkpoint as module
from shoal.fleet.checkpoint import Checkpoints
from shoal.testing.threads import run_workers


def steps(run: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*"))


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def tree(step: float = 0.0) -> dict[str, Any]:
    return {
        "model": {"0.weight": torch.arange(6.0).view(2, 3) + step, "b": torch.tensor(3)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "buf": None}}, "groups": [{"lr": 0.1}]},
        "a": {"b.c": torch.zeros(1), "empty": torch.zeros(0)},
        "a.b": {"c": torch.ones(1)},
        "half": torch.ones(3, dtype=torch.bfloat16),
        "text": "ä", "flag": True, "none": None, "list": [1, [2.5, "x"]], "nan": float("inf"),
    }  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    """Tensors of every kind, integer keys, names that would collide, values that JSON lacks."""
    store = Checkpoints(tmp_path / "c", every_seconds=60)
    assert store.newest_step() == -1
    store.write(tree, 7, wait=True)
    assert store.newest_step() == 7
    assert digest(store.load_newest()) == digest(tree())
    files = {p.name for p in (tmp_path / "c" / "step-000000000007").iterdir()}
    assert {"state.json", "manifest.json", ".metadata"} <= files
    assert not list((tmp_path / "c").glob(".*"))


def test_training_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """write() returns when the state is copied; a second one waits its turn without blocking."""
    go, save = threading.Event(), module._save

    def slow(*args: Any) -> None:
        assert go.wait(30)
        save(*args)

    monkeypatch.setattr(module, "_save", slow)
    store = Checkpoints(tmp_path, every_seconds=1e-9)
    state = tree()
    assert store.maybe_write(lambda: module._join(module._split(state, "", t := {}), t), 1)
    assert store.newest_step() == -1
    assert not store.maybe_write(tree, 2)
    go.set()
    store.close()
    assert store.newest_step() == 1


def test_cadence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    store = Checkpoints(tmp_path, every_seconds=10)
    written = []
    for step in range(1, 40):
        now[0] += 1
        if store.maybe_write(tree, step):
            written.append(step)
            store.close()
    assert written == [10, 20, 30] and store.written == written


def test_only_the_last_three_are_kept_and_left_overs_go(tmp_path: Path) -> None:
    (tmp_path / ".step-000000000001.99.part").mkdir()
    store = Checkpoints(tmp_path, every_seconds=60)
    for step in (2, 3, 4, 5):
        store.write(tree, step, wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{k:012d}" for k in (3, 4, 5)]


def test_a_state_that_is_not_finite_is_never_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Checkpoints(tmp_path, every_seconds=60)
    store.write(tree, 1, wait=True)
    store.write(lambda: {"model": {"w": torch.tensor([1.0, float("nan")])}}, 2, wait=True)
    assert store.newest_step() == 1
    assert "not finite" in capsys.readouterr().err


def test_a_disk_that_fails_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Checkpoints(tmp_path / "file" / "c", every_seconds=60)
    store.write(tree, 1, wait=True)
    assert "was not written" in capsys.readouterr().err


damages = ["cut", "flip", "empty", "lost", "no_state", "bad_manifest"]


def damage(path: Path, how: str) -> None:
    data = max((p for p in path.iterdir() if p.suffix == ".distcp"), key=lambda p: p.stat().st_size)
    if how == "cut":
        data.write_bytes(data.read_bytes()[:-5])
    elif how == "flip":
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 255
        data.write_bytes(bytes(raw))
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "lost":
        data.unlink()
    elif how == "no_state":
        (path / "state.json").unlink()
    else:
        (path / "manifest.json").write_text('{"format": 1, "files"')


@pytest.mark.parametrize("how", damages)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Checkpoints(tmp_path, every_seconds=60)
    for step in (1, 2):
        store.write(lambda step=step: tree(step), step, wait=True)
    damage(tmp_path / "step-000000000002", how)
    fresh = Checkpoints(tmp_path, every_seconds=60)
    assert digest(fresh.load_newest()) == digest(tree(1))
    line = capsys.readouterr().err
    assert "step-000000000002 is damaged" in line and "the one before" in line
    damage(tmp_path / "step-000000000001", how)
    with pytest.raises(shoal.UsageError, match="restore one from a copy"):
        Checkpoints(tmp_path, every_seconds=60).load_newest()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two")
    store = Checkpoints(path, every_seconds=60)
    for step in (1, 2):
        store.write(lambda step=step: tree(step), step, wait=True)
    return path


@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    place=st.floats(0, 1, exclude_max=True),
    name=st.sampled_from([".metadata", "data", "state.json", "manifest.json"]),
)
def test_cut_at_any_byte_falls_back(
    written: Path, tmp_path_factory: pytest.TempPathFactory, place: float, name: str
) -> None:
    path = tmp_path_factory.mktemp("cut") / "c"
    shutil.copytree(written, path)
    last = path / "step-000000000002"
    file = next(last.glob("*.distcp")) if name == "data" else last / name
    whole = file.read_bytes()
    file.write_bytes(whole[: int(place * len(whole))])
    assert digest(Checkpoints(path, every_seconds=60).load_newest()) == digest(tree(1))
    shutil.rmtree(path)


STAGES = ["split", "save", "manifest", "rename"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_while_writing_leaves_the_one_before(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kill(BaseException):
        pass

    def die(*args: Any, **named: Any) -> None:
        raise Kill

    store = Checkpoints(tmp_path, every_seconds=60)
    store.write(tree, 1, wait=True)
    target = {"split": "_split", "save": "_digest", "manifest": "_sync", "rename": "os.replace"}[
        stage
    ]
    where = module.os if "." in target else module
    monkeypatch.setattr(where, target.rpartition(".")[2], die)
    with pytest.raises(Kill):
        store._write(tree(2), 2)
    monkeypatch.undo()
    again = Checkpoints(tmp_path, every_seconds=60)
    assert again.newest_step() == 1
    assert digest(again.load_newest()) == digest(tree())
    again.write(lambda: tree(3), 3, wait=True)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_resume_with_another_number_of_workers(tmp_path: Path, workers: int, stop: int) -> None:
    """What remains is exactly what was not drawn, read from the weights."""
    first = count(
        VirtualWorld(3), samples=50, epochs=2, local_batch=4, run_dir=tmp_path, until=stop
    )
    assert steps(tmp_path)[-1] == stop == first.fleet.step_count
    second = count(
        VirtualWorld(workers), samples=50, epochs=2, local_batch=4, run_dir=tmp_path, resume=True
    )
    assert second.seen == 100
    torch.testing.assert_close(second.weights, torch.full((50,), 2.0, dtype=torch.float64))
    events = [json.loads(row) for row in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "resume"] == [stop]


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    """In the middle of a ramp, with momentum, BatchNorm and dropout: bit for bit."""

    def go(**more: Any) -> Run:
        return train(
            model=classifier(norm=True, dropout=0.2),
            optimizer="nesterov",
            scaling=shoal.scaling.Dynamic(reference_batch=8),
            schedule=shoal.schedules.cosine(),
            local_batch=8,
            epochs=3,
            **more,
        )

    whole = go(world=VirtualWorld(1, [VirtualEvent(kind="join", workers=2, at_step=5)]))
    first = go(
        world=VirtualWorld(1, [VirtualEvent(kind="join", workers=2, at_step=5)]),
        run_dir=tmp_path,
        until=9,
    )
    second = go(world=VirtualWorld(3), run_dir=tmp_path, resume=True)
    assert first.lrs + second.lrs == whole.lrs
    assert same_bits(second.model, whole.model)


def test_threads_resume_from_one_checkpoint(tmp_path: Path) -> None:
    train(run_dir=tmp_path, until=5)

    def worker(world: Any) -> tuple[int, str]:
        model = classifier(seed=world.number + 3)
        run = train(world, model=model, run_dir=tmp_path, resume=True, local_batch=4)
        return run.fleet.samples_seen, digest(dict(model.state_dict()))

    (a, x), (b, y) = run_workers(2, worker)  # type: ignore[misc]
    assert a == b == 200 and x == y


def test_an_evaluation_cut_by_a_checkpoint_starts_again(tmp_path: Path) -> None:
    """State saved in the middle of an evaluation must not leak its parts into a later one."""
    run = train(run_dir=tmp_path, until=5, close=False)
    run.fleet._replica.evaluation.cursor = 4
    run.fleet._replica.evaluation.parts = [b'{"mean": [100.0, 1.0]}']
    run.fleet._loop._checkpoints.write(run.fleet._replica.snapshot, 6, wait=True)  # type: ignore[union-attr]
    run.fleet.close()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with shoal.init(model, optimizer, run_dir=tmp_path, resume=True) as fleet:
        scores = fleet.evaluate(
            torch.arange(10), lambda m, b: {"mean": (b.sum(), len(b))}, local_batch=2
        )
    assert scores == {"mean": 4.5}


def test_a_run_directory_with_checkpoints_needs_resume(tmp_path: Path) -> None:
    train(run_dir=tmp_path, until=2)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(shoal.UsageError, match="pass resume=True"):
        train(run_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_resume_without_a_checkpoint_starts_the_run(tmp_path: Path) -> None:
    run = train(run_dir=tmp_path, resume=True)
    assert run.fleet.samples_seen == 200 and same_bits(run.model, train().model)


def another_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 3}, "seed = 3, but the state was made with seed 0"),
        ({"model": another_model}, "model = another one than the state's: 0"),
        ({"data": 90}, "dataset = 90 samples, but this run was begun on 100"),
        ({"optimizer": "adamw"}, "optimizer = "),
        ({"scaling": shoal.scaling.Linear(reference_batch=8)}, "scaling = linear, but"),
    ],
)
def test_resuming_another_run_says_what_differs(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    train(run_dir=tmp_path, until=3)
    kept = digest(Checkpoints(tmp_path / "checkpoints", every_seconds=60).load_newest())
    change = dict(change)
    if "model" in change:
        change["model"] = change["model"]()
    if "data" in change:
        change["data"] = classes(change["data"])
    with pytest.raises(shoal.UsageError, match=named):
        train(run_dir=tmp_path, resume=True, **change)
    assert digest(Checkpoints(tmp_path / "checkpoints", every_seconds=60).load_newest()) == kept


def test_resuming_on_other_values_of_the_same_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in the middle of an epoch; a note between two, where another set may be meant."""
    x, y = classes()
    train(run_dir=tmp_path / "a", until=3)
    with pytest.raises(
        shoal.UsageError, match=r"dataset = other values .* in the middle of an epoch"
    ):
        train(run_dir=tmp_path / "a", resume=True, data=(x * 2, y))
    nearly = train(run_dir=tmp_path / "a", resume=True, data=(x * (1 + 1e-7), y))
    assert nearly.fleet.samples_seen == 200
    train(run_dir=tmp_path / "b", epochs=1)
    capsys.readouterr()
    train(run_dir=tmp_path / "b", resume=True, data=(x * 2, y))
    assert "dataset = other values" in capsys.readouterr().err


def test_a_resume_passes_over_a_truncated_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_dir=tmp_path, until=3)
    train(run_dir=tmp_path, resume=True, until=6)
    assert steps(tmp_path) == [3, 6]
    damage(newest(tmp_path), "cut")
    run = train(run_dir=tmp_path, resume=True)
    assert "step-000000000006 is damaged" in capsys.readouterr().err
    assert run.fleet.samples_seen == 200 and same_bits(run.model, train().model)


def test_a_diverging_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.calls += 1  # type: ignore[attr-defined]
        return value * float("inf") if loss.calls == 6 else value  # type: ignore[attr-defined]

    loss.calls = 0  # type: ignore[attr-defined]
    train(run_dir=tmp_path, until=3, loss=loss)
    kept = digest(Checkpoints(tmp_path / "checkpoints", every_seconds=60).load_newest())
    model = classifier()
    with pytest.raises(shoal.DivergedError, match=r"step 5 .*last good checkpoint is kept; try"):
        train(run_dir=tmp_path, resume=True, loss=loss, model=model)
    assert steps(tmp_path) == [3]
    assert digest(Checkpoints(tmp_path / "checkpoints", every_seconds=60).load_newest()) == kept
    assert same_bits(model, train(until=5).model)


def test_a_world_that_has_too_few_workers_leaves_a_checkpoint(tmp_path: Path) -> None:
    script = [VirtualEvent(kind="leave", workers=2, at_step=4)]
    with pytest.raises(shoal.ResumableStop):
        train(VirtualWorld(2, script), run_dir=tmp_path, local_batch=4)
    assert steps(tmp_path) == [4]


def test_save_writes_the_model_whole(tmp_path: Path) -> None:
    compiled = torch.compile(classifier(norm=True), backend="eager")
    run = train(model=compiled, epochs=1, close=False)
    run.fleet.save(tmp_path / "sub" / "model.safetensors")
    run.fleet.close()
    loaded = load_file(tmp_path / "sub" / "model.safetensors")
    plain_names = classifier(norm=True).state_dict()
    assert set(loaded) == set(plain_names)
    assert torch.equal(loaded["0.weight"], run.model._orig_mod[0].weight.detach())
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["model.safetensors"]


def test_only_the_primary_saves(tmp_path: Path) -> None:
    def worker(world: Any) -> bool:
        run = train(world, model=classifier(seed=world.number), epochs=1, close=False)
        run.fleet.save(tmp_path / f"{world.number}.safetensors")
        primary = run.fleet.is_primary
        run.fleet.close()
        return primary

    assert run_workers(3, worker) == [True, False, False]
    assert [p.name for p in tmp_path.iterdir()] == ["0.safetensors"]


def test_tied_weights_are_saved_under_each_name(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2)}
    )
    model["b"].weight = model["a"].weight
    with shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1)) as fleet:
        fleet.save(tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert torch.equal(loaded["a.weight"], loaded["b.weight"])
