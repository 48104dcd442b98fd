"""Real workers that come, leave, hang and are killed, with a real lighthouse."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lighthouse import Lighthouse
from toy import FAST, rows, train

from shoal.testing.links import Board
from shoal.testing.processes import Child, Herd

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
SLOTS = 40


class Fleet:
    """A lighthouse, a board, and workers that are started and watched."""

    def __init__(self, directory: Path, herd: Herd):
        self.directory = directory
        self.herd = herd
        self.lighthouse = Lighthouse(herd)
        self.board = Board.create(
            directory / "board", workers=SLOTS, coordinator=self.lighthouse.address
        )
        self.workers: dict[str, Child] = {}

    def start(self, **options: Any) -> Child:
        """One more worker; options as for ``toy.train``."""
        slot = len(self.workers)
        child = self.herd.start(train, self.directory, slot, name=f"w{slot}", **options)
        self.workers[child.name] = child
        child.message(60)
        return child

    def shut(self) -> None:
        """Shut the start barrier: workers started from now on wait for each other."""
        self.board.ready = False

    def open(self) -> None:
        """Open the barrier when all workers have come to it."""
        deadline = time.monotonic() + 60
        while self.board.arrived < len(self.workers):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.board.ready = True

    def kill(self, child: Child) -> float:
        """SIGKILL a worker, and tell the others' links as a supervisor does; when it was."""
        at = time.monotonic()
        child.kill()
        self.board.mark_dead(int(child.name[1:]))
        return at

    def died(self, child: Child) -> None:
        """A worker that kills itself: wait for it, and tell the others' links."""
        assert child.wait(60) < 0
        self.board.mark_dead(int(child.name[1:]))

    def until(self, child: Child, condition: Callable[[dict], bool], timeout: float = 80) -> dict:
        """Wait for a row in what a worker writes."""
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            written = rows(self.directory, child.name)
            for row in written[seen:]:
                if condition(row):
                    return row
            seen = len(written)
            ended = child.exitcode is not None
            assert not ended, f"{child.name} ended with {child.exitcode}:\n{child.log[-3000:]}"
            assert time.monotonic() < deadline, f"{child.name}:\n{child.log[-3000:]}"
            time.sleep(0.005)

    def until_width(self, child: Child, workers: int, beyond: int = 0) -> dict:
        """Wait for a commit of ``workers`` workers with more than ``beyond`` commits."""
        return self.until(
            child, lambda row: row.get("workers") == workers and row["commits"] > beyond
        )

    def commits(self, child: Child) -> int:
        """Newest commit a worker wrote."""
        return max(row["commits"] for row in rows(self.directory, child.name) if "commits" in row)

    def results(self, *children: Child) -> list[dict]:
        """What workers returned; all have one and the same state."""
        found = [child.result(60) for child in children]
        assert len({(r["hash"], r["commits"]) for r in found if not r["left"]}) <= 1, found
        return found

    def finish(self, *children: Child) -> list[dict]:
        """Let workers leave, some perhaps a step before the others; what they returned."""
        for child in children:
            child.terminate()
        found = [child.result(60) for child in children]
        assert all(result["left"] for result in found)
        assert len({(r["commits"], r["hash"]) for r in found}) == len({r["commits"] for r in found})
        return found

    def changes(self, child: Child) -> list[list]:
        """The changes of membership a worker saw."""
        return [row["change"] for row in rows(self.directory, child.name) if "change" in row]

    def agree(self) -> None:
        """Wherever two workers committed the same step of one lineage, their states were equal.

        Those of a lineage that died out with its workers are compared like all others.
        """
        hashes: dict[tuple, str] = {}
        compared = 0
        for name in self.workers:
            for row in rows(self.directory, name):
                if row.get("hash"):
                    key = (row["commits"], row["lineage"])
                    assert hashes.setdefault(key, row["hash"]) == row["hash"], (name, row)
                    compared += 1
        assert compared > len(hashes)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Herd(tmp_path) as herd:
        yield Fleet(tmp_path, herd)


def test_a_fleet_grows_from_one_to_three_with_equal_states(fleet: Fleet) -> None:
    first = fleet.start(until=10**6)
    fleet.until_width(first, 1)
    second = fleet.start(until=10**6)
    fleet.until_width(first, 2)
    third = fleet.start(until=10**6)
    fleet.until_width(first, 3)
    results = fleet.finish(first, second, third)
    assert [r["bootstraps"] for r in results] == [1, 0, 0]
    assert [r["restores"] for r in results] == [0, 1, 1]
    # Nobody's step failed because somebody came.
    assert [r["failures"] for r in results] == [0, 0, 0]
    assert fleet.changes(first)[:2] == [["join", 1, 2], ["join", 2, 3]]
    assert not [change for change in fleet.changes(third) if change[0] == "join"]
    fleet.agree()


def test_workers_that_start_together_start_one_run(fleet: Fleet, tmp_path: Path) -> None:
    fleet.shut()
    workers = [fleet.start(until=300, offer=offer) for offer in (-1, 7, 7)]
    fleet.open()
    results = fleet.results(*workers)
    assert [r["bootstraps"] for r in results] == [0, 1, 0], "the newest checkpoint, smallest name"
    assert results[0]["commits"] == 7 + 100
    assert all(row["workers"] == 3 for row in rows(tmp_path, "w0") if "commits" in row)


@pytest.mark.parametrize("victim", [0, 2], ids=["the owner of the store", "another"])
@pytest.mark.parametrize("place", ["started", "drawn", "reducing", "reduced"])
def test_a_worker_killed_at_any_place_of_a_step(fleet: Fleet, victim: int, place: str) -> None:
    options = [{"die_at": (place, 40)} if slot == victim else {} for slot in range(3)]
    fleet.shut()
    workers = [fleet.start(until=260, **option) for option in options]
    fleet.open()
    fleet.died(workers[victim])
    survivors = [worker for worker in workers if worker is not workers[victim]]
    fleet.results(*survivors)
    assert ["kill", 3, 2] in fleet.changes(survivors[0]) + fleet.changes(survivors[1])
    fleet.agree()


def test_kills_at_random_moments_and_replacements(fleet: Fleet) -> None:
    """Rounds of SIGKILL, the store's owner among the victims; nobody else restarts or diverges."""
    chance = random.Random(20261130)
    fleet.shut()
    alive = [fleet.start(until=10**6) for _ in range(3)]
    fleet.open()
    for round_number in range(6):
        fleet.until_width(alive[0], 3, beyond=0 if not round_number else fleet.commits(alive[0]))
        time.sleep(chance.uniform(0.0, 0.1))
        # The smallest name owns the store: every second round it is the victim.
        victim = alive.pop(0 if round_number % 2 == 0 else 2)
        fleet.kill(victim)
        before = max(fleet.commits(worker) for worker in alive)
        fleet.until_width(alive[0], 2, beyond=before)
        alive.append(fleet.start(until=10**6))
    fleet.until_width(alive[0], 3, beyond=fleet.commits(alive[0]))
    fleet.finish(*alive)
    fleet.agree()


def test_children_of_a_killed_worker_do_not_keep_its_connections(fleet: Fleet) -> None:
    """A loader's worker, forked in the middle of training, outlives its parent here."""
    from shoal.world.elastic.timing import Timing

    # Nothing but the closed connection can tell the survivor within the time of this test.
    timing = Timing(silent_peer_seconds=300.0, exchange_floor_seconds=300.0)
    fleet.shut()
    workers = [
        fleet.start(until=300, timing=timing, fork_at=20 if slot == 0 else -2) for slot in range(2)
    ]
    fleet.open()
    _, child = workers[0].message(30)
    try:
        fleet.until_width(workers[1], 2, beyond=25)
        fleet.kill(workers[0])
        os.kill(child, 0)
        fleet.results(workers[1])
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_of_three_killed_at_once(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=600) for _ in range(3)]
    fleet.open()
    fleet.until_width(workers[1], 3, beyond=20)
    fleet.kill(workers[0])
    fleet.kill(workers[2])
    fleet.results(workers[1])
    assert any(row.get("workers") == 1 for row in rows(fleet.directory, "w1"))


def test_a_planned_leave_fails_no_step_and_needs_no_quorum(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=900) for _ in range(4)]
    fleet.open()
    fleet.until_width(workers[0], 4, beyond=10)
    workers[0].terminate()
    fleet.until_width(workers[1], 3)
    # While the leaver's heartbeat has not expired, the next one leaves: from four to two.
    fleet.board.ask_to_leave(2)
    fleet.until_width(workers[1], 2)
    results = [worker.result(60) for worker in workers]
    assert [r["left"] for r in results] == [True, False, True, False]
    assert [r["failures"] for r in results] == [0, 0, 0, 0]
    assert results[1]["hash"] == results[3]["hash"]
    assert fleet.changes(workers[1]) == [["leave", 4, 3], ["leave", 3, 2]]
    assert "quorum" not in workers[1].log.split("w1 shoal", 2)[-1]
    fleet.agree()


def test_all_leave_together(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=10**6) for _ in range(3)]
    fleet.open()
    fleet.until_width(workers[0], 3, beyond=10)
    fleet.finish(*workers)


def test_a_kill_in_the_very_step_of_a_leave(fleet: Fleet) -> None:
    """The local shrink meets a dead member; a quorum takes over."""
    fleet.shut()
    workers = [
        fleet.start(until=400, die_at=("started", 60)) if slot == 1 else fleet.start(until=400)
        for slot in range(4)
    ]
    fleet.board.ask_to_leave(3)
    fleet.open()
    # The leave is in the first exchange; a death at each later place of a step was tested above.
    results = fleet.results(workers[0], workers[2])
    fleet.died(workers[1])
    assert workers[3].result(30)["left"]
    assert fleet.changes(workers[0]) == [["leave", 4, 3], ["kill", 3, 2]]
    assert all(result["commits"] == results[0]["commits"] for result in results)
    fleet.agree()


def test_a_survivor_dies_between_the_leave_and_the_local_shrink(fleet: Fleet) -> None:
    fleet.shut()
    workers = [
        fleet.start(until=600, die_after_leave=slot == 1) if slot == 1 else fleet.start(until=600)
        for slot in range(4)
    ]
    fleet.open()
    fleet.until_width(workers[0], 4, beyond=10)
    fleet.board.ask_to_leave(3)
    fleet.died(workers[1])
    fleet.results(workers[0], workers[2])
    assert workers[3].result(30)["left"]
    assert fleet.changes(workers[0]) == [["leave", 4, 3], ["kill", 3, 2]]
    fleet.agree()


def test_a_failure_seen_by_one_member_only(fleet: Fleet) -> None:
    """Two commit and one does not: it adopts what they committed, and nothing is used twice."""
    fleet.shut()
    workers = [fleet.start(until=300, fail_at=50 if slot == 1 else -1) for slot in range(3)]
    fleet.open()
    results = fleet.results(*workers)
    assert results[1]["restores"] == 2, "once at the start, once after its failure"
    assert max(result["failures"] for result in results) >= 1
    assert fleet.changes(workers[0]) == [], "nobody was put out of the fleet"
    fleet.agree()


def test_the_coordinator_is_killed_and_comes_back(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=10**6) for _ in range(2)]
    fleet.open()
    fleet.until_width(workers[0], 2, beyond=10)
    fleet.lighthouse.kill()
    # Steps do not notice it, periodic quorums included.
    before = fleet.commits(workers[0])
    fleet.until_width(workers[0], 2, beyond=before + 150)
    # Nobody can be let in or put out until it is back.
    fleet.kill(workers[1])
    joiner = fleet.start(until=10**6)
    time.sleep(0.5)
    fleet.lighthouse.start()
    alone_or_not = fleet.until(workers[0], lambda row: "change" in row)
    assert alone_or_not["change"][:2] == ["kill", 2]
    fleet.until_width(workers[0], 2, beyond=fleet.commits(workers[0]))
    assert fleet.finish(workers[0], joiner)[0]["restores"] == 0
    fleet.agree()


def test_the_coordinator_dies_while_a_quorum_is_wanted(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=10**6) for _ in range(3)]
    fleet.open()
    fleet.until_width(workers[0], 3, beyond=10)
    fleet.kill(workers[2])
    fleet.lighthouse.kill()
    time.sleep(0.3)
    fleet.lighthouse.start()
    fleet.until_width(workers[0], 2)
    # Both survivors are in the first membership after its return.
    assert fleet.changes(workers[0]) == [["kill", 3, 2]]
    assert fleet.changes(workers[1]) == [["kill", 3, 2]]
    fleet.finish(*workers[:2])
    fleet.agree()


def test_a_joiner_that_dies_while_it_is_healed(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=800) for _ in range(2)]
    fleet.open()
    fleet.until_width(workers[0], 2, beyond=10)
    fleet.died(fleet.start(until=800, die_while_healing=True))
    fleet.results(*workers)
    fleet.agree()


def test_a_source_that_dies_while_it_serves(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=800, die_serving=slot == 0) for slot in range(2)]
    fleet.open()
    # w0 starts the run, and dies when it is asked for its state the second time: by the joiner.
    fleet.until_width(workers[1], 2, beyond=10)
    joiner = fleet.start(until=800)
    fleet.died(workers[0])
    fleet.results(workers[1], joiner)
    assert ["kill", 3, 2] in fleet.changes(workers[1])
    fleet.agree()


def test_a_joiner_that_dies_while_it_connects(fleet: Fleet) -> None:
    """The others do not sit out the time limit of connecting, which is longer than this test."""
    from shoal.world.elastic.timing import Timing

    timing = Timing(form_seconds=300.0, knock_seconds=0.4, probe_seconds=0.1)
    fleet.shut()
    workers = [fleet.start(until=800, timing=timing) for _ in range(2)]
    fleet.open()
    fleet.until_width(workers[0], 2, beyond=10)
    fleet.died(fleet.start(until=800, timing=timing, die_connecting=True))
    fleet.results(*workers)
    assert "asking again" in workers[0].log + workers[1].log
    fleet.agree()


def test_a_member_slower_than_the_time_limit_is_waited_for_in_the_end(fleet: Fleet) -> None:
    from shoal.world.elastic.timing import Timing

    timing = Timing(exchange_floor_seconds=0.4, exchange_factor=1.0, knock_seconds=0.4)
    fleet.shut()
    workers = [
        fleet.start(until=300, timing=timing, slow=(30, 32, 1.0) if slot == 1 else (0, 0, 0.0))
        for slot in range(2)
    ]
    fleet.open()
    results = fleet.results(*workers)
    assert results[0]["failures"] >= 1
    assert "an exchange ran out of time" in workers[0].log
    assert fleet.changes(workers[0]) == [], "being slow is no reason to be put out"


def test_a_hung_worker_stops_the_others_until_it_is_killed(fleet: Fleet) -> None:
    """Its heartbeats go on and it answers; that it makes no progress, the supervisor sees."""
    fleet.shut()
    workers = [fleet.start(until=500, hang_at=40 if slot == 1 else -2) for slot in range(3)]
    fleet.open()
    fleet.until(workers[0], lambda row: row.get("commits") == 40)
    time.sleep(2.5)
    assert fleet.commits(workers[0]) == 40
    assert not any("failed" in row for row in rows(fleet.directory, "w0"))
    fleet.kill(workers[1])
    fleet.results(workers[0], workers[2])
    fleet.agree()


def test_of_those_that_trained_apart_the_majority_counts(fleet: Fleet) -> None:
    fleet.shut()
    stands = [(5, "apart"), (5, "together"), (5, "together"), (4, "together")]
    workers = [fleet.start(until=300, stands_at=at) for at in stands]
    fleet.open()
    results = fleet.results(*workers)
    assert [result["restores"] for result in results] == [1, 0, 0, 1]


def test_when_the_last_one_is_dead_a_newcomer_resumes_from_a_checkpoint(fleet: Fleet) -> None:
    first = fleet.start(until=10**6)
    fleet.until_width(first, 1, beyond=10)
    fleet.kill(first)
    second = fleet.start(until=10**6, offer=5)
    fleet.until_width(second, 1)
    third = fleet.start(until=10**6, offer=3)
    fleet.until_width(second, 2)
    fleet.until_width(second, 2, beyond=fleet.commits(second) + 25)
    results = fleet.finish(second, third)
    assert [result["bootstraps"] for result in results] == [1, 0]
    fleet.agree()


def test_joiners_at_once_never_split_the_fleet(fleet: Fleet) -> None:
    first = fleet.start(until=500, pause_seconds=0.02)
    fleet.until_width(first, 1, beyond=3)
    others = [fleet.start(until=500, pause_seconds=0.02) for _ in range(3)]
    fleet.until_width(first, 4)
    results = fleet.results(first, *others)
    assert [result["bootstraps"] for result in results] == [1, 0, 0, 0]


def test_blank_workers_do_not_start_a_run_beside_a_slow_one(fleet: Fleet) -> None:
    """The trained worker is suspended: two joiners wait for it rather than begin anew."""
    first = fleet.start(until=800)
    fleet.until_width(first, 1, beyond=10)
    first.suspend()
    others = [fleet.start(until=800) for _ in range(2)]
    time.sleep(1.5)
    assert not any(rows(fleet.directory, other.name) for other in others)
    first.proceed()
    results = fleet.results(first, *others)
    assert [result["bootstraps"] for result in results] == [1, 0, 0]


def test_a_suspended_worker_is_put_out_and_comes_back(fleet: Fleet) -> None:
    """After its return it lags behind, with a state of its own: it takes the others'."""
    fleet.shut()
    workers = [fleet.start(until=10**6) for _ in range(3)]
    fleet.open()
    fleet.until_width(workers[0], 3, beyond=10)
    workers[2].suspend()
    fleet.until_width(workers[0], 2)
    workers[2].proceed()
    fleet.until_width(workers[0], 3, beyond=fleet.commits(workers[0]))
    results = fleet.finish(*workers)
    assert results[2]["restores"] == 2
    fleet.agree()


def test_nobody_is_let_in_during_an_evaluation(fleet: Fleet) -> None:
    fleet.shut()
    options = {"until": 900, "evaluate_from": 20, "evaluate_until": 200}
    workers = [
        fleet.start(**options, die_at=("drawn", 120) if slot == 2 else ()) for slot in range(3)
    ]
    fleet.open()
    fleet.until_width(workers[0], 3, beyond=30)
    joiner = fleet.start(until=900)
    fleet.died(workers[2])
    results = fleet.results(workers[0], workers[1], joiner)
    widths = [
        (row["commits"], row["workers"]) for row in rows(fleet.directory, "w0") if "commits" in row
    ]
    # A death in an evaluation narrows it; the joiner is let in with the first training step.
    assert {workers for commits, workers in widths if 21 < commits <= 120} == {3}
    assert {workers for commits, workers in widths if 121 < commits <= 200} == {2}
    assert {workers for commits, workers in widths if commits > 260} == {3}
    assert results[2]["restores"] == 1
    fleet.agree()


def test_below_the_minimum_the_fleet_waits_then_stops(fleet: Fleet) -> None:
    from shoal.world.elastic.timing import Timing

    patient = Timing(patience_seconds=8.0, knock_seconds=0.3, probe_seconds=0.1)
    fleet.shut()
    workers = [fleet.start(until=10**6, min_workers=2, timing=patient) for _ in range(2)]
    fleet.open()
    fleet.until_width(workers[0], 2, beyond=10)
    fleet.kill(workers[1])
    time.sleep(0.5)
    replacement = fleet.start(until=10**6, min_workers=2, timing=patient)
    fleet.until_width(replacement, 2)
    assert 1 not in {row.get("workers") for row in rows(fleet.directory, "w0")}
    fleet.kill(replacement)
    assert workers[0].wait(30) == 1
    assert "ResumableStop" in workers[0].log
    assert "1 of at least 2 workers" in workers[0].log


def test_a_newcomer_of_other_versions_gives_up_and_the_fleet_goes_on(fleet: Fleet) -> None:
    fleet.shut()
    workers = [fleet.start(until=10**6) for _ in range(2)]
    fleet.open()
    fleet.until_width(workers[0], 2)
    # The second runs files that were edited after the others had started: Gloo would abort a member.
    pretended = ({"torchft": "0.1.9"}, {"shoal source": "00000000"})
    others = [fleet.start(until=10**6, pretend=pretend) for pretend in pretended]
    for slot, (other, pretend) in enumerate(zip(others, pretended, strict=True), start=2):
        assert other.wait(30) == 1
        assert "UsageError" in other.log
        assert "'w0' runs" in other.log and f"'w{slot}' runs" in other.log
        assert all(f"{name} {version}" in other.log for name, version in pretend.items())
        fleet.board.mark_dead(slot)
    fleet.until_width(workers[0], 2, beyond=fleet.commits(workers[0]))
    assert fleet.changes(workers[0]) == []
    fleet.finish(*workers)


def test_a_joiner_waits_for_a_slow_fleet_longer_than_its_patience(fleet: Fleet) -> None:
    """A step (or an evaluation) may take as long as it likes; the joiner obeys a leave meanwhile."""
    impatient = replace(FAST, patience_seconds=0.7)
    first = fleet.start(until=100, slow=(5, 6, 4.0))
    fleet.until(first, lambda row: row.get("commits") == 5)
    second, third = (fleet.start(until=100, timing=impatient) for _ in range(2))
    time.sleep(1.5)
    third.signal(signal.SIGTERM)
    assert third.wait(20) == 1
    assert "asked to leave while waiting" in third.log
    fleet.board.mark_dead(2)
    results = fleet.results(first, second)
    assert [result["bootstraps"] for result in results] == [1, 0]


@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_hangs_up_before_all_are_done_with_the_last_exchange(
    fleet: Fleet, leaves: bool
) -> None:
    """One is slow to notice that the last exchange is over; those that were faster wait for it."""
    fleet.shut()
    last = 30
    until = 10**6 if leaves else 3 * last
    workers = [
        fleet.start(
            until=until,
            timing=replace(FAST, linger_seconds=20.0),
            late_at=(last - 1, 0.4) if slot == 1 else (-2, 0.0),
            leave_at=last - 1 if leaves and slot == 2 else -2,
        )
        for slot in range(3)
    ]
    fleet.open()
    if leaves:
        assert workers[2].result(30)["left"]
        fleet.until_width(workers[0], 2, beyond=last)
        results = fleet.finish(*workers[:2])
    else:
        results = fleet.results(*workers)
        assert len({result["lineage"] for result in results}) == 1
    assert results[1]["connected"] == [True]
    assert [result["failures"] for result in results] == [0] * len(results)


def test_many_short_runs_end_with_one_lineage(fleet: Fleet) -> None:
    """Three workers that end, each for itself, right after the last exchange."""
    fleet.shut()
    for round_number in range(6):
        fleet.board.ready = False
        workers = [
            fleet.start(until=12, pause_seconds=0.0 if slot == round_number % 3 else 0.001)
            for slot in range(3)
        ]
        fleet.open()
        results = fleet.results(*workers)
        assert len({result["lineage"] for result in results}) == 1
        assert [result["failures"] for result in results] == [0, 0, 0]


def test_names_are_those_of_the_links(fleet: Fleet) -> None:
    worker = fleet.start(until=30)
    result = worker.result(30)
    assert result["name"] == "w0"
    assert list(itertools.islice((r["commits"] for r in rows(fleet.directory, "w0")), 2)) == [1, 2]


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [
        (1, 12),
        *(
            pytest.param(seed, 60, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])
            for seed in range(2, 7)
        ),
    ],
)
def test_a_storm(fleet: Fleet, seed: int, rounds: int) -> None:
    """Joins, leaves, kills (sometimes two at once) and coordinator restarts in random order.

    What must hold is in the states: every worker that ends checks that it used each position once.
    """
    chance = random.Random(seed)
    alive = [fleet.start(until=10**6) for _ in range(2)]
    for _ in range(rounds):
        actions = ["join"] * (len(alive) < 4) + ["kill", "leave"] * (len(alive) > 1)
        actions += ["kill two"] * (len(alive) > 2) + ["kill and join"] + ["coordinator"]
        action = chance.choice(actions)
        keep = alive[0] if len(alive) == 1 else None
        victims = [worker for worker in alive if worker is not keep]
        chance.shuffle(victims)
        if action in ("join", "kill and join"):
            alive.append(fleet.start(until=10**6))
        if action in ("kill", "kill and join", "kill two"):
            for victim in victims[: 2 if action == "kill two" else 1]:
                fleet.kill(victim)
                alive.remove(victim)
        if action == "leave":
            victims[0].terminate()
            alive.remove(victims[0])
            assert victims[0].result(40)["left"]
        if action == "coordinator":
            fleet.lighthouse.kill()
            time.sleep(chance.uniform(0.0, 0.4))
            fleet.lighthouse.start()
        time.sleep(chance.uniform(0.0, 0.2))
        # All that should be there come together, and go on.
        after = max((fleet.commits(w) for w in alive if rows(fleet.directory, w.name)), default=0)
        for worker in alive:
            fleet.until_width(worker, len(alive), beyond=after)
    fleet.finish(*alive)
    fleet.agree()
