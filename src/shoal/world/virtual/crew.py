"""The workers of a simulated run, what they hold, and what happens to any of them, whatever the rule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.data import Order
from shoal.data.order import Indices
from shoal.errors import UsageError
from shoal.study.engines.block import NotStackable
from shoal.sync.choice import ScoreName, resolve_score
from shoal.sync.groups import even_groups, rebalanced
from shoal.sync.stacked import Stacked
from shoal.world.virtual.clock import Floats, WorkerClock
from shoal.world.virtual.faults import Faults
from shoal.world.virtual.judging import Judge
from shoal.world.virtual.leases import Leases, Shards
from shoal.world.virtual.links import LINKS, Links
from shoal.world.virtual.loop import LoopTraining
from shoal.world.virtual.measures import Measures
from shoal.world.virtual.record import Evaluation, SimulatedRun, WorkerRecord
from shoal.world.virtual.setup import Happening, Setup
from shoal.world.virtual.stack import Stack
from shoal.world.virtual.training import Training, Work
from shoal.world.virtual.vectorised import VectorisedTraining, rows_together

_PROBE_SEED = 20190527
_RECENT_STEPS = 4


@dataclass(kw_only=True)
class Member:
    """A worker that is there.

    Args:
        number: in the run.
        clock: of its steps.
        faults: it has.
        group: it is in.
        ready: virtual time up to which its life is decided.
        done: optimizer steps it has ended.
        until: when it will be killed.
        record: its account.
        recent: the samples of its last steps.
    """

    number: int
    clock: WorkerClock
    faults: Faults
    group: int
    ready: float
    record: WorkerRecord
    done: int = 0
    until: float = math.inf
    recent: Indices


class Crew:
    """Everything a simulated fleet consists of. Row i of the stack is member i's.

    Args:
        setup: what is simulated.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        workload = setup.workload
        model = workload.build(setup.seed)
        self.stack = Stack(model, setup.optimizer, setup.capacity)
        self.training = self._training()
        self.judge = Judge(workload, self.stack)
        self.links = Links(setup.resolved_network)
        samples = workload.samples("train")
        self.leases: Leases | Shards = (
            Shards(samples=samples, seed=setup.seed, workers=setup.workers)
            if setup.shards == "fixed"
            else Leases(
                samples=samples,
                seed=setup.seed,
                block=setup.lease_steps * setup.local_batch,
                lost=setup.lost,
            )
        )
        probe = Order(n=samples, seed=_PROBE_SEED, epoch=0)
        self.probe: Indices = probe.take(0, min(setup.probe_samples, samples))
        self.measures = Measures(setup, self.stack, self.judge, self.probe)
        self.record = SimulatedRun(settings={}, engine=self.training.name, target=setup.target)
        self.members: list[Member] = []
        self._born = 0
        self._events = list(setup.events)
        self._next_evaluation = setup.evaluation_samples
        self.factor = None if setup.schedule is None else setup.schedule.resolve(setup.samples)
        groups = even_groups(setup.workers, setup.group_count)
        for rank in range(setup.workers):
            seed = setup.seed + rank if setup.different_starts else setup.seed
            self.stack.load(rank, workload.build(seed))
            self._enter(groups[rank], 0.0)

    def _training(self) -> Training:
        setup = self.setup
        if setup.mode == "loop":
            return LoopTraining(self.stack, setup.workload, setup.optimizer)
        try:
            return VectorisedTraining(
                self.stack,
                setup.workload,
                setup.optimizer,
                local_batch=setup.local_batch,
                together=setup.together or rows_together(self.stack.layout.numbers),
            )
        except NotStackable as error:
            raise UsageError(
                f"mode = 'vectorised' with {setup.workload.name}, but {error}; use mode = 'loop'"
            ) from error

    # -- who is there -------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Workers that are there, p."""
        return len(self.members)

    @property
    def x(self) -> Tensor:
        """Their parameters, (p, numbers); a view."""
        return self.stack.parameters[: self.count]

    @property
    def ready(self) -> dict[int, float]:
        """When each may go on."""
        return {member.number: member.ready for member in self.members}

    @property
    def now(self) -> float:
        """Virtual time that every worker's life has come to, or gone beyond."""
        return max((member.ready for member in self.members), default=self.record.virtual_seconds)

    @property
    def is_over(self) -> bool:
        """Whether the samples are used up, or nobody is left."""
        return not self.members or self.leases.used >= self.setup.samples

    def exchange(self) -> Stacked:
        """The present workers as the sync rules see them."""
        network = self.links.network
        return Stacked(
            self.count,
            group_of=[member.group for member in self.members],
            nodes=[network.node(member.number) for member in self.members],
            members=[member.number for member in self.members],
            wire=self.setup.wire,
        )

    def rank(self, worker: int) -> int | None:
        """A worker's row; None if it is not there."""
        for place, member in enumerate(self.members):
            if member.number == worker:
                return place
        return None

    def _enter(self, group: int, time: float, event: Happening | None = None) -> Member:
        setup, number = self.setup, self._born
        self._born += 1
        slowdown = setup.slowdowns.get(number, 1.0 if event is None else event.slowdown)
        faults = setup.faults.get(number, () if event is None else event.faults)
        clock = WorkerClock(
            setup.pace, worker=number, slowdown=slowdown, stalls=setup.stalls.get(number, ())
        )
        kills = [
            one.at_seconds
            for one in self._events
            if one.kind == "kill" and one.worker == number and one.at_seconds is not None
        ]
        record = WorkerRecord(
            worker=number,
            joined=time,
            group=group,
            slowdown=slowdown,
            faults=tuple(fault.kind for fault in faults),
        )
        member = Member(
            number=number,
            clock=clock,
            faults=Faults(worker=number, seed=setup.seed, listed=tuple(faults)),
            group=group,
            ready=time,
            until=min(kills, default=math.inf),
            record=record,
            recent=np.empty(0, dtype=np.int64),
        )
        self.record.workers.append(record)
        self.members.append(member)
        return member

    # -- coming and going ---------------------------------------------------------------------------

    def due_events(self, now: float) -> list[Happening]:
        """Events whose mark is reached by then, oldest mark first; each is given once."""
        used = self.leases.used
        due = [
            event
            for event in self._events
            if event.due(now, used) and not self._strikes_by_itself(event)
        ]
        self._events = [event for event in self._events if event not in due]
        return sorted(due, key=lambda event: (event.at_seconds or 0.0, event.at_samples or 0))

    def put_back(self, event: Happening) -> None:
        """An event that could not happen yet."""
        self._events.append(event)

    def _strikes_by_itself(self, event: Happening) -> bool:
        """A kill of a named worker at a time; its member knows when."""
        return event.kind == "kill" and event.at_seconds is not None and event.worker is not None

    def whom(self, event: Happening) -> int | None:
        """The row of the worker that an event sends away; None if it is not there."""
        if event.worker is not None:
            return self.rank(event.worker)
        if not self.members:
            return None
        return max(range(self.count), key=lambda place: self.members[place].number)

    def remove(self, rows: Iterable[int], how: str) -> list[int]:
        """Let workers go, ``left`` or ``killed``; the rows that stay, in order."""
        gone = sorted(set(rows))
        stay = [place for place in range(self.count) if place not in gone]
        before = self.count
        names = [self.members[place].number for place in gone]
        for place in gone:
            member = self.members[place]
            self.leases.drop(member.number)
            if how == "killed" and member.until > member.ready:  # while it stood still
                member.record.waiting += member.until - member.ready
                member.ready = member.until
            member.record.left = member.ready
            member.record.how = how
            self.record.virtual_seconds = max(self.record.virtual_seconds, member.record.left)
        time = max((self.members[place].record.left or 0.0 for place in gone), default=0.0)
        self.stack.reorder(stay)
        self.members = [self.members[place] for place in stay]
        kind = "kill" if how == "killed" else "leave"
        self.happened(kind, time, workers=names, workers_before=before, workers_after=self.count)
        self._rebalance(time)
        return stay

    def add(self, event: Happening, donor: int, time: float) -> list[int]:
        """Let workers in as copies of ``donor``'s row; their rows."""
        before = self.count
        new: list[int] = []
        for _ in range(event.workers):
            sizes = dict.fromkeys(range(self.setup.group_count), 0)
            for member in self.members:
                sizes[member.group] += 1
            group = min(sizes, key=lambda g: (sizes[g], g))
            mates = [m.number for m in self.members if m.group == group]
            row = self.count
            self.stack.copy(donor, row)
            member = self._enter(group, time, event)
            if self.setup.group_count > 1 and mates:
                self._settle_on(self.links.network.node(mates[0]), member.number)
            new.append(row)
        names = [self.members[row].number for row in new]
        self.happened("join", time, workers=names, workers_before=before, workers_after=self.count)
        return new

    def _settle_on(self, node: int, worker: int) -> None:
        network = self.links.network
        self.links.network = replace(network, nodes={**network.nodes, worker: node})

    def _rebalance(self, time: float) -> None:
        """Groups as even as can be once somebody has gone."""
        if self.setup.group_count == 1 or not self.members:
            return
        present = [member.group for member in self.members]
        count = self.setup.group_count
        padded = rebalanced([*present, *([count - 1] if max(present) < count - 1 else [])])
        groups = padded[: len(present)]
        if list(groups) != present:
            for member, group in zip(self.members, groups, strict=True):
                member.group = member.record.group = group
            self.happened("rebalanced", time, groups=list(groups))

    def happened(self, kind: str, time: float, **values: object) -> None:
        """Note an event."""
        self.record.events.append({"kind": kind, "virtual_seconds": time, **values})

    # -- training -----------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate at the fleet's present progress."""
        factor = 1.0 if self.factor is None else self.factor(self.leases.used)
        return self.setup.optimizer.lr * factor

    def work(self, row: int, steps: int) -> Work:
        """The next steps of a member: its samples are drawn, its learning rates set."""
        member, batch = self.members[row], self.setup.local_batch
        samples = self.leases.draw(member.number, steps * batch).reshape(steps, batch)
        if steps:
            member.recent = samples[-_RECENT_STEPS:].reshape(-1)
        first = member.done
        lr = np.full(steps, self.lr)
        if member.faults.listed:
            lr *= [member.faults.lr_factor(first + step) for step in range(steps)]
        return Work(row=row, samples=samples, lr=lr, first=first, faults=member.faults)

    def stepped(self, row: int, steps: int, stop: float) -> None:
        """A member has computed ``steps`` steps, from when it was ready until ``stop``."""
        member = self.members[row]
        member.record.computing += stop - member.ready
        member.record.steps += steps
        member.done += steps
        member.ready = stop

    def reported(self, row: int, losses: Floats, first: int) -> Floats:
        """What a member says its losses are."""
        faults = self.members[row].faults
        if not faults.listed:
            return losses
        return np.array([faults.reported(loss, first + k) for k, loss in enumerate(losses)])

    def scores(self, asked: ScoreName, row: int | None = None) -> Tensor | None:
        """What workers say that their weights lose on a set that is common to all.

        Args:
            asked: the rule's choice.
            row: one worker's only.

        Returns:
            ``[rows]``; None where the rule goes by training losses.
        """
        score = resolve_score(asked, shards=self.setup.shards)
        if score not in ("probe", "held_out"):
            return None
        samples = self.probe if score == "probe" else None
        told: list[float] = []
        for place in range(self.count) if row is None else [row]:
            member = self.members[place]
            buffers = {name: rows[place] for name, rows in self.stack.buffers.items()}
            loss = self.judge.loss(self.x[place], buffers, samples)
            told.append(member.faults.reported(loss, member.done))
        return torch.tensor(told, dtype=torch.float64)

    # -- measuring ----------------------------------------------------------------------------------

    def evaluate(
        self,
        x: Tensor,
        *,
        leader: int | None,
        center: Tensor | None,
        force: bool = False,
        now: float | None = None,
    ) -> None:
        """Measure the models if an evaluation falls due.

        Args:
            x: every member's weights, ``[p, d]``.
            leader: row of the present leader.
            center: the rule's own average, ``[1, d]``.
            force: measure in any case.
            now: virtual time; that of :attr:`now` where workers have met.
        """
        samples = self.leases.used
        last = self.record.evaluations[-1].samples if self.record.evaluations else -1
        if not self.members or samples == last or (samples < self._next_evaluation and not force):
            return
        every = self.setup.evaluation_samples
        self._next_evaluation = (samples // every + 1) * every
        self.record.evaluated(
            Evaluation(
                samples=samples,
                virtual_seconds=self.now if now is None else now,
                bytes=sum(self.links.counted_bytes.values()),
                steps=self.record.steps,
                scores=self.measures.scores(x, leader, center),
            )
        )

    def closed(self) -> SimulatedRun:
        """The record, with what is only known at the end."""
        record = self.record
        record.virtual_seconds = max(record.virtual_seconds, self.now)
        record.counted_bytes = {name: self.links.counted_bytes[name] for name in LINKS}
        record.messages = {name: self.links.messages[name] for name in LINKS}
        leases = self.leases
        record.drawn, record.used = leases.drawn, leases.used
        record.discarded, record.pending = leases.discarded, leases.pending
        return record
