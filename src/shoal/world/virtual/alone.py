"""Runs whose workers never meet: each comes to its own rounds, in the order of virtual time.

Arithmetic follows the clock lazily. What a worker computes between two of its stops depends on nothing that
others do meanwhile, so it may be computed at any time before the worker's next stop is dealt with; when one
worker's steps are needed, those of all workers that are under way are computed with them, as one program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import DivergedError
from shoal.sync.contract import Signals
from shoal.sync.states import reseat
from shoal.sync.traffic import Transfer
from shoal.world.virtual.carrying import carry
from shoal.world.virtual.clock import EventQueue, Floats
from shoal.world.virtual.crew import Crew, Member
from shoal.world.virtual.record import SimulatedRun
from shoal.world.virtual.setup import Happening
from shoal.world.virtual.training import Work


@dataclass(kw_only=True)
class Way:
    """What a worker is doing until its next stop.

    Args:
        work: of all its steps until then.
        silent: how many of them, from the first, need nobody's attention.
        first: its own number of the first of them.
        start: when it began.
        ends: when each of them ends.
        is_computed: whether the silent ones have been.
    """

    work: Work
    silent: int
    first: int
    start: float
    ends: Floats
    is_computed: bool = False

    def done_by(self, time: float) -> int:
        """Steps of its life that the worker has ended by then."""
        return self.first + int((self.ends <= time).sum())


class Alone(ABC):
    """One simulated run in which every worker keeps its own time.

    Args:
        crew: the fleet.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew, self.rule = crew, crew.setup.rule
        self.exchange = crew.exchange()
        whole = self.rule.init(crew.x, self.exchange, crew.stack.shapes)
        self._renew_exchange(count=False)
        self.states: dict[int, Any] = {
            member.number: reseat(whole, [row]) for row, member in enumerate(crew.members)
        }
        self.signals: dict[int, Signals] = {}
        self.ways: dict[int, Way] = {}
        self.published: dict[int, Tensor] = {
            member.number: crew.x[row].clone() for row, member in enumerate(crew.members)
        }
        self._queue: EventQueue[tuple[int, Way]] = EventQueue()
        self.time = 0.0

    @abstractmethod
    def _begin(self, member: Member) -> None:
        """Send a worker on its way to its next stop."""

    @abstractmethod
    def _stop(self, row: int) -> None:
        """A worker has come to its stop; its steps are computed."""

    def _leader(self) -> int | None:
        """Row of the present leader, where there is one."""
        return None

    def _center(self) -> Tensor | None:
        """The rule's own average."""
        return None

    def run(self) -> SimulatedRun:
        """Until the samples are used up, nobody is left, or no worker is sound."""
        crew = self.crew
        for member in crew.members:
            self._begin(member)
        try:
            while crew.members and not crew.is_over:
                self.time, (number, way) = self._queue.take()
                row = crew.rank(number)
                if row is not None and self.ways[number] is way:
                    self._arrive(row, way)
        except DivergedError as error:
            crew.record.ended = "diverged"
            crew.record.notes.append(str(error))
        if not crew.members:
            crew.record.ended = "nobody left"
        self._evaluate(force=True)
        self.crew.record.take_payload(self.exchange.traffic)
        return crew.closed()

    # -- on the way ---------------------------------------------------------------------------------

    def _send(self, member: Member, steps: int, silent: int) -> None:
        """Send a worker on a way of so many steps."""
        row = self.crew.rank(member.number)
        assert row is not None, "only workers that are there are sent"
        ends = member.clock.ends(member.ready, first=member.done, steps=steps)
        work = self.crew.work(row, steps)
        way = Way(work=work, silent=silent, first=member.done, start=member.ready, ends=ends)
        self.ways[member.number] = way
        self._queue.put(min(float(ends[-1]), member.until), (member.number, way))

    def _arrive(self, row: int, way: Way) -> None:
        crew, member = self.crew, self.crew.members[row]
        if member.until < float(way.ends[-1]):
            lived = way.done_by(member.until) - way.first
            crew.stepped(row, lived, member.until)
            self._remove(row, "killed")
            return
        self._compute(member.number)
        crew.stepped(row, way.work.steps, float(way.ends[-1]))
        self._stop(row)
        if not self._come_and_go(member):
            self._begin(member)
        self._evaluate()

    def _compute(self, number: int) -> None:
        """A worker's steps until its stop; with them the silent ones of all that are under way."""
        crew = self.crew
        if not self.ways[number].is_computed:
            pending = [
                (row, self.ways[m.number])
                for row, m in enumerate(crew.members)
                if m.number in self.ways and not self.ways[m.number].is_computed
            ]
            parts = [replace(way.work.part(0, way.silent), row=row) for row, way in pending]
            losses = crew.training.advance([part for part in parts if part.steps])
            for part, (_, way) in zip(parts, pending, strict=True):
                way.is_computed = True
                if part.steps:
                    self._observe(part, losses[part.row])
        way, row = self.ways[number], crew.rank(number)
        assert row is not None, "only workers that are there compute"
        for step in range(way.silent, way.work.steps):
            one = replace(way.work.part(step, step + 1), row=row)
            self._audible(one, is_last=step + 1 == way.work.steps)

    def _observe(self, work: Work, losses: Floats) -> None:
        crew, number = self.crew, self.crew.members[work.row].number
        told = torch.from_numpy(crew.reported(work.row, losses, work.first))
        state, rates = self.states[number], work.lr.tolist()
        for loss, lr in zip(told.split(1), rates, strict=True):
            self.signals[number] = Signals(lr=lr, losses=loss)
            state = self.rule.observe(state, self.signals[number])
        self.states[number] = state

    def _audible(self, work: Work, *, is_last: bool) -> None:
        """One step around which the rule acts."""
        crew, rule, number = self.crew, self.rule, self.crew.members[work.row].number
        mine = crew.x[work.row : work.row + 1]
        moved, self.states[number] = rule.before_step(self.states[number], mine)
        if moved is not mine:
            mine.copy_(moved)
        losses = crew.training.advance([work])
        self._observe(work, losses[work.row])
        if not is_last:
            outcome = rule.rest(self.states[number], mine, self.exchange.only(work.row))
            if outcome.x is not mine:
                mine.copy_(outcome.x)
            self.states[number] = outcome.state

    # -- membership ---------------------------------------------------------------------------------

    def _come_and_go(self, member: Member) -> bool:
        """What is due, at the stop of a worker; whether it is itself gone."""
        crew = self.crew
        for event in crew.due_events(self.time):
            if event.kind == "join":
                self._join(event, member)
                continue
            row = crew.whom(event)
            if row is None:
                continue
            if crew.members[row] is not member:
                crew.put_back(event)  # it goes at a stop of its own
                continue
            if event.kind == "kill":
                member.until = member.ready
            self._remove(row, "left" if event.kind == "leave" else "killed")
            return True
        return False

    def _join(self, event: Happening, donor: Member) -> None:
        """Newcomers get everything from the worker that has just come from its round."""
        crew = self.crew
        row = crew.rank(donor.number)
        assert row is not None
        self._finish_ways(but=donor.number)
        new = crew.add(event, row, donor.ready)
        self._renew_exchange()
        for place in new:
            member = crew.members[place]
            hops = (donor.number, member.number)
            transfer = Transfer(kind="send", workers=hops, size=crew.stack.snapshot_bytes)
            self.exchange.traffic.add(transfer)
            ready = dict.fromkeys(hops, donor.ready)
            carried = carry(crew.links, self.exchange.traffic.take(), ready)
            crew.record.formula_bytes += carried.formula_bytes
            member.record.exchanging += carried.exchanging[member.number]
            member.ready = carried.ends[member.number]
            self.states[member.number] = reseat(self.states[donor.number], [0], joined=[0])
            self.published[member.number] = crew.x[place].clone()
            if donor.number in self.signals:
                self.signals[member.number] = self.signals[donor.number]
        for place in new:
            self._begin(crew.members[place])

    def _remove(self, row: int, how: str) -> None:
        number = self.crew.members[row].number
        self._finish_ways(but=number)
        for kept in (self.ways, self.states, self.signals, self.published):
            kept.pop(number, None)
        if self.crew.remove([row], how):
            self._renew_exchange()

    def _finish_ways(self, *, but: int) -> None:
        """Compute what is under way: rows are about to change places."""
        for member in self.crew.members:
            way = self.ways.get(member.number)
            if member.number != but and way is not None and not way.is_computed:
                row = self.crew.rank(member.number)
                assert row is not None
                part = replace(way.work.part(0, way.silent), row=row)
                way.is_computed = True
                if part.steps:
                    self._observe(part, self.crew.training.advance([part])[row])

    def _renew_exchange(self, *, count: bool = True) -> None:
        old = self.exchange
        if count:
            self.crew.record.take_payload(self.exchange.traffic)
        self.exchange = self.crew.exchange()
        self.exchange.adopt(old)

    def _evaluate(self, *, force: bool = False) -> None:
        """Of the weights that workers had at their last stops: those are the ones others can see."""
        crew = self.crew
        if crew.members:
            x = torch.stack([self.published[member.number] for member in crew.members])
            crew.evaluate(
                x, leader=self._leader(), center=self._center(), force=force, now=self.time
            )

    def _carry(self, transfers: Sequence[Transfer], member: Member) -> None:
        """Transfers that a worker waits for."""
        carried = carry(
            self.crew.links,
            transfers,
            {member.number: member.ready},
            broadcast=self.crew.setup.broadcast,
        )
        member.record.waiting += carried.waiting[member.number]
        member.record.exchanging += carried.exchanging[member.number]
        member.ready = carried.ends[member.number]
        self.crew.record.formula_bytes += carried.formula_bytes
