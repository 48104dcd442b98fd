"""Time without progress at changes of membership: kills, joins, planned leaves, a coordinator's restart.

Three workers under ``shoal run`` with the defaults that users get train without an end
(``endless_worker.py``); the times are those of their commits.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic_launches import (
    environment,
    loopback_bytes_per_second,
    set_pause,
    shoal_run,
)
from benchmarks.elastic_torchrun import Torchrun
from benchmarks.pairing import Row, bounded, measured, paired
from benchmarks.step_worker import LAYERS
from shoal.world.elastic.ranking import rank_order

HERE = Path(__file__).parent
# Its gradients are 1.4 MB; half of a step on two cores is their reduction.
KILL_SIZE = "351k"


class Tail:
    """The rows of a growing journal; each look reads only what is new, so that it disturbs nobody."""

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], Any]) -> None:
        self._path = path
        self._make = make
        self._at = 0
        self._rows: list[Any] = []

    def rows(self) -> list[Any]:
        """What ``make`` made of every complete row so far; the same list each time."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._at += len(whole)
            self._rows += [self._make(json.loads(line)) for line in whole.splitlines()]
        return self._rows


def _commit(row: dict[str, Any]) -> tuple[float, int]:
    return row["time"], row["workers"]


class Watched:
    """A running fleet that is disturbed, and its workers' times of commit."""

    def __init__(self, directory: Path, workers: int, size: str = "13k") -> None:
        self.directory = directory
        self.workers = workers
        self.place = directory.with_name(f"{directory.name}-signals")
        self.place.mkdir()
        self._tails: dict[str, Tail] = {}
        self.process = shoal_run(
            str(HERE / "endless_worker.py"),
            directory=directory,
            workers=workers,
            variables={"SHOAL_BENCH_SIZE": size, "SHOAL_BENCH_PLACE": str(self.place)},
        )
        self.wait_for(workers)

    def pause(self, paused: bool) -> None:
        """Let the workers stand still, or go on."""
        set_pause(self.place, paused)

    def pids(self) -> dict[str, int]:
        """Live workers and their processes, newest information from the event journal."""
        alive: dict[str, int] = {}
        for row in self.events():
            if row["kind"] == "worker_started":
                alive[row["worker"]] = row["pid"]
            elif row["kind"] == "worker_exited":
                alive.pop(row["worker"], None)
        return alive

    def events(self) -> list[dict[str, Any]]:
        """The run's events so far."""
        return self._tail("events.jsonl").rows()

    def commits(self, name: str) -> list[tuple[float, int]]:
        """(time, workers) of every commit of one worker."""
        return self._tail(f"metrics/{name}.jsonl").rows()

    def _tail(self, name: str) -> Tail:
        if name not in self._tails:
            path = self.directory / name
            self._tails[name] = Tail(path, dict if name == "events.jsonl" else _commit)
        return self._tails[name]

    def wait_for(self, workers: int, seconds: float = 90.0) -> None:
        """Until every live worker's last commit had ``workers`` members."""
        limit = time.time() + seconds
        while time.time() < limit:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended; see {self.directory}/logs")
            last = [self.commits(name)[-1:] for name in self.pids()]
            fresh = [c for c in last if c and c[0][1] == workers and time.time() - c[0][0] < 1.0]
            if len(fresh) == workers:
                return
            time.sleep(0.1)
        raise RuntimeError(f"no {workers} workers within {seconds:.0f} s; see {self.directory}")

    def next_commit(self, name: str, after: float, below: int | None = None) -> float | None:
        """Time of the first commit of ``name`` after ``after``, by fewer than ``below`` workers if given."""
        commits = self.commits(name)
        for at in range(bisect.bisect_right(commits, (after, 0)), len(commits)):
            if below is None or commits[at][1] < below:
                return commits[at][0]
        return None

    def gap(
        self, survivors: Sequence[str], since: float, below: int | None = None, settle: float = 4.0
    ) -> float:
        """Longest time from ``since`` to a survivor's next commit (see :meth:`next_commit`)."""
        limit = time.time() + settle + 20
        while time.time() < limit:
            nexts = [self.next_commit(name, since, below) for name in survivors]
            if all(t is not None for t in nexts):
                return max(t - since for t in nexts if t is not None)
            time.sleep(0.05)
        raise RuntimeError(f"survivors {survivors} made no commit; see {self.directory}/logs")

    def step_seconds(self) -> float:
        """Median time between commits of the first worker."""
        times: list[float] = []
        while len(times) < 200:
            times = [t for t, _ in self.commits(next(iter(self.pids())))][-500:]
            time.sleep(0.1)
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def kill(self, name: str) -> float:
        """SIGKILL wherever the worker is; when that was."""
        since = time.time()
        os.kill(self.pids()[name], signal.SIGKILL)
        return since

    def kill_in_reduction(self, name: str, seconds: float = 20.0) -> float:
        """SIGKILL between the launch of a reduction and the wait for it; when that was."""
        (self.place / f"kill-{name}").touch()
        killed = self.place / f"killed-{name}"
        limit = time.time() + seconds
        while not killed.exists() or not killed.read_text():
            if time.time() > limit:
                raise RuntimeError(f"{name} did not come to a reduction; see {self.directory}/logs")
            time.sleep(0.002)
        return float(killed.read_text())

    def changes(self, before: int, after: int) -> list[dict[str, float]]:
        """What workers measured of changes from one size to another, oldest first."""
        rows = [
            json.loads(line)
            for path in self.place.glob("changes-*.jsonl")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        found = [row for row in rows if (row["before"], row["after"]) == (before, after)]
        return sorted(found, key=lambda row: row["time"])

    def names(self) -> list[str]:
        """Live workers in rank order; the first owns the store at which the group met."""
        return sorted(self.pids(), key=rank_order)

    def stop(self) -> None:
        """End the run in order."""
        self.pause(False)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


# -- kills and joins -----------------------------------------------------------------------------------

KINDS = ("random", "mid_reduction", "store_owner")


def kill_and_join_rows(out: Path, *, kills: int, pairs: int) -> list[Row]:
    """SIGKILLs, a third of each kind; the replacements' joins; and some beside torchrun's."""
    fleet = Watched(out / "kills", 3, KILL_SIZE)
    peer = None
    rng = random.Random(7)
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ours: list[float] = []
    theirs: list[float] = []
    try:
        for i in range(kills):
            time.sleep(rng.uniform(0.2, 0.7))
            kind = KINDS[i % len(KINDS)]
            gaps[kind].append(_kill(fleet, kind, i // len(KINDS), rng))
            fleet.wait_for(3)
        step = fleet.step_seconds()
        joins = join_rows(fleet, step)
        if pairs:
            fleet.pause(True)
            peer = Torchrun(out / "torchrun", 3, KILL_SIZE)
            ours, theirs = _pairs_with(peer, fleet, pairs, rng)
        restarts = _restarts(fleet)
    finally:
        fleet.stop()
        if peer is not None:
            peer.stop()
    unit = "seconds to the survivors' next commit"
    every = [gap for kind in KINDS for gap in gaps[kind]]
    note = f"{restarts} restarts of survivors; median step {step * 1e3:.1f} ms"
    rows = [measured("kill_gap", unit, every, note)]
    rows += [measured(f"kill_gap_{kind}", unit, gaps[kind]) for kind in KINDS if gaps[kind]]
    if theirs:
        rows.append(
            paired(
                "kill_gap_torchrun",
                "seconds from a kill to the next optimizer step",
                ours,
                theirs,
                peer="torchrun --standalone --max-restarts, DDP on gloo, nothing kept",
                note="three workers each; one side rests while the other is killed",
            )
        )
    return rows + joins


def _pairs_with(
    peer: Torchrun, fleet: Watched, pairs: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Kill one worker here and one there, in turn; the side that is not measured stands still."""
    ours, theirs = [], []
    for i in range(pairs):
        peer.pause(True)
        fleet.pause(False)
        fleet.wait_for(3)
        time.sleep(rng.uniform(0.2, 0.7))
        ours.append(_kill(fleet, "random", i, rng))
        fleet.wait_for(3)
        fleet.pause(True)
        peer.pause(False)
        time.sleep(rng.uniform(0.7, 1.2))
        theirs.append(peer.kill(i % 3))
    return ours, theirs


def _kill(fleet: Watched, kind: str, number: int, rng: random.Random) -> float:
    """Kill one worker and wait for the others' next commits; a step it had a part in does not count."""
    names = fleet.names()
    if kind == "mid_reduction":
        victim = names[number % len(names)]
        since = fleet.kill_in_reduction(victim)
    else:
        victim = names[0] if kind == "store_owner" else rng.choice(names[1:])
        since = fleet.kill(victim)
    return fleet.gap([name for name in names if name != victim], since, below=len(names))


def join_rows(fleet: Watched, step: float) -> list[Row]:
    """The stall of each join against its bound.

    The bound is two steps, the reconfiguration (what the members that were there spent in ``start_step``:
    the quorum, and the connections) and the state's bytes over the loopback's measured bandwidth.
    """
    speed = loopback_bytes_per_second()
    size = state_bytes(KILL_SIZE)
    measured_changes = fleet.changes(2, 3)
    stalls, bounds = [], []
    for row in fleet.events():
        if row["kind"] != "join" or (row["workers_before"], row["workers_after"]) != (2, 3):
            continue
        near = [c["seconds"] for c in measured_changes if abs(c["time"] - row["time"]) < 2.0]
        if near:
            stalls.append(row["seconds_without_progress"])
            bounds.append(2 * step + max(near) + size / speed)
    if not stalls:
        return []
    note = f"two steps of {step * 1e3:.1f} ms, the reconfiguration, {size / 2**20:.1f} MiB at "
    note += f"{speed / 2**30:.2f} GiB/s"
    return [bounded("join_stall", "seconds without a commit at a join", stalls, bounds, note)]


def state_bytes(size: str) -> int:
    """Weights and momentum of a perceptron of ``step_worker.LAYERS``, in float32."""
    layers = LAYERS[size]
    return 2 * 4 * sum(a * b + b for a, b in itertools.pairwise(layers))


# -- leaves and the coordinator ---------------------------------------------------------------------


def leave_rows(out: Path, *, leaves: int) -> list[Row]:
    """Planned leaves by ``shoal resize``: what the others wait, in steps."""
    fleet = Watched(out / "leaves", 3)
    waits, steps = [], []
    try:
        for _ in range(leaves):
            step = fleet.step_seconds()
            _resize(fleet.directory, 2)
            fleet.wait_for(2)
            row = [r for r in fleet.events() if r["kind"] == "leave"][-1]
            waits.append(row["seconds_without_progress"])
            steps.append(row["seconds_without_progress"] / step)
            _resize(fleet.directory, 3)
            fleet.wait_for(3)
    finally:
        fleet.stop()
    return [
        measured("leave_gap", "seconds without a commit at a planned leave", waits),
        measured("leave_gap_steps", "the same in median steps; no step is lost", steps),
    ]


def coordinator_rows(out: Path, *, times: int) -> list[Row]:
    """The coordinator and a worker are killed together: from its return to the next commit."""
    fleet = Watched(out / "coordinator", 3)
    back = []
    try:
        for _ in range(times):
            pids = fleet.pids()
            victim = fleet.names()[-1]
            lighthouse = _coordinator_pid(fleet.process.pid)
            os.kill(lighthouse, signal.SIGKILL)
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.time()
            survivors = [name for name in pids if name != victim]
            fleet.gap(survivors, killed + 0.02, settle=30)
            returned = [
                r["time"]
                for r in fleet.events()
                if r["kind"] == "coordinator_restarted" and r["time"] > killed
            ]
            since = returned[0] if returned else killed
            nexts = [fleet.next_commit(name, killed + 0.02) or killed for name in survivors]
            back.append(max(0.0, max(nexts) - since))
            fleet.wait_for(3)
    finally:
        fleet.stop()
    return [measured("coordinator_restart", "seconds from its return to the next commit", back)]


# -- parts --------------------------------------------------------------------------------------------


def _resize(directory: Path, workers: int) -> None:
    command = [sys.executable, "-m", "shoal", "resize", str(directory), str(workers)]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)


def _restarts(fleet: Watched) -> int:
    """Workers that ended without having been killed by us."""
    ended = [row for row in fleet.events() if row["kind"] == "worker_exited"]
    return sum(row.get("code") != -signal.SIGKILL for row in ended)


def _coordinator_pid(supervisor: int) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for child in children:
        if b"coordinator" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise RuntimeError("the supervisor has no coordinator process")
