"""A body of the loop over the epochs counts when it has come to its end, evaluation and all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_fleet import OPTIMIZERS, accuracy, classes, classifier, digest, same_bits, train

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import Ended, ThreadScript, run_workers

Seen = list[tuple[int, int, dict[str, float]]]


class Killed(Exception):
    """Ends the loop at once."""


def life(
    world: Any = None,
    *,
    epochs: int = 3,
    die_in: int | None = None,
    checkpoint: bool = False,
    local_batch: int = 4,
    seed: int = 0,
    **init: Any,
) -> tuple[Seen, str]:
    """Train and evaluate; what was seen as (epoch, batches, scores) of each body, and the state.

    ``die_in``: the epoch in whose evaluation this worker dies.
    """
    model = classifier(norm=True, seed=seed)
    fleet = shoal.init(model, OPTIMIZERS["heavy_ball"](model.parameters()), world=world, **init)
    seen: Seen = []

    def metric(m: torch.nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
        if die_in == fleet._progress.bodies:
            raise Killed
        return accuracy(m, batch)

    try:
        for epoch in fleet.epochs(epochs):
            batches = 0
            for x, y in fleet.batches(classes(24), local_batch=local_batch):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
                batches += 1
            if checkpoint:
                fleet.checkpoint()
            seen.append((epoch, batches, fleet.evaluate(classes(20), metric, local_batch=4)))
    except Killed:
        pass
    state = digest(fleet._replica.snapshot())
    fleet.close()
    return seen, state


@pytest.mark.parametrize("die_in", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_killed_in_an_evaluation_makes_it_after_the_resume(
    tmp_path: Path, die_in: int, workers: int
) -> None:
    """The last checkpoint is of the epoch's last step; nothing is trained twice."""
    whole, _ = life(VirtualWorld(2))
    world = VirtualWorld(2)
    first, _ = life(world, die_in=die_in, checkpoint=True, run_dir=tmp_path)
    assert [row[0] for row in first] == list(range(die_in))
    second, _ = life(
        VirtualWorld(workers), local_batch=8 // workers, run_dir=tmp_path, resume=True,
        batch_policy="constant:8",
    )  # fmt: skip
    assert [row[0] for row in second] == list(range(die_in, 3))
    assert second[0][1] == 0, "all of it was trained before"
    assert first == whole[:die_in] and second[0][2] == whole[die_in][2]
    events = [json.loads(row) for row in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["samples"] for e in events if e["kind"] == "evaluate"] == [24, 48, 72]


def test_a_stop_in_an_evaluation_of_several(tmp_path: Path) -> None:
    """All are asked to leave in the evaluation of the second epoch; three others go on."""

    def worker(world: Any) -> Any:
        return life(world, seed=world.number, run_dir=tmp_path, checkpoint_seconds=1e-9)

    # An epoch is 3 steps and 3 rounds with two workers: exchange 10 is the second one's second round.
    results = run_workers(2, worker, ThreadScript(leaves={0: 10, 1: 10}))
    assert results == [Ended("left", 75)] * 2

    def again(world: Any) -> Any:
        return life(world, seed=world.number, run_dir=tmp_path, resume=True)

    resumed: list[Any] = run_workers(3, again)
    assert [row[0] for row in resumed[0][0]] == [1, 2]
    assert [row[1] for row in resumed[0][0]] == [0, 2]
    assert resumed[0] == resumed[1] == resumed[2]


def test_a_worker_that_joins_a_resumed_evaluation_waits(tmp_path: Path) -> None:
    life(VirtualWorld(2), die_in=1, checkpoint=True, run_dir=tmp_path / "0")
    entry = 0

    def worker(world: Any) -> Any:
        return life(world, seed=world.number, run_dir=tmp_path / str(entry), resume=True)

    for entry in range(1, 6):
        shutil.copytree(tmp_path / "0", tmp_path / str(entry))
        a, b, late = run_workers(3, worker, ThreadScript(joins={2: entry}))
        (rows, state), (others, other) = a, b  # type: ignore[misc]
        assert state == other and [row[0] for row in rows] == [1, 2]
        assert [row[2] for row in rows] == [row[2] for row in others]
        if not isinstance(late, Ended):
            assert late[1] == state and late[0][-1][2] == rows[-1][2]  # type: ignore[index]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    joins=st.dictionaries(st.integers(2, 3), st.integers(1, 20), max_size=2),
    failures=st.dictionaries(
        st.integers(0, 24), st.sets(st.integers(0, 3), min_size=1), max_size=4
    ),
    kill=st.none() | st.integers(1, 20),
)
def test_members_agree_on_their_bodies(
    joins: dict[int, int], failures: dict[int, set[int]], kill: int | None
) -> None:
    """Whoever was there from the start evaluates each epoch once, whatever it has missed."""
    script = ThreadScript(joins=joins, failures=failures, kills={} if kill is None else {1: kill})
    results = run_workers(4, lambda world: life(world, seed=world.number), script)
    ended = [r for r in results if not isinstance(r, Ended)]
    assert len({state for _, state in ended}) == 1
    first: Seen = ended[0][0]
    assert [row[0] for row in first] == [0, 1, 2]
    for seen, _ in ended:
        assert [row[0] for row in seen] == list(range(3 - len(seen), 3))
        for mine, other in zip(seen, first[3 - len(seen) :], strict=True):
            assert mine[2] == other[2]


def test_the_virtual_world_repeats_nothing_that_was_evaluated(tmp_path: Path) -> None:
    """A checkpoint in the middle of an epoch: its body goes on where it was, under a script, too."""
    script = [VirtualEvent(kind="join", at_step=2), VirtualEvent(kind="kill", at_step=5)]
    whole = train(VirtualWorld(1, script), evaluate=True)
    first = train(VirtualWorld(1, script), evaluate=True, run_dir=tmp_path, until=15)
    assert first.fleet.epoch == 1
    second = train(VirtualWorld(1), evaluate=True, run_dir=tmp_path, resume=True)
    assert same_bits(whole.model, second.model)
    assert second.scores == whole.scores[1:]


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    """Though there was a checkpoint of its last step, before the end of the last body."""
    life(checkpoint=True, run_dir=tmp_path)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{k:012d}" for k in (6, 12, 18)]
    assert life(run_dir=tmp_path, resume=True)[0] == []
    assert [row[0] for row in life(run_dir=tmp_path, resume=True, epochs=4)[0]] == [3]


def test_a_state_of_the_first_format_is_read() -> None:
    """It did not count bodies: all that were trained are taken for evaluated."""
    run = train(epochs=1, close=False)
    tree: Any = run.fleet._replica.snapshot()
    tree["progress"]["format"] = 1
    del tree["progress"]["bodies"]
    run.fleet.close()
    other = classifier()
    with shoal.init(other, OPTIMIZERS["heavy_ball"](other.parameters())) as fleet:
        fleet._replica.restore(tree)
        fleet._world._started = True  # type: ignore[attr-defined]
        epochs = fleet.epochs(2)
        assert next(epochs) == 1 and fleet._progress.bodies == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_twice_in_one_epoch(workers: int) -> None:
    def loop(world: Any) -> None:
        model = classifier(seed=world.number)
        with shoal.init(model, OPTIMIZERS["sgd"](model.parameters()), world=world) as fleet:
            for _ in fleet.epochs(2):
                for _ in range(2):
                    for x, y in fleet.batches(classes(24), local_batch=4):
                        fleet.backward(F.cross_entropy(model(x), y))
                        fleet.step()
                    assert fleet.samples_seen == 24

    def worker(world: Any) -> str:
        with pytest.raises(shoal.UsageError) as error:
            loop(world)
        return str(error.value)

    texts = set(run_workers(workers, worker))
    assert len(texts) == 1
    assert "called twice in one epoch; " in str(texts) and "in the next epoch" in str(texts)


def test_batches_within_batches() -> None:
    model = classifier()
    with shoal.init(model, OPTIMIZERS["sgd"](model.parameters())) as fleet:
        for _ in fleet.epochs(1):
            for _ in fleet.batches(classes(24), local_batch=4):
                with pytest.raises(shoal.UsageError, match="called twice in one epoch"):
                    next(fleet.batches(classes(24), local_batch=4))
                break


def test_batches_after_the_last_epoch() -> None:
    model = classifier()
    with shoal.init(model, OPTIMIZERS["sgd"](model.parameters())) as fleet:

        def draw() -> int:
            n = 0
            for x, y in fleet.batches(classes(24), local_batch=8):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
                n += 1
            return n

        assert [draw() for _ in fleet.epochs(2)] == [3, 3]
        with pytest.raises(shoal.UsageError, match=r"after fleet.epochs has ended; .*more epochs"):
            draw()
        assert fleet.samples_seen == 48


def test_a_loop_of_the_users_own_draws_an_epoch_each_time() -> None:
    model = classifier()
    with shoal.init(model, OPTIMIZERS["sgd"](model.parameters())) as fleet:
        for epoch in range(2):
            for x, y in fleet.batches(classes(24), local_batch=8):
                assert fleet.epoch == epoch
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
        assert fleet.samples_seen == 48 and fleet._progress.bodies == 2
        assert list(fleet.epochs(2)) == []
