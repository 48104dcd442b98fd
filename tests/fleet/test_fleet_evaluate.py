"""Evaluation and prediction by all workers together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_fleet import (
    OPTIMIZERS,
    Run,
    accuracy,
    classes,
    classifier,
    digest,
    train,
    training_state,
)
from torch import Tensor, nn

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import Ended, ThreadScript, run_workers


def fresh(world: Any = None, *, seed: int = 0, norm: bool = True) -> shoal.Fleet:
    model = classifier(norm=norm, dropout=0.5, seed=seed)
    return shoal.init(model, OPTIMIZERS["heavy_ball"](model.parameters()), world=world)


def seen(model: nn.Module, batch: Tensor) -> dict[str, tuple[Any, int]]:
    return {"sum": (batch.sum(), 1), "mean": (batch.double().sum(), len(batch))}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_ten_samples_are_seen_ten_times(workers: int, chunk: int) -> None:
    """10 samples on 4 workers: 10 are seen, not 12; before the first epoch, too."""
    counted: list[int] = []

    def metric(model: nn.Module, batch: Tensor) -> dict[str, tuple[Any, int]]:
        counted.append(len(batch))
        return seen(model, batch)

    def worker(world: Any) -> dict[str, float]:
        with fresh(world, seed=world.number) as fleet:
            return fleet.evaluate(torch.arange(10), metric, local_batch=chunk)

    results = run_workers(workers, worker)
    assert results == [{"sum": 45.0 / -(-10 // chunk), "mean": 4.5}] * workers
    assert sum(counted) == 10


def test_equal_bits_for_any_number_of_workers() -> None:
    x, y = classes(1000)

    def worker(world: Any) -> dict[str, float]:
        with fresh(world) as fleet:
            return fleet.evaluate((x, y), accuracy, local_batch=13)

    everywhere = [score for k in (1, 2, 3, 8) for score in run_workers(k, worker)]
    everywhere += [worker(VirtualWorld(k)) for k in (1, 2, 3, 8)]  # type: ignore[arg-type]
    assert all(score == everywhere[0] for score in everywhere)
    assert 0 < everywhere[0]["accuracy"] < 1


@pytest.mark.parametrize("workers", [1, 8])
def test_499_predictions_in_order(workers: int) -> None:
    numbers = torch.arange(499)

    def worker(world: Any) -> tuple[Tensor, Any, Any]:
        with fresh(world) as fleet:
            one = fleet.predict(numbers, lambda m, b: b * 2, local_batch=7)
            several = fleet.predict(
                numbers, lambda m, b: {"a": b.float()[:, None], "b": -b}, local_batch=10
            )
            pair = fleet.predict(numbers, lambda m, b: (b, b + 1), local_batch=500)
            return one, several, pair

    for one, several, pair in run_workers(workers, worker):  # type: ignore[misc]
        assert torch.equal(one, numbers * 2)
        assert several["a"].shape == (499, 1) and torch.equal(several["b"], -numbers)
        assert isinstance(pair, tuple) and torch.equal(pair[1], numbers + 1)


def test_predict_feeds_the_model_by_default() -> None:
    x, y = classes(20)
    with fresh(norm=False) as fleet:
        model = fleet._model
        model.eval()
        with torch.no_grad():
            expected = model(x)
        model.train()
        torch.testing.assert_close(fleet.predict((x, y), local_batch=6), expected)
        torch.testing.assert_close(fleet.predict(x, local_batch=6), expected)


def test_training_state_is_left_alone() -> None:
    run = train(model=classifier(norm=True, dropout=0.5), epochs=1, close=False)
    run.model[1].eval()
    before, random = digest(training_state(run.fleet)), torch.get_rng_state()

    def noisy(model: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(3)
        return accuracy(model, batch)

    run.fleet.evaluate(classes(), noisy)
    run.fleet.predict(classes())
    assert digest(training_state(run.fleet)) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert run.model.training and run.model[3].training and not run.model[1].training
    run.fleet.close()


def test_modes_come_back_after_an_error() -> None:
    with fresh() as fleet:

        def broken(model: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
            raise RuntimeError("no metric")

        with pytest.raises(RuntimeError, match="no metric"):
            fleet.evaluate(classes(), broken)
        assert fleet._model.training and torch.is_grad_enabled()


def test_an_evaluation_that_broke_off_leaves_nothing_for_the_next() -> None:
    calls: list[int] = []

    def fails_late(model: nn.Module, batch: Tensor) -> dict[str, tuple[Any, int]]:
        calls.append(len(batch))
        if len(calls) == 3:
            raise RuntimeError("late")
        return seen(model, batch)

    with fresh() as fleet:
        with pytest.raises(RuntimeError, match="late"):
            fleet.evaluate(torch.arange(10), fails_late, local_batch=2)
        assert fleet.evaluate(torch.arange(4), seen, local_batch=2) == {"sum": 3.0, "mean": 1.5}


@pytest.mark.parametrize(
    "failures", [{0: {1}}, {1: {0, 2}}, {0: {0, 1, 2}, 1: {2}}, {3: {0}, 4: {1}}]
)
def test_a_failed_round_is_repeated_without_counting_twice(failures: dict[int, set[int]]) -> None:
    def worker(world: Any) -> tuple[dict[str, float], Tensor]:
        with fresh(world) as fleet:
            scores = fleet.evaluate(torch.arange(20), seen, local_batch=2)
            return scores, fleet.predict(torch.arange(20), lambda m, b: b, local_batch=3)

    for scores, predicted in run_workers(3, worker, ThreadScript(failures=failures)):  # type: ignore[misc]
        assert scores == {"sum": 19.0, "mean": 9.5}
        assert torch.equal(predicted, torch.arange(20))


def test_a_worker_that_dies_in_an_evaluation() -> None:
    def worker(world: Any) -> dict[str, float]:
        with fresh(world) as fleet:
            return fleet.evaluate(torch.arange(30), seen, local_batch=2)

    results = run_workers(3, worker, ThreadScript(kills={1: 2}))
    assert results[1] == Ended("killed")
    assert results[0] == results[2] == {"sum": 435.0 / 15, "mean": 14.5}


def test_a_virtual_worker_that_dies_in_an_evaluation() -> None:
    world = VirtualWorld(3, [VirtualEvent(kind="kill", at_samples=0)])
    with fresh(world) as fleet:
        fleet._loop.begin("train")  # the script's event happens at a training step
        assert fleet.evaluate(torch.arange(30), seen, local_batch=2)["mean"] == 14.5
        assert fleet._loop.begin("evaluate").workers == 2


def test_a_planned_leave_in_an_evaluation() -> None:
    """The one that leaves departs in the middle of it; the others finish."""

    def worker(world: Any) -> dict[str, float]:
        with fresh(world) as fleet:
            return fleet.evaluate(torch.arange(30), seen, local_batch=2)

    results = run_workers(3, worker, ThreadScript(leaves={2: 1}))
    assert results[2] == Ended("left", 0)
    assert results[0] == results[1] == {"sum": 435.0 / 15, "mean": 14.5}


def test_a_joiner_waits_for_the_next_training_step() -> None:
    """Evaluations between epochs; the joiner knocks during one and enters at the next epoch."""
    workers_seen: list[tuple[int, int]] = []

    def worker(world: Any) -> Run:
        model = classifier(norm=True, seed=world.number)
        fleet = shoal.init(model, OPTIMIZERS["adamw"](model.parameters()), world=world)
        run = Run(model, OPTIMIZERS["sgd"](model.parameters()), fleet)
        for epoch in fleet.epochs(3):
            for x, y in fleet.batches(classes(24), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            run.scores.append(fleet.evaluate(classes(24), accuracy, local_batch=4))
            workers_seen.append((epoch, fleet.workers))
        fleet.close()
        return run

    joined = 0
    for entry in range(2, 10):
        workers_seen.clear()
        runs: list[Any] = run_workers(3, worker, ThreadScript(joins={2: entry}))
        if isinstance(runs[2], Ended):
            continue
        joined += 1
        assert runs[0].scores == runs[1].scores
        assert runs[2].scores == runs[0].scores[-len(runs[2].scores) :]
        assert (2, 3) in workers_seen
    assert joined >= 4


def test_a_joiner_that_evaluates_first_does_not_mix_it_up_with_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its baseline is not known: the others are training. It says so, and trains with them."""

    def worker(world: Any) -> tuple[dict[str, float], int]:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, OPTIMIZERS["adamw"](model.parameters()), world=world)
        baseline = fleet.evaluate(classes(24), accuracy)
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(24), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
        fleet.close()
        return baseline, fleet.samples_seen

    (a, n), (b, m), (late, k) = run_workers(3, worker, ThreadScript(joins={2: 3}))  # type: ignore[misc]
    assert a == b and n == m == k == 48
    assert list(late) == ["accuracy", "loss"] and all(v != v for v in late.values())
    assert "not known here" in capsys.readouterr().err


def test_a_worker_that_misses_the_last_round_still_has_the_answer() -> None:
    def worker(world: Any) -> list[Any]:
        model = classifier(seed=world.number)
        fleet = shoal.init(model, OPTIMIZERS["sgd"](model.parameters()), world=world)
        scores = []
        for _ in fleet.epochs(2):
            for x, y in fleet.batches(classes(16), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
            scores.append(fleet.evaluate(classes(16), accuracy, local_batch=4))
            scores.append(fleet.evaluate(classes(8), accuracy, local_batch=4))
        fleet.close()
        return scores

    good = run_workers(2, worker)[0]
    # Exchanges of an epoch: 2 steps, 2 rounds, 1 round; any of them may fail on one worker.
    for missed in range(10):
        both = run_workers(2, worker, ThreadScript(failures={missed: {1}}))
        assert both == [good, good], f"exchange {missed}"


@pytest.mark.parametrize("wrong", [None, 3.0, [1], {"a": 1.0}, {"a": (1, 2, 3)}])
def test_a_metric_that_is_no_pair_of_sum_and_count(wrong: Any) -> None:
    with fresh() as fleet, pytest.raises(shoal.UsageError, match="metric_fn returned"):
        fleet.evaluate(classes(), lambda m, b: wrong)


@pytest.mark.parametrize("wrong", [lambda b: b[:-1], lambda b: b.sum(), lambda b: "x"])
def test_predictions_that_are_not_one_row_a_sample(wrong: Any) -> None:
    with fresh() as fleet, pytest.raises(shoal.UsageError, match="one row for each sample"):
        fleet.predict(torch.arange(10), lambda m, b: wrong(b))


def test_inside_the_loop_it_is_refused() -> None:
    with fresh() as fleet:
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(), local_batch=50):
                fleet.backward(F.cross_entropy(fleet._model(x), y))
                fleet.step()
                with pytest.raises(shoal.UsageError, match="not inside it"):
                    fleet.evaluate(classes(), accuracy)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_chunk_sizes(size: Any) -> None:
    with fresh() as fleet, pytest.raises(shoal.UsageError, match="local_batch = "):
        fleet.evaluate(classes(), accuracy, local_batch=size)


def test_a_metric_without_any_count_is_not_a_number() -> None:
    with fresh() as fleet:
        assert (
            str(fleet.evaluate(torch.arange(3), lambda m, b: {"none": (0, 0)})) == "{'none': nan}"
        )
