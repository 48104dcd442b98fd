"""A toy fleet: what it trained, and in which order, can be read from its state.

Every step draws one position per worker from a common cursor. Worker r contributes a one-hot vector
of its position; the sum is added to ``counts``. So after any history ``counts`` must be exactly one
below the cursor and zero above it (the cursor wraps around, after which it is one more). ``history``
is a hash-like recurrence over the steps' widths.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ExchangeFailed
from shoal.testing import processes
from shoal.testing.links import BoardLink
from shoal.world.contract import Position, Tree, World
from shoal.world.elastic.timing import Timing
from shoal.world.elastic.transport import state_hash

POSITIONS = 8_000
BUCKET = 4_000
FAST = Timing(
    probe_seconds=0.1,
    form_seconds=3.0,
    knock_seconds=0.4,
    regather_seconds=0.4,
    exchange_floor_seconds=20.0,
    first_exchange_seconds=20.0,
    silent_peer_seconds=1.5,
    heal_seconds=20.0,
    transfer_idle_seconds=4.0,
    patience_seconds=25.0,
)


class Toy:
    """The state, and the side of the fleet that a world sees."""

    def __init__(self, seed: int, offer: int = -1, ballast: int = 0):
        self.commits = -1
        self.lineage = f"blank {seed}"
        self.offer = offer
        self.cursor = 0
        self.history = seed
        self.counts = torch.zeros(POSITIONS, dtype=torch.float64)
        self.weights = torch.full((4,), float(seed))
        self.ballast = torch.full((ballast,), float(seed))
        self.bootstraps = 0
        self.restores = 0
        self.snapshots = 0
        self.on_snapshot: Callable[[int], None] = lambda count: None
        self.on_restore: Callable[[], None] = lambda: None

    def position(self) -> Position:
        return Position(commits=self.commits, lineage=self.lineage, offer=self.offer)

    def bootstrap(self) -> None:
        self.bootstraps += 1
        self.commits = max(0, self.offer)
        self.lineage = f"started by {self.history}"

    def snapshot(self) -> dict[str, Tree]:
        self.snapshots += 1
        self.on_snapshot(self.snapshots)
        tree = self.tree()
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in tree.items()}

    def restore(self, tree: dict[str, Tree]) -> None:
        self.on_restore()
        self.restores += 1
        for key, value in tree.items():
            setattr(self, key, value)

    def tree(self) -> dict[str, Tree]:
        return {
            "commits": self.commits,
            "lineage": self.lineage,
            "cursor": self.cursor,
            "history": self.history,
            "counts": self.counts,
            "weights": self.weights,
            "ballast": self.ballast,
        }

    def commit(self, token: str, workers: int, drawn: Tensor) -> None:
        self.counts += drawn
        self.cursor += workers
        self.commits += 1
        self.history = (self.history * 31 + workers) % 1_000_003
        self.weights.mul_(0.5).add_(workers)
        word = f"{self.lineage}|{token}|{self.commits}".encode()
        self.lineage = hashlib.blake2b(word, digest_size=8).hexdigest()

    def check(self) -> None:
        """Exactly-once, from the state itself."""
        rounds, rest = divmod(self.cursor, POSITIONS)
        expected = rounds + (torch.arange(POSITIONS) < rest).double()
        wrong = int((self.counts != expected).sum())
        assert wrong == 0, f"{wrong} positions below {self.cursor} are not used exactly once"


class Trainer:
    """The walk through exchanges, with places at which a test can interfere."""

    def __init__(self, world: World, toy: Toy, journal: Path, pause_seconds: float = 0.002):
        self.world = world
        self.toy = toy
        self.pause_seconds = pause_seconds
        self.at: Callable[[str, int], None] = lambda place, commits: None
        self.failures = 0
        self.shrink_only = False
        self._journal = journal.open("a", buffering=1)
        world.attach(toy)

    def step(self) -> bool:
        """One exchange; whether it was committed."""
        world, toy = self.world, self.toy
        membership = world.start_step(shrink_only=self.shrink_only)
        for change in world.take_changes():
            self.write(change=[change.kind, change.workers_before, change.workers_after])
        self.at("started", toy.commits)
        rank, workers = membership.ranks[0], membership.workers
        buckets = [torch.zeros(BUCKET, dtype=torch.float64) for _ in range(POSITIONS // BUCKET)]
        position = (toy.cursor + rank) % POSITIONS
        buckets[position // BUCKET][position % BUCKET] = 1.0
        time.sleep(self.pause_seconds)
        self.at("drawn", toy.commits)
        header = torch.zeros(1 + world.flag_slots)
        header[0] = 1.0
        world.write_flags(header[1:])
        try:
            works = [world.all_reduce(bucket) for bucket in buckets]
            self.at("reducing", toy.commits)
            works.append(world.all_reduce(header))
            self.at("waiting", toy.commits)
            for work in works:
                work.wait()
            assert header[0].item() == workers
        except ExchangeFailed as error:
            self.failures += 1
            self.write(failed=str(error)[:120])
            world.settle(None)
            return False
        self.at("reduced", toy.commits)
        toy.commit(membership.token, workers, torch.cat(buckets))
        world.settle(header[1:])
        world.report({"commits": toy.commits})
        self.write(
            commits=toy.commits,
            workers=workers,
            cursor=toy.cursor,
            lineage=toy.lineage,
            hash=state_hash(toy.tree()) if toy.commits % 10 == 0 else "",
        )
        return True

    def write(self, **row: object) -> None:
        self._journal.write(json.dumps({"t": time.monotonic(), **row}) + "\n")


def rows(directory: Path, name: str) -> list[dict]:
    """What a worker wrote, also after it was killed."""
    path = directory / f"{name}.steps"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def train(
    directory: Path,
    slot: int,
    *,
    until: int,
    pause_seconds: float = 0.002,
    offer: int = -1,
    ballast: int = 0,
    die_at: Sequence[object] = (),
    fail_at: int = -1,
    min_workers: int = 1,
    timing: Timing = FAST,
    evaluate_from: int = -1,
    evaluate_until: int = -1,
    die_while_healing: bool = False,
    die_after_leave: bool = False,
    die_connecting: bool = False,
    die_serving: bool = False,
    fork_at: int = -2,
    hang_at: int = -2,
    slow: tuple[int, int, float] = (0, 0, 0.0),
    stands_at: tuple[int, str] | None = None,
    pretend: Mapping[str, str] | None = None,
    late_at: tuple[int, float] = (-2, 0.0),
    leave_at: int = -2,
) -> dict[str, object]:
    """The body of a worker process: train until the cursor has reached ``until``."""
    from shoal.world.elastic import groups
    from shoal.world.elastic.world import ElasticWorld

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(relativeCreated)d w{slot} %(name)s %(message)s",
    )
    link = BoardLink(directory / "board", slot=slot)
    toy = Toy(seed=slot + 1, offer=offer, ballast=ballast)
    world = ElasticWorld(link, timing=timing, min_workers=min_workers)
    world._enrolment._versions.update(pretend or {})
    trainer = Trainer(world, toy, directory / f"w{slot}.steps", pause_seconds)
    connected: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: world.request_leave())

    if stands_at is not None:
        toy.commits, toy.lineage = stands_at
        toy.history = len(toy.lineage)
        toy.weights.fill_(toy.history)

    def at(place: str, commits: int) -> None:
        if place == "started" and commits == fork_at:
            child = os.fork()
            if child == 0:
                # What a loader's worker does when its parent is gone: nothing, for a long time.
                time.sleep(600)
                os._exit(0)
            processes.tell(["child", child])
        if place == "drawn" and commits == hang_at:
            time.sleep(600)
        if place == "drawn" and slow[0] <= commits < slow[1]:
            time.sleep(slow[2])
        if (place, commits) == ("started", leave_at):
            world.request_leave()
        if (place, commits) == ("waiting", late_at[0]):
            # Slow to notice that the exchange is over: meanwhile nobody may hang up.
            time.sleep(late_at[1])
            group = world._enrolment.group
            connected.append(group is not None and not group.broken())
        if die_at and (place, commits) == tuple(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        if place == "reduced" and commits == fail_at and trainer.failures == 0:
            raise ExchangeFailed("seen by this worker alone")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if die_serving:
        toy.on_snapshot = lambda count: die() if count == 2 else None
    if die_connecting:
        groups._engine = lambda *_: die()
    trainer.at = at
    if die_while_healing:
        toy.on_restore = die
    processes.tell(["pid", os.getpid()])
    try:
        while toy.cursor < until and not world.left:
            trainer.shrink_only = evaluate_from <= toy.commits < evaluate_until
            try:
                trainer.step()
            except ExchangeFailed:
                trainer.failures += 1
                trainer.write(failed="alone")
                world.settle(None)
            if die_after_leave and world._leavers:
                die()
        toy.check()
        return {
            "name": link.name,
            "left": world.left,
            "commits": toy.commits,
            "cursor": toy.cursor,
            "hash": state_hash(toy.tree()),
            "failures": trainer.failures,
            "bootstraps": toy.bootstraps,
            "restores": toy.restores,
            "lineage": toy.lineage,
            "connected": connected,
            "threads": sorted(t.name for t in threading.enumerate()),
        }
    finally:
        world.close()
