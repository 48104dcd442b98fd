"""What elasticity costs: step time against plain DDP, and time without progress at every kind of change.

    python -m benchmarks elastic [--json] [--rows step,kill,leave,join,coordinator,memory] [--quick]

Everything runs on loopback with the defaults that users of ``shoal run`` get.
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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.order import run as order_rows
from benchmarks.pairing import Row, measured, paired

HERE = Path(__file__).parent
SIZES = ("13k", "351k", "3m")
GROUPS = ("step", "memory", "kill", "leave", "join", "coordinator", "order")


def environment() -> dict[str, str]:
    """One thread per process on both sides."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn"}


def shoal_run(*arguments: str, directory: Path, workers: int) -> subprocess.Popen[bytes]:
    """Start ``shoal run`` on a benchmark's worker."""
    command = [sys.executable, "-m", "shoal", "run", "--workers", str(workers)]
    command += ["--run-dir", str(directory), *arguments]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


# -- (a) step time and (e) memory ---------------------------------------------------------------------


def step_rows(out: Path, *, pairs: int) -> list[Row]:
    """Seconds a step at three sizes, shoal against DDP in the same two processes, alternating."""
    rows = []
    for size in SIZES:
        worker_files(out, size, "None", pairs)
        result = json.loads((out / f"{size}-None-w0.json").read_text())
        ours = [a for a, _ in result["pairs"]]
        theirs = [b for _, b in result["pairs"]]
        rows.append(
            paired(
                f"step_{size}",
                "seconds per step",
                ours,
                theirs,
                peer="torch DDP, gloo, same bucket size",
                note=f"{result['workers']} workers, one thread each",
            )
        )
    return rows


def memory_rows(out: Path) -> list[Row]:
    """Peak resident bytes of one of two workers at 3 M parameters, beyond nothing and beyond DDP."""
    peaks = {}
    for side in ("shoal", "ddp"):
        worker_files(out, "3m", side, 1)
        peaks[side] = json.loads((out / f"3m-{side}-w0.json").read_text())["peak_bytes"]
    beyond = peaks["shoal"] - peaks["ddp"]
    return [
        Row(
            name="memory_3m",
            unit="peak resident bytes",
            ours=peaks["shoal"],
            theirs=peaks["ddp"],
            peer="torch DDP, gloo",
            ratio=peaks["shoal"] / peaks["ddp"],
            pairs=1,
            same_work=True,
            note=f"{beyond / 2**20:+.1f} MiB against DDP; both import shoal",
        )
    ]


def worker_files(out: Path, size: str, side: str, pairs: int) -> None:
    """Run two step workers and leave their result files in ``out``."""
    arguments = [str(HERE / "step_worker.py"), "--size", size, "--out", str(out)]
    arguments += ["--pairs", str(pairs)]
    if side != "None":
        arguments += ["--only", side]
    run = shoal_run(*arguments, directory=out / f"run-{size}-{side}", workers=2)
    if run.wait(600) != 0:
        raise RuntimeError(f"step workers of size {size} failed; see {out}")


# -- (b), (c) changes of membership ------------------------------------------------------------------


class Watched:
    """A running fleet that is disturbed, and its workers' times of commit."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        self.workers = workers
        script = str(HERE / "endless_worker.py")
        self.process = shoal_run(script, directory=directory, workers=workers)
        self.wait_for(workers)

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
        return _rows(self.directory / "events.jsonl")

    def commits(self, name: str) -> list[tuple[float, int]]:
        """(time, workers) of every commit of one worker."""
        rows = _rows(self.directory / "metrics" / f"{name}.jsonl")
        return [(row["time"], row["workers"]) for row in rows]

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

    def next_commit(self, name: str, after: float) -> float | None:
        """Time of the first commit of ``name`` after ``after``."""
        times = [t for t, _ in self.commits(name)]
        at = bisect.bisect_right(times, after)
        return times[at] if at < len(times) else None

    def gap(self, survivors: Sequence[str], since: float, settle: float = 4.0) -> float:
        """Longest time from ``since`` to a survivor's next commit."""
        limit = time.time() + settle + 20
        while time.time() < limit:
            nexts = [self.next_commit(name, since) for name in survivors]
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

    def stop(self) -> None:
        """End the run in order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def kill_and_join_rows(out: Path, *, kills: int) -> list[Row]:
    """SIGKILL at random moments, one in three the worker that owns the store; replacements join."""
    fleet = Watched(out / "kills", 3)
    rng = random.Random(7)
    gaps, owner_gaps, stalls = [], [], []
    try:
        for i in range(kills):
            time.sleep(rng.uniform(0.2, 0.7))
            pids = fleet.pids()
            names = sorted(pids)
            victim = names[0] if i % 3 == 0 else rng.choice(names[1:])
            since = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            gap = fleet.gap([name for name in names if name != victim], since)
            (owner_gaps if i % 3 == 0 else gaps).append(gap)
            fleet.wait_for(3)
        step = fleet.step_seconds()
        restarts = _restarts(fleet)
        joins = [row for row in fleet.events() if row["kind"] == "join"]
        stalls = [row["seconds_without_progress"] for row in joins]
    finally:
        fleet.stop()
    every = gaps + owner_gaps
    note = f"{restarts} restarts of survivors; median step {step * 1e3:.1f} ms"
    rows = [
        measured("kill_gap", "seconds to the survivors' next commit", every, note),
        measured("kill_gap_store_owner", "seconds to the survivors' next commit", owner_gaps),
    ]
    if stalls:
        rows.append(measured("join_stall", "seconds without a commit at a join", stalls, note))
    return rows


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
            victim = sorted(pids)[-1]
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


def _rows(path: Path) -> list[dict[str, Any]]:
    from shoal.ledger import journal

    return journal.read(path) if path.exists() else []  # type: ignore[return-value]


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


def run(groups: Sequence[str] = GROUPS, *, quick: bool = False) -> list[dict[str, object]]:
    """All rows of the groups asked for."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        out = Path(folder)
        made: list[Row] = []
        if "step" in groups:
            made += step_rows(out, pairs=10 if quick else 40)
        if "memory" in groups:
            made += memory_rows(out)
        if "kill" in groups or "join" in groups:
            made += kill_and_join_rows(out, kills=4 if quick else 21)
        if "leave" in groups:
            made += leave_rows(out, leaves=2 if quick else 8)
        if "coordinator" in groups:
            made += coordinator_rows(out, times=3 if quick else 20)
        rows += [row.as_dict() for row in made]
    if "order" in groups:
        rows += order_rows()
    return rows
