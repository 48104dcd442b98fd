"""Runs whose workers meet: from one round to the next, with either trigger, whatever the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import DivergedError, UsageError
from shoal.sync.choice import ScoreName
from shoal.sync.contract import Outcome, Signals, SyncRule
from shoal.sync.policies import Carried as Held
from shoal.sync.policies import carry as follow
from shoal.sync.stacked import Stacked
from shoal.sync.states import reseat
from shoal.sync.traffic import Transfer
from shoal.world.virtual.carrying import Carried, carry
from shoal.world.virtual.crew import Crew
from shoal.world.virtual.outlook import Outlook, outlook
from shoal.world.virtual.record import SimulatedRun
from shoal.world.virtual.training import Work
from shoal.world.virtual.triggers import Running, Stretch, fixed, total_count


class Rounds:
    """One simulated run in rounds.

    Args:
        crew: the fleet.

    Raises:
        UsageError: a trigger that the rule cannot have.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew, self.rule = crew, crew.setup.rule
        self.exchange = crew.exchange()
        self.state: Any = self.rule.init(crew.x, self.exchange, crew.stack.shapes)
        # Where a rule's own variables start is known to all: it is how the run begins, not a transfer.
        self.exchange = crew.exchange()
        self._carried_over = 0
        self._arrivals: dict[int, float] = {}
        self._last: Tensor | None = None
        self._slow: Mapping[str, Tensor] = {}
        self._counts: Tensor | None = None
        self.leader = crew.members[0].number

    def run(self) -> SimulatedRun:
        """Until the samples are used up, nobody is left, or no worker is sound."""
        crew = self.crew
        try:
            while not crew.is_over:
                self._come_and_go()
                if crew.members:
                    self._period()
        except DivergedError as error:
            crew.record.ended = "diverged"
            crew.record.notes.append(str(error))
        if not crew.members:
            crew.record.ended = "nobody left"
        self._evaluate(force=True)
        self.crew.record.take_payload(self.exchange.traffic)
        return crew.closed()

    # -- one period ---------------------------------------------------------------------------------

    def _period(self) -> None:
        crew = self.crew
        ahead = outlook(self.rule, self.state, crew.x, self.exchange)
        self._check(ahead)
        stretches = self._stretches(ahead)
        work: list[Work] = []
        for row, member in enumerate(crew.members):
            stretch = stretches[member.number]
            work.append(crew.work(row, stretch.steps))
            crew.stepped(row, stretch.steps, stretch.stop)
        dead = [row for row, m in enumerate(crew.members) if stretches[m.number].killed]
        if dead:
            noticed = max(m.until for m in crew.members if stretches[m.number].killed)
            work = [one for row, one in enumerate(work) if row not in dead]
            self._remove(dead, "killed")
            if not crew.members:
                return
            work = [replace(one, row=row) for row, one in enumerate(work)]
            self._wait_until(noticed + crew.setup.detection_seconds)
        self._train(work, ahead)
        self._exchange(ahead)
        crew.leases.settle(member.number for member in crew.members)
        self._evaluate()

    def _stretches(self, ahead: Outlook) -> Mapping[int, Stretch]:
        crew = self.crew
        running = {
            m.number: Running(clock=m.clock, start=m.ready, done=m.done, until=m.until)
            for m in crew.members
        }
        if self._arrivals:
            return self._meet_late(running, ahead.steps)
        if crew.setup.trigger != "total-count" or ahead.reduces:
            return fixed(running, ahead.steps)
        period = ahead.steps * crew.count
        target = max(1, period - self._carried_over)
        found = total_count(running, target)
        self._carried_over += sum(stretch.steps for stretch in found.values()) - period
        return found

    def _meet_late(self, running: Mapping[int, Running], steps: int) -> Mapping[int, Stretch]:
        """A period into which the last round's result arrives: needed only some steps later."""
        arrivals, self._arrivals = self._arrivals, {}
        found = dict(fixed(running, self._delay))
        for member in self.crew.members:
            first = found[member.number]
            if first.killed:
                continue
            begin = max(first.stop, arrivals.get(member.number, 0.0))
            member.record.waiting += begin - first.stop
            member.record.computing -= begin - first.stop
            rest = replace(running[member.number], start=begin, done=member.done + self._delay)
            second = fixed({member.number: rest}, steps - self._delay)[member.number]
            found[member.number] = replace(second, steps=self._delay + second.steps)
        return found

    @property
    def _delay(self) -> int:
        """Steps after a round until its result is needed; workers train on meanwhile."""
        return getattr(self.rule, "delay", 0)

    def _check(self, ahead: Outlook) -> None:
        """Under total-count rows make unequal numbers of steps: no rule can then keep count for all."""
        if self.crew.setup.trigger != "total-count":
            return
        if ahead.reduces or ahead.moves_before or ahead.keeps_books:
            what = "exchanges gradients in" if ahead.reduces else "acts on"
            raise UsageError(
                f"trigger = 'total-count' with the sync rule {self.rule.name}, which {what} every step of all "
                "workers, while here they make unequal numbers of steps; use trigger = 'fixed'"
            )

    def _wait_until(self, time: float) -> None:
        """Those who would wait for the dead do so until the death is noticed."""
        if self.rule.period is None and not self._is_gradient_rule:
            return
        for member in self.crew.members:
            if member.ready < time:
                member.record.waiting += time - member.ready
                member.ready = time

    @property
    def _is_gradient_rule(self) -> bool:
        return type(self.rule).reduce_gradients is not SyncRule.reduce_gradients

    # -- arithmetic ---------------------------------------------------------------------------------

    def _train(self, work: Sequence[Work], ahead: Outlook) -> None:
        """All local steps of a period: together as far as the rule is silent, then step by step."""
        if ahead.reduces:
            self._reduce(work)
            return
        steps = max(one.steps for one in work)
        if self.crew.setup.trigger == "total-count":
            # The last step is a different one for each row, so what a rule keeps before it is left out.
            silent = steps if ahead.silent >= ahead.steps - 1 else 0
        else:
            silent = ahead.silent
        if silent:
            self._silent([one.part(0, silent) for one in work])
        for step in range(silent, steps):
            self._audible(work, step)

    def _silent(self, work: Sequence[Work]) -> None:
        """Steps around which the rule does nothing but count them."""
        crew, rule = self.crew, self.rule
        losses = crew.training.advance([one for one in work if one.steps])
        steps = max(one.steps for one in work)
        told = np.zeros((len(work), steps))
        for one in work:
            if one.steps:
                told[one.row, : one.steps] = crew.reported(one.row, losses[one.row], one.first)
        made = np.arange(steps) < np.array([[one.steps] for one in work])
        values, counts = torch.from_numpy(told), torch.from_numpy(made) * crew.setup.local_batch
        for step in range(steps):
            self._last, self._counts = values[:, step], counts[:, step]
            signals = Signals(lr=crew.lr, losses=self._last, counts=self._counts)
            self.state = rule.observe(self.state, signals)

    def _audible(self, work: Sequence[Work], step: int) -> None:
        """One step around which the rule acts. Rows that have ended (total-count) are left alone."""
        crew, rule = self.crew, self.rule
        rows = [one.row for one in work if one.steps > step]
        if len(rows) == crew.count:
            moved, self.state = rule.before_step(self.state, crew.x)
            self._write(moved)
        parts = [work[row].part(step, step + 1) for row in rows]
        losses = crew.training.advance(parts)
        told, counts = np.zeros(len(work)), np.zeros(len(work))
        for part in parts:
            told[part.row] = crew.reported(part.row, losses[part.row], part.first)[0]
            counts[part.row] = crew.setup.local_batch
        self._last, self._counts = torch.from_numpy(told), torch.from_numpy(counts)
        signals = Signals(lr=crew.lr, losses=self._last, counts=self._counts)
        self.state = rule.observe(self.state, signals)
        resting = [one.row for one in work if one.steps > step + 1]
        if len(resting) == crew.count:
            self._rest()
        elif resting:
            x = crew.x[resting]
            outcome = rule.rest(reseat(self.state, resting), x, self._exchange_of(resting))
            crew.x[resting] = outcome.x

    def _reduce(self, work: Sequence[Work]) -> None:
        """One step whose gradients are exchanged."""
        crew, rule = self.crew, self.rule
        x = crew.x
        moved, self.state = rule.before_step(self.state, x)
        self._write(moved)
        gradients, losses = crew.training.gradients(work)
        told = [crew.reported(one.row, losses[one.row], one.first)[0] for one in work]
        self._last = torch.tensor(told, dtype=torch.float64)
        self._counts = None  # all the same
        signals = Signals(lr=crew.lr, losses=self._last, counts=self._counts)
        reduced, self.state = rule.reduce_gradients(self.state, gradients, self.exchange, signals)
        crew.training.update(work, reduced)
        self.state = rule.observe(self.state, signals)
        if not (rule.period is not None and rule.is_due(self.state)):
            self._rest()

    def _rest(self) -> None:
        crew = self.crew
        outcome = self.rule.rest(self.state, crew.x, self.exchange)
        if outcome.pulls:
            held = crew.stack.carried(crew.count, self._slow)
            self._hold(follow(self.rule, outcome, held, self.exchange))
        self._write(outcome.x)
        self.state = outcome.state

    def _write(self, x: Tensor) -> None:
        mine = self.crew.x
        if x.data_ptr() != mine.data_ptr() or x.shape != mine.shape:
            mine.copy_(x)

    def _exchange_of(self, rows: Sequence[int]) -> Stacked:
        """Some of the workers, as a rule sees them between rounds, when it sends nothing."""
        members = self.crew.members
        return Stacked(
            len(rows),
            group_of=[members[row].group for row in rows],
            members=[members[row].number for row in rows],
        )

    # -- exchanging ---------------------------------------------------------------------------------

    def _exchange(self, ahead: Outlook) -> None:
        """The round, and again without those who are killed in it."""
        crew = self.crew
        outcome: Outcome[Any] | None = None
        held: Held | None = None
        while crew.members:
            kept = self.exchange.traffic.transfers if ahead.reduces else []
            before = dict(self.exchange.traffic.payload_bytes)
            holds_round = self.rule.period is not None and (
                crew.setup.trigger == "total-count" or self.rule.is_due(self.state)
            )
            if holds_round:
                outcome = self.rule.exchange_round(
                    self.state, crew.x, self.exchange, self._signals()
                )
                held = follow(
                    self.rule, outcome, crew.stack.carried(crew.count, self._slow), self.exchange
                )
            transfers = self.exchange.traffic.take()
            links = crew.links.tried()
            carried = carry(links, transfers, crew.ready, broadcast=crew.setup.broadcast)
            dying = [row for row, m in enumerate(crew.members) if m.until < carried.ends[m.number]]
            if not dying:
                crew.links = links
                self._commit(outcome, carried, held)
                return
            dead = {crew.members[row].number for row in dying}
            blocks = any(_blocks(one, dead) for one in transfers)
            noticed = max(crew.members[row].until for row in dying)
            if blocks:
                crew.links = links
                crew.record.formula_bytes += carried.formula_bytes
                crew.record.lost_rounds += 1
                crew.happened("lost_round", noticed)
            else:
                self.exchange.traffic.payload_bytes.update(before)
            self._remove(dying, "killed")
            if blocks:
                self._wait_until(noticed + crew.setup.detection_seconds)
            if kept and crew.members:
                # The gradients are there already; only their way is priced again.
                again = tuple(m.number for m in crew.members)
                self.exchange.traffic.transfers = [replace(one, workers=again) for one in kept]

    def _commit(
        self,
        outcome: Outcome[Any] | None,
        carried: Carried,
        held: Held | None,
    ) -> None:
        crew = self.crew
        if self._delay:
            self._arrivals = dict(carried.ends)
        for member in crew.members if not self._delay else ():
            member.record.waiting += carried.waiting[member.number]
            member.record.exchanging += carried.exchanging[member.number]
            member.ready = carried.ends[member.number]
        crew.record.formula_bytes += carried.formula_bytes
        if outcome is None:
            return
        self._write(outcome.x)
        self.state = outcome.state
        self._hold(held)
        crew.record.rounds += 1
        for event in outcome.events:
            crew.happened(event.kind, crew.now, step=event.step, **event.values)
            if event.kind == "round" and isinstance(event.values.get("leader"), int):
                self.leader = int(str(event.values["leader"]))

    def _hold(self, held: Held | None) -> None:
        """Momentum and statistics, as the rule's policies left them."""
        if held is not None:
            self._slow = held.slow_momentum
            self.crew.stack.take(held, self.crew.count)

    def _signals(self) -> Signals:
        crew, rule = self.crew, self.rule
        asked: ScoreName = getattr(rule, "score", "own")
        scores = crew.scores(asked)
        return Signals(
            lr=crew.lr,
            losses=self._last,
            counts=self._counts,
            scores=scores,
            judge=self._own_judge,
        )

    def _own_judge(self, x: Tensor) -> list[float]:
        """Each worker's loss of given weights, on the samples of its own last steps."""
        return self.crew.judge.losses(x, [member.recent for member in self.crew.members])

    # -- membership ---------------------------------------------------------------------------------

    def _come_and_go(self) -> None:
        crew = self.crew
        for event in crew.due_events(crew.now):
            if event.kind == "join":
                self._join(event)
                continue
            row = crew.whom(event)
            if row is not None:
                if event.kind == "kill":
                    crew.members[row].until = crew.members[row].ready
                self._remove([row], "left" if event.kind == "leave" else "killed")
            if not crew.members:
                return

    def _join(self, event: Any) -> None:
        """Newcomers get everything from the leader: its weights, optimizer state and buffers."""
        crew = self.crew
        found = crew.rank(self.leader)
        donor = 0 if found is None else found
        source = crew.members[donor].number
        old = crew.count
        self._last = self._counts = None  # of other rows; the next period tells them anew
        rows = crew.add(event, donor, crew.now)
        size = crew.stack.snapshot_bytes
        places = [*range(old), *([donor] * len(rows))]
        self.state = reseat(self.state, places, joined=rows)
        self._slow = {name: value[places] for name, value in self._slow.items()}
        self._renew_exchange()
        for row in rows:
            hop = (source, crew.members[row].number)
            self.exchange.traffic.add(Transfer(kind="send", workers=hop, size=size))
            carried = carry(crew.links, self.exchange.traffic.take(), crew.ready)
            crew.record.formula_bytes += carried.formula_bytes
            for member in crew.members:
                member.record.exchanging += carried.exchanging[member.number]
                member.record.waiting += carried.waiting[member.number]
                member.ready = carried.ends[member.number]

    def _remove(self, rows: Sequence[int], how: str) -> None:
        stay = self.crew.remove(rows, how)
        if stay:
            self._slow = {name: value[stay] for name, value in self._slow.items()}
            self.state = reseat(self.state, stay)
            if self._last is not None:
                self._last = self._last[stay]
            if self._counts is not None:
                self._counts = self._counts[stay]
            self._renew_exchange()

    def _renew_exchange(self) -> None:
        self.crew.record.take_payload(self.exchange.traffic)
        self.exchange = self.crew.exchange()

    def _evaluate(self, *, force: bool = False) -> None:
        crew = self.crew
        if crew.members:
            crew.evaluate(
                crew.x,
                leader=crew.rank(self.leader),
                center=self.rule.center(self.state),
                force=force,
            )


def _blocks(transfer: Transfer, dead: set[int]) -> bool:
    """Whether these deaths break a transfer for the others: a sum lacks a part, a broadcast its source."""
    if transfer.kind == "mean":
        return not dead.isdisjoint(transfer.workers)
    return transfer.kind == "broadcast" and transfer.source in dead
