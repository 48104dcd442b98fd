"""Random and scripted failures of real fleets; exactly-once is read from the trained weights."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "world"))

import exact_fleet
import real_fleet
from lighthouse import Lighthouse

from shoal.testing.links import Board
from shoal.testing.processes import Child, ChildFailed, Herd
from shoal.world.alone import AloneWorld

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SLOTS = 12


class Run:
    """A lighthouse, a board, and workers that are started, killed and asked to leave."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.herd = Herd(directory, {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn"})
        self.lighthouse = Lighthouse(self.herd)
        self.board = Board.create(
            directory / "board", workers=SLOTS, coordinator=self.lighthouse.address, ready=False
        )
        self.settings = settings
        self.workers: list[Child] = []
        self.gone: set[int] = set()

    def start(self, **own: Any) -> int:
        """Start one worker and wait until it stands at the barrier; returns its slot."""
        slot = len(self.workers)
        child = self.herd.start(
            real_fleet.train,
            str(self.board.path),
            slot,
            name=f"w{slot}",
            **{**self.settings, **own},
        )
        self.workers.append(child)
        assert child.message(60) == "ready"
        return slot

    def go(self) -> None:
        """Open the start barrier."""
        self.board.ready = True

    def kill(self, slot: int) -> None:
        """SIGKILL, seen by the supervisor at once."""
        self.workers[slot].kill()
        self.board.mark_dead(slot)
        self.gone.add(slot)

    def leave(self, slot: int) -> None:
        """Ask a worker to leave in order."""
        self.board.ask_to_leave(slot)
        self.gone.add(slot)

    def until(self, slot: int, step: int) -> None:
        """Wait until worker ``slot`` has committed ``step`` steps."""
        while True:
            said = self.workers[slot].message(60)
            if isinstance(said, tuple) and said[0] >= step:
                return

    def entered(self, slot: int) -> None:
        """Wait until worker ``slot`` has been let in."""
        self.until(slot, 0)

    def finish(self, seconds: float = 100.0) -> list[dict[str, Any]]:
        """Let the fleet run to its end; all workers that were to stay must agree in everything."""
        Path(f"{self.board.path}.hurry").touch()
        results = []
        for slot, worker in enumerate(self.workers):
            if slot not in self.gone:
                result = worker.result(seconds)
                assert isinstance(result, dict)
                results.append(result)
        for result in results[1:]:
            assert result["plain"] == results[0]["plain"]
        assert len({r["hash"] for r in results}) == 1, "workers ended with different states"
        return results

    def check_exactly_once(self, results: list[dict[str, Any]]) -> None:
        """Every weight is the number of epochs, and so is what the counters say."""
        epochs, samples = self.settings["epochs"], self.settings["samples"]
        for result in results:
            assert set(result["weight"]) == {float(epochs)}
            assert result["samples_seen"] == epochs * samples
            assert len(set(result["tag"])) == 1
            for score in result["scores"]:
                assert score == pytest.approx((samples - 1) / 2)


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.herd.close()


def random_script(start_run: Any, seed: int) -> None:
    """One random fleet: joins, leaves and kills at random moments; at least one worker stays."""
    rng = random.Random(seed)
    samples, epochs, local_batch = rng.randint(150, 400), rng.randint(2, 3), rng.randint(1, 5)
    run = start_run(
        samples=samples,
        epochs=epochs,
        local_batch=local_batch,
        # Some seconds to the half of the run, which then waits for the script to be over.
        slow_seconds=max(0.004, 5.0 * 3 * local_batch / (samples * epochs)),
        micro_batch=rng.choice([None, 1]),
        policy=rng.choice(
            ["proportional", "proportional", f"constant:{rng.randint(3, 12)}", "capped:9"]
        ),
        evaluate=rng.random() < 0.7,
    )
    for _ in range(rng.randint(1, 3)):
        run.start()
    stays = rng.randrange(len(run.workers))
    run.go()
    run.entered(stays)
    joined: list[int] = []
    for _ in range(rng.randint(2, 5)):
        time.sleep(rng.uniform(0.0, 0.4))
        alive = [s for s in range(len(run.workers)) if s not in run.gone and s != stays]
        action = rng.choice(["join", "kill", "kill", "leave"])
        if action == "join" or not alive:
            joined.append(run.start())
        elif action == "kill":
            run.kill(rng.choice(alive))
        else:
            run.leave(rng.choice(alive))
    try:
        for slot in joined:
            if slot not in run.gone:
                run.entered(slot)
        results = run.finish()
    except ChildFailed as error:
        pytest.fail(f"seed {seed}: {error}")
    run.check_exactly_once(results)


@pytest.mark.parametrize("seed", range(20))
def test_random_scripts_train_every_sample_once(start_run: Any, seed: int) -> None:
    random_script(start_run, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_scripts_train_every_sample_once(start_run: Any, seed: int) -> None:
    random_script(start_run, seed)


def test_growth_takes_over_the_first_workers_state(start_run: Any) -> None:
    run = start_run(samples=600, epochs=2, local_batch=3, slow_seconds=0.03)
    first = run.start()
    run.go()
    run.until(first, 20)
    for slot in [run.start(), run.start()]:
        run.entered(slot)
    results = run.finish()
    run.check_exactly_once(results)
    assert [r["tag"] for r in results] == [[0.0] * 3] * 3
    assert max(workers for _, _, workers, _ in results[0]["trace"]) == 3


def test_a_planned_leave_costs_no_step(start_run: Any) -> None:
    run = start_run(samples=600, epochs=2, local_batch=2, pause_seconds=0.002)
    run.start()
    run.start(leave_at=40)
    run.start()
    run.gone.add(1)
    run.go()
    results = run.finish()
    run.check_exactly_once(results)
    assert run.workers[1].wait(20) == 0
    steps = [step for step, *_ in results[0]["trace"]]
    assert steps == list(range(1, steps[-1] + 1)), "the survivors committed every step at once"


def test_a_failure_seen_by_one_member_only(start_run: Any) -> None:
    run = start_run(samples=400, epochs=2, local_batch=2, pause_seconds=0.002)
    run.start()
    run.start(fail_at=30)
    run.start()
    run.go()
    results = run.finish()
    run.check_exactly_once(results)
    # If the others had committed the step, the one that saw it fail adopted it; its end of the
    # connections may also have gone before they had read everything, and then all drew it again.
    steps = [step for step, *_ in results[1]["trace"]]
    assert len(steps) in (results[0]["step"] - 1, results[0]["step"])


def test_a_death_during_evaluation_repeats_only_the_lost_chunk(start_run: Any) -> None:
    run = start_run(samples=140, epochs=2, local_batch=2, pause_seconds=0.002)
    run.start()
    run.start(die_in_evaluation=1)
    run.start()
    run.gone.add(1)
    run.go()
    results = run.finish()
    run.check_exactly_once(results)
    assert all(len(r["scores"]) == 2 for r in results)


def test_a_hung_worker_is_survived_once_it_is_killed(start_run: Any) -> None:
    run = start_run(samples=300, epochs=2, local_batch=2, pause_seconds=0.002)
    run.start()
    run.start(hang_at=20)
    run.start()
    run.go()
    while run.workers[1].message(60) != "hung":
        pass
    time.sleep(0.3)  # the others wait in the exchange; a watchdog would act now
    run.kill(1)
    run.check_exactly_once(run.finish())


def test_the_coordinator_is_killed_and_comes_back(start_run: Any) -> None:
    run = start_run(samples=600, epochs=2, local_batch=2, slow_seconds=0.03)
    for _ in range(3):
        run.start()
    run.go()
    run.until(0, 20)
    run.lighthouse.kill()
    time.sleep(0.2)
    run.kill(2)  # the others need a quorum while there is no coordinator
    time.sleep(0.5)
    run.lighthouse.start()
    run.entered(run.start())
    run.check_exactly_once(run.finish())


def test_more_workers_than_samples_of_a_step(start_run: Any) -> None:
    run = start_run(samples=31, epochs=3, local_batch=2, policy="constant:2", pause_seconds=0.001)
    for _ in range(3):
        run.start()
    run.go()
    run.check_exactly_once(run.finish())


def test_the_learning_rate_is_a_function_of_state(start_run: Any) -> None:
    import shoal

    rule = shoal.scaling.Dynamic(reference_batch=2, ramp_steps=6)
    run = start_run(samples=500, epochs=2, local_batch=2, slow_seconds=0.03, scaling=rule)
    run.start()
    run.start()
    run.go()
    run.until(0, 20)
    run.entered(run.start())
    run.until(0, 45)
    run.kill(1)
    results = run.finish()
    # Replay the rule over what worker 0 saw: nothing else may move the rate.
    state, before = None, 0
    for step, samples, workers, lr in results[0]["trace"]:
        at = shoal.scaling.At(
            step=step - 1, samples=before, global_batch=2 * workers, momentum=0.0, epoch_samples=500
        )
        state = rule.init(at) if state is None else state
        state = rule.advance(state, at)
        assert lr == rule.multiplier(state, at)
        state = rule.commit(state, at, None)
        before = samples


def test_exact_sums_give_the_same_bits_for_any_number_of_processes(tmp_path: Path) -> None:
    """1, 2, 3 and 4 processes, and a fleet with two joins and a leave: equal weights, bit for bit."""
    board, boards = str(tmp_path / "board"), {}
    with Herd(tmp_path, {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn"}) as herd:
        lighthouse = Lighthouse(herd)
        # The largest fleet first: whoever is done with it is out of the next one's way.
        for name in ("4", "3", "2", "1", ""):
            boards[name] = Board.create(board + name, workers=4, coordinator=lighthouse.address)
        workers = [
            herd.start(exact_fleet.in_turn, board, slot, (4, 3, 2, 1), 0.02, name=f"w{slot}")
            for slot in range(4)
        ]
        learned: dict[Any, list[dict[str, Any]]] = {size: [] for size in (4, 3, 2, 1)}
        for worker in workers:
            while (said := worker.message(100)) != "waiting":
                if isinstance(said, tuple):
                    learned[said[0]].append(said[1])

        def until(workers_now: int, step: int = 0) -> None:
            while True:
                said = workers[0].message(60)
                if isinstance(said, tuple) and said[0] >= step and said[1] == workers_now:
                    return

        for slot in (0, 1):
            workers[slot].send("enter")
        until(2, step=3)
        workers[2].send("enter")
        until(3)
        boards[""].ask_to_leave(1)
        until(2)
        workers[3].send("enter")
        until(3)
        Path(f"{board}.hurry").touch()
        learned["changing"] = [_told(workers[slot], "changing") for slot in (0, 2, 3)]
        assert workers[1].wait(60) == 0
    alone = exact_fleet.learn(AloneWorld())
    assert alone["trained"]
    for size, results in learned.items():
        assert len(results) == (3 if size == "changing" else size)
        for result in results:
            assert result["samples"] == alone["samples"] == 3 * exact_fleet.SAMPLES
            assert (result["weights"], result["momentum"]) == (alone["weights"], alone["momentum"])
        if size != "changing":
            assert {tuple(set(r["members"])) for r in results} == {(size,)}
    sizes = [size for size, _ in itertools.groupby(learned["changing"][0]["members"])]
    assert sizes[-4:] == [2, 3, 2, 3]


def _told(worker: Child, name: str) -> dict[str, Any]:
    """What a worker says of the fleet ``name``, skipping its steps."""
    while True:
        said = worker.message(60)
        if isinstance(said, tuple) and said[0] == name:
            return said[1]
