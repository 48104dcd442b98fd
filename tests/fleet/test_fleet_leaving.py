"""Leaving: by break, as announced, or all together; the others go on with every sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import Counter, accuracy, classes, classifier, plain, same_bits, train
from torch import nn

import shoal
from shoal import VirtualWorld
from shoal.data import Order
from shoal.testing.threads import Ended, ThreadScript, run_workers

WHERE = ["before backward", "before step", "between micro-batches", "after step", "end of epoch"]


def break_at(where: str, fleet: shoal.Fleet, moment: str, piece: int) -> bool:
    """Whether worker 1 breaks now, in or after the third of the epoch's four steps."""
    if where == "between micro-batches":
        return moment == "after step" and fleet.step_count == 2 and piece == 0
    if where == "after step":
        return moment == where and fleet.step_count == 3
    return moment == where and fleet.step_count == 2 and piece == 1


def breaking(world: Any, where: str, who: set[int], *, epochs: int = 2) -> dict[str, Any]:
    """Count samples; workers in ``who`` break out of the batches at ``where``."""
    model = Counter(48)
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=1.0), world=world)
    pieces: list[int] = []
    for _ in fleet.epochs(epochs):
        piece, step = -1, -1
        for batch in fleet.batches(torch.arange(48), local_batch=4, micro_batch=2):
            piece = piece + 1 if fleet.step_count == step else 0
            step = fleet.step_count
            pieces.append(piece)
            order = Order(n=48, seed=0, epoch=fleet.epoch)
            position = fleet.epoch * 48 + int(order.positions(batch.numpy())[0])
            first = float(position == fleet.samples_seen)
            goes = world.number in who
            if goes and break_at(where, fleet, "before backward", piece):
                break
            fleet.backward(model(batch), reduction="sum", weight=first)
            if goes and break_at(where, fleet, "before step", piece):
                break
            fleet.step()
            if goes and break_at(where, fleet, "after step", piece):
                break
        if world.number not in who:
            fleet.evaluate(torch.arange(48), lambda m, b: {"n": (b.sum(), len(b))})
    seen = fleet.samples_seen
    primary = fleet.is_primary
    alone = fleet.evaluate(torch.arange(48), lambda m, b: {"n": (b.sum(), len(b))})
    fleet.close()
    return {
        "weights": model.weight.detach(),
        "seen": seen,
        "scores": alone,
        "primary": primary,
        "events": [e["kind"] for e in world.events],
    }


@pytest.mark.parametrize("where", WHERE)
def test_one_breaks_and_the_others_go_on(where: str) -> None:
    """At the end of an epoch the others evaluate; the one that broke takes part or says goodbye."""

    def worker(world: Any) -> dict[str, Any]:
        if where == "end of epoch":
            return breaking_at_the_end(world)
        return breaking(world, where, {1})

    results: list[Any] = run_workers(3, worker, timeout_seconds=20)
    for stayed in (results[0], results[2]):
        assert stayed["seen"] == 96
        torch.testing.assert_close(stayed["weights"], torch.full((48,), 2.0, dtype=torch.float64))
        assert stayed["scores"] == {"n": 23.5}
    assert "leave" in results[0]["events"] + results[2]["events"]
    assert "kill" not in results[0]["events"] + results[2]["events"]
    left = results[1]
    assert left["seen"] == {"after step": 36, "before step": 36, "end of epoch": 48}.get(where, 24)
    assert left["scores"] == {"n": 23.5} and not left["primary"]
    assert float(left["weights"].sum()) == pytest.approx(left["seen"])


def breaking_at_the_end(world: Any) -> dict[str, Any]:
    """Worker 1 breaks after the last step of the first epoch, which the others cannot tell."""
    model = Counter(48)
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=1.0), world=world)
    scores = {}
    for epoch in fleet.epochs(2):
        for batch in fleet.batches(torch.arange(48), local_batch=4):
            order = Order(n=48, seed=0, epoch=epoch)
            position = epoch * 48 + int(order.positions(batch.numpy())[0])
            fleet.backward(
                model(batch), reduction="sum", weight=float(position == fleet.samples_seen)
            )
            fleet.step()
            if world.number == 1 and fleet.samples_seen == 48:
                break
        scores = fleet.evaluate(torch.arange(48), lambda m, b: {"n": (b.sum(), len(b))})
    result = {
        "weights": model.weight.detach(),
        "seen": fleet.samples_seen,
        "scores": scores,
        "primary": fleet.is_primary,
        "events": [e["kind"] for e in world.events],
    }
    fleet.close()
    return result


@pytest.mark.parametrize("where", ["before backward", "between micro-batches", "after step"])
def test_all_break_together(where: str) -> None:
    """One of them still is the primary, to save the model."""
    results: list[Any] = run_workers(3, lambda world: breaking(world, where, {0, 1, 2}))
    assert [r["primary"] for r in results] == [True, False, False]
    assert len({r["seen"] for r in results}) == 1
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)
    assert results[0]["events"].count("finish") == 1


@pytest.mark.parametrize("where", ["before backward", "before step", "after step"])
def test_break_alone(where: str) -> None:
    """A step in the middle of which the loop is left leaves no trace; one that is done counts."""
    model = classifier(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with shoal.init(model, optimizer) as fleet:
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(), local_batch=8):
                if where == "before backward" and fleet.step_count == 3:
                    model(x)
                    break
                fleet.backward(F.cross_entropy(model(x), y))
                if where == "before step" and fleet.step_count == 3:
                    break
                fleet.step()
                if where == "after step" and fleet.step_count == 3:
                    break
            assert fleet.evaluate(classes(), accuracy)["accuracy"] > 0
        assert fleet.step_count == 3 and fleet.is_primary
        assert list(fleet.epochs(2)) == [] and list(fleet.batches(classes(), local_batch=8)) == []
    assert same_bits(model, train(model=classifier(norm=True), until=3).model)


def test_break_in_a_virtual_world() -> None:
    run = train(VirtualWorld(3), local_batch=4, until=4)
    assert run.fleet.step_count == 4 and len(run.lrs) == 4
    model = plain(model=classifier(), data=None, batch=12)
    assert not same_bits(run.model, model)


def test_leaving_the_outer_loop_by_a_score() -> None:
    """All workers see the same bits, so all stop together, and a checkpoint can be resumed."""

    def worker(world: Any) -> tuple[int, bool]:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        for _ in fleet.epochs(50):
            for x, y in fleet.batches(classes(), local_batch=8):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            if fleet.evaluate(classes(), accuracy)["accuracy"] > 0.8:
                break
        fleet.close()
        return fleet.epoch, fleet.is_primary

    results: list[Any] = run_workers(3, worker)
    assert len({epoch for epoch, _ in results}) == 1 and results[0][0] < 50
    assert [primary for _, primary in results] == [True, False, False]


def test_one_leaves_the_outer_loop() -> None:
    def worker(world: Any) -> int:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        for epoch in fleet.epochs(3):
            for x, y in fleet.batches(classes(48), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            fleet.evaluate(classes(20), accuracy)
            if world.number == 2 and epoch == 0:
                break
        fleet.close()
        return fleet.samples_seen

    assert run_workers(3, worker) == [144, 144, 48]


def test_an_exception_in_the_loop_lets_the_others_go_on() -> None:
    def worker(world: Any) -> int:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        try:
            for _ in fleet.epochs(2):
                for x, y in fleet.batches(classes(48), local_batch=4):
                    if world.number == 1 and fleet.step_count == 2:
                        raise KeyError("a bug")
                    fleet.backward(F.cross_entropy(model(x), y))
                    fleet.step()
        except KeyError:
            pass
        fleet.close()
        return fleet.samples_seen

    assert run_workers(3, worker) == [96, 24, 96]


def test_a_failing_backward_is_seen_at_once() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise RuntimeError("out of memory")

    def worker(world: Any) -> int:
        model = classifier(seed=world.number)

        def loss(m: nn.Module, batch: Any) -> torch.Tensor:
            hidden = m[0](batch[0])
            if world.number == 1 and world.exchange == 2:
                hidden = Fails.apply(hidden)
            return F.cross_entropy(m[2](hidden), batch[1])

        try:
            run = train(world, model=model, data=classes(48), local_batch=4, loss=loss)
        except RuntimeError:
            return -1
        return run.fleet.samples_seen

    assert run_workers(3, worker) == [96, -1, 96]


def test_a_planned_leave_loses_nothing() -> None:
    """The worker's process ends with status 0, at the end of its exchange."""

    def worker(world: Any) -> int:
        return train(world, model=classifier(seed=world.number), local_batch=4).fleet.samples_seen

    results = run_workers(3, worker, ThreadScript(leaves={0: 3}))
    assert results == [Ended("left", 0), 200, 200]


def test_a_leave_that_a_failure_hides_is_announced_again() -> None:
    def worker(world: Any) -> int:
        return train(world, model=classifier(seed=world.number), local_batch=4).fleet.samples_seen

    script = ThreadScript(leaves={1: 2}, failures={2: {0, 1, 2}, 3: {1}})
    assert run_workers(3, worker, script) == [200, Ended("left", 0), 200]


def test_when_all_leave_the_run_can_be_resumed(tmp_path: Path) -> None:
    """Exit status 75, and a checkpoint of the last step."""

    def worker(world: Any) -> None:
        train(
            world,
            model=classifier(seed=world.number),
            local_batch=4,
            run_dir=tmp_path if world.number == 0 else None,
        )

    results = run_workers(2, worker, ThreadScript(leaves={0: 5, 1: 5}))
    assert results == [Ended("left", 75)] * 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000000006"]


def test_a_leave_in_the_last_round_of_an_evaluation() -> None:
    """It takes effect at the next exchange the worker would take part in."""

    def worker(world: Any) -> int:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(16), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            fleet.evaluate(classes(8), accuracy, local_batch=4)
        fleet.close()
        return fleet.samples_seen

    # An epoch is two steps and one round.
    assert run_workers(2, worker, ThreadScript(leaves={1: 2})) == [32, Ended("left", 0)]


def test_closing_twice_and_as_a_context() -> None:
    with shoal.init(model := classifier(), torch.optim.SGD(model.parameters(), lr=0.1)) as fleet:
        pass
    fleet.close()
    model(torch.zeros(1, 6)).sum().backward()


def test_two_fleets_one_after_the_other() -> None:
    """Hooks of a closed fleet are gone; its model can be trained by another one."""
    model = classifier(norm=True)
    first = train(model=model, epochs=1)
    train(model=first.model, epochs=1, seed=1)
    other = train(model=classifier(norm=True), epochs=1)
    assert same_bits(train(model=other.model, epochs=1, seed=1).model, model)


def scored(world: Any, upset: Any, *, epochs: int = 3) -> tuple[int, list[Any]]:
    """Train with an evaluation after each epoch and one after all; ``upset(epoch)`` comes in between."""
    model = classifier(seed=world.number)
    fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.5), world=world)
    scores: list[Any] = []
    try:
        for epoch in fleet.epochs(epochs):
            for x, y in fleet.batches(classes(24), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            if upset(epoch, "before evaluation"):
                break
            scores.append(fleet.evaluate(classes(20), accuracy, local_batch=4))
            if upset(epoch, "after evaluation"):
                break
        scores.append(fleet.evaluate(classes(20), accuracy, local_batch=4))
    except KeyError:
        pass
    seen = fleet.samples_seen
    fleet.close()
    return seen, scores


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_one_leaves_the_outer_loop_after_an_evaluation(epoch: int) -> None:
    """In the last epoch, too: the others do not wait for it."""

    def worker(world: Any) -> tuple[int, list[Any]]:
        return scored(
            world, lambda e, when: (world.number, e, when) == (1, epoch, "after evaluation")
        )

    results: list[Any] = run_workers(3, worker, timeout_seconds=20)
    assert [seen for seen, _ in results] == [72, 24 * (epoch + 1), 72]
    assert results[0][1] == results[2][1] and len(results[0][1]) == 4
    assert results[1][1][: epoch + 1] == results[0][1][: epoch + 1]


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("how", ["break", "error"])
def test_one_leaves_where_the_others_evaluate(epoch: int, how: str) -> None:
    """No goodbye fits there: the others see a lost worker, and go on."""

    def worker(world: Any) -> tuple[int, list[Any]]:
        def upset(e: int, when: str) -> bool:
            comes = (world.number, e, when) == (1, epoch, "before evaluation")
            if comes and how == "error":
                raise KeyError("a bug")
            return comes

        return scored(world, upset)

    results: list[Any] = run_workers(3, worker, timeout_seconds=20)
    assert [seen for seen, _ in results] == [72, 24 * (epoch + 1), 72]
    assert results[0][1] == results[2][1] and len(results[0][1]) == 4


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1}, {0, 1, 2}])
def test_the_last_exchange_may_fail(failing: set[int]) -> None:
    """After 3 epochs of 2 steps and 2 rounds comes exchange 12, after which all end together."""

    def worker(world: Any) -> tuple[int, list[Any]]:
        return scored(world, lambda e, when: False)

    good: list[Any] = run_workers(3, worker)
    for exchange in range(10, 15):
        script = ThreadScript(failures={exchange: failing})
        assert run_workers(3, worker, script, timeout_seconds=20) == good, f"exchange {exchange}"


def test_a_joiner_that_comes_for_the_end() -> None:
    def worker(world: Any) -> tuple[int, list[Any]]:
        return scored(world, lambda e, when: False)

    ends = set()
    for entry in range(12, 20):
        results: list[Any] = run_workers(3, worker, ThreadScript(joins={2: entry}))
        assert results[0] == results[1] and results[0][0] == 72
        if not isinstance(results[2], Ended):
            assert results[2][0] == 72 and results[2][1][-1] == results[0][1][-1]
            ends.add(len(results[2][1]))
    assert ends == {1, 2}
