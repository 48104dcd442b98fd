"""Background rounds of the leader rule: nobody ever waits.

A worker's round is its own opportunity to be pulled, every ``sync_every`` of its own steps: it publishes its
weights and its score, and begins to fetch the snapshot of whoever then has the best score. It goes on
training meanwhile, and applies the pull between two of its steps once the snapshot has arrived. The leader
is thus one or more rounds old when it pulls; its age is counted. A round at which the last snapshot is
still under way only publishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.sync.contract import Outcome, Signals, SyncRule
from shoal.sync.independent import Independent
from shoal.sync.leader import Leader
from shoal.sync.policies import merge_momentum
from shoal.sync.traffic import SCORE_BYTES, Transfer
from shoal.world.virtual.alone import Alone
from shoal.world.virtual.crew import Crew, Member
from shoal.world.virtual.pricing import messages, price_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """What a worker has published.

    Args:
        weights: ``[1, d]``.
        buffers: of its model, by name.
        score: it claims.
        time: when.
        done: steps it had done.
    """

    weights: Tensor
    buffers: Mapping[str, Tensor]
    score: float
    time: float
    done: int


class Behind:
    """One worker's view of what the others have published: an ``Exchange`` of one local row.

    Args:
        rank: the worker's.
        members: the number of each rank's worker.
        group_of: the group of each rank.
        board: what each worker published last, by number; a copy taken at the round.
        score: the worker's own at the round; None until it is told.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        group_of: Sequence[int],
        board: Mapping[int, Snapshot],
        score: float | None = None,
    ) -> None:
        self.ranks = (rank,)
        self.workers = len(members)
        self.members, self.group_of = tuple(members), tuple(group_of)
        self.board, self.score = board, score
        self.wanted: list[int] = []

    def scores(self, own: Sequence[float]) -> list[float]:
        """The last score of each worker; not a number for those that have published nothing."""
        if self.score is None:
            self.score = own[0]
        known = {number: shot.score for number, shot in self.board.items()}
        known[self.members[self.ranks[0]]] = self.score
        return [known.get(number, float("nan")) for number in self.members]

    def from_workers(self, x: Tensor, sources: Sequence[int]) -> Tensor:
        """The snapshot of the worker that the local row names."""
        source = sources[self.ranks[0]]
        if source == self.ranks[0]:
            return x
        number = self.members[source]
        self.wanted.append(number)
        return self.board[number].weights

    def mean(self, x: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Not in the background."""
        raise _cannot("a mean of all workers")

    def largest(self, x: Tensor) -> Tensor:
        """Not in the background."""
        raise _cannot("a maximum over all workers")

    def send(self, x: Tensor, targets: Sequence[int]) -> Tensor:
        """Not in the background."""
        raise _cannot("messages between pairs")

    def place(self, value: Tensor) -> None:
        """Not in the background."""
        raise _cannot("a server variable")

    def fetch(self, row: int) -> Tensor:
        """Not in the background."""
        raise _cannot("a server variable")

    def push(self, row: int, change: Tensor) -> None:
        """Not in the background."""
        raise _cannot("a server variable")


def _cannot(what: str) -> UsageError:
    return UsageError(
        f"trigger = 'background' with a rule that needs {what}; only the leader rule pulls one worker's "
        "weights; use trigger = 'fixed'"
    )


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A snapshot on its way to a worker.

    Args:
        view: what the worker saw at its round, the choice that it made.
        sources: numbers of the workers whose snapshots come.
        arrival: when the last of them is there.
        signals: the worker's at the round.
    """

    view: Behind
    sources: tuple[int, ...]
    arrival: float
    signals: Signals


def check_background(rule: SyncRule[Any]) -> None:
    """Refuse rules and policies that background rounds cannot have.

    Raises:
        UsageError: the rule is not the leader rule (or none), or a policy needs more than a snapshot.
    """
    if isinstance(rule, Independent):
        return
    if not isinstance(rule, Leader):
        raise _cannot("all workers at once")
    if rule.momentum_policy == "interpolate" or rule.statistics_policy == "mean":
        raise UsageError(
            f"trigger = 'background' with momentum_policy = {rule.momentum_policy!r}, statistics_policy = "
            f"{rule.statistics_policy!r}; snapshots hold weights and a leader's statistics; use 'keep' or "
            "'reset', and 'own', 'leader' or 'recompute'"
        )
    if rule.anchor > 0:
        raise UsageError(
            f"trigger = 'background' with anchor = {rule.anchor:g}; an anchor is kept between rounds that all "
            "hold together; use anchor = 0, or trigger = 'fixed'"
        )


class BackgroundRun(Alone):
    """A simulated run of the leader rule with background rounds."""

    def __init__(self, crew: Crew) -> None:
        check_background(crew.setup.rule)
        super().__init__(crew)
        self.board: dict[int, Snapshot] = {}
        self._fetches: dict[int, Fetch] = {}
        self._next_round: dict[int, int] = {}

    def _leader(self) -> int | None:
        """Row of the best that has published; the first row before anybody has."""
        known = {n: shot.score for n, shot in self.board.items() if shot.score == shot.score}
        if not known:
            return 0
        return self.crew.rank(min(known, key=lambda number: (known[number], number)))

    def _begin(self, member: Member) -> None:
        """On the way to the next round, or to the step by which a snapshot has come."""
        period = self.rule.period or 1
        due = self._next_round.setdefault(member.number, member.done + period)
        steps = due - member.done
        fetch = self._fetches.get(member.number)
        if fetch is not None:
            ends = member.clock.ends(member.ready, first=member.done, steps=steps)
            steps = min(steps, int((ends < fetch.arrival).sum()) + 1)
        self._send(member, steps, steps)

    def _stop(self, row: int) -> None:
        member = self.crew.members[row]
        fetch = self._fetches.get(member.number)
        if fetch is not None and fetch.arrival <= member.ready:
            del self._fetches[member.number]
            self._apply(row, fetch)
        if member.done == self._next_round[member.number]:
            self._next_round[member.number] += self.rule.period or 1
            self._round(row)

    def _round(self, row: int) -> None:
        """Publish, and begin to fetch the best snapshot there is."""
        crew, member = self.crew, self.crew.members[row]
        crew.leases.settle([member.number])
        signals = self._signals(row)
        mine = crew.x[row : row + 1]
        weights = mine.clone()
        view = self._view(row)
        outcome = self.rule.exchange_round(self.states[member.number], mine, view, signals)
        score = float("nan") if view.score is None else view.score
        self.published[member.number] = weights[0]
        if crew.setup.wire == "bf16":
            weights = weights.to(torch.bfloat16).to(weights.dtype)
        self.board[member.number] = Snapshot(
            weights=weights,
            buffers={name: rows[row].clone() for name, rows in crew.stack.buffers.items()},
            score=score,
            time=member.ready,
            done=member.done,
        )
        self._send_scores(member)
        crew.record.rounds += 1
        for event in outcome.events:
            if event.kind in ("round", "lock_in"):
                crew.happened(event.kind, member.ready, **{**event.values, "by": member.number})
        if not view.wanted:
            self.states[member.number] = outcome.state
        elif member.number in self._fetches:
            crew.record.late_pulls += 1
        else:
            self._fetch(row, view, signals)

    def _fetch(self, row: int, view: Behind, signals: Signals) -> None:
        """Snapshots begin their way; the worker does not wait for them."""
        crew, member = self.crew, self.crew.members[row]
        size = self._snapshot_bytes()
        arrival = member.ready
        for source in dict.fromkeys(view.wanted):
            hop = Transfer(kind="send", workers=(source, member.number), size=size)
            self.exchange.traffic.add(hop)
            price = price_of(crew.links.network, hop)
            begin = crew.links.start(price.ports, arrival, price.seconds)
            crew.links.count(price.hops)
            crew.record.formula_bytes += price.formula_bytes
            arrival = begin + price.seconds
        self.exchange.traffic.take()
        sources = tuple(dict.fromkeys(view.wanted))
        frozen = Behind(row, view.members, view.group_of, view.board, view.score)
        self._fetches[member.number] = Fetch(
            view=frozen, sources=sources, arrival=arrival, signals=signals
        )

    def _snapshot_bytes(self) -> int:
        stack = self.crew.stack
        item = 2 if self.crew.setup.wire == "bf16" else stack.parameters.element_size()
        size = stack.layout.numbers * item
        if getattr(self.rule, "statistics_policy", "own") == "leader":
            size += sum(b[0].numel() * b.element_size() for b in stack.buffers.values())
        return size

    def _send_scores(self, member: Member) -> None:
        """The score to everybody else: over a round of all, the bytes of an all-gather."""
        crew = self.crew
        others = [m.number for m in crew.members if m is not member]
        for other in others:
            self.exchange.traffic.add(
                Transfer(kind="send", workers=(member.number, other), size=SCORE_BYTES)
            )
        self.exchange.traffic.take()
        price = messages(crew.links.network, [(member.number, o, SCORE_BYTES) for o in others])
        crew.links.count(price.hops)
        crew.record.formula_bytes += price.formula_bytes

    def _apply(self, row: int, fetch: Fetch) -> None:
        """The pull, between two steps, by the choice made at the round."""
        crew, member = self.crew, self.crew.members[row]
        view = fetch.view  # ranks in it are those of the round, whoever has come or gone since
        mine = crew.x[row : row + 1]
        signals = replace(fetch.signals, judge=self._judge(row))
        outcome = self.rule.exchange_round(self.states[member.number], mine, view, signals)
        self._follow(row, outcome, view)
        mine.copy_(outcome.x)
        self.states[member.number] = outcome.state
        for source in fetch.sources:
            shot = view.board[source]
            crew.record.snapshot_ages.append(member.ready - shot.time)
            if source in self.ways:
                now = self.ways[source].done_by(member.ready)
                crew.record.snapshot_lags.append(max(0, now - shot.done))
        for event in outcome.events:
            if event.kind in ("replaced", "refused"):
                crew.happened(event.kind, member.ready, step=event.step, **event.values)

    def _follow(self, row: int, outcome: Outcome[Any], view: Behind) -> None:
        """Momentum and statistics after a pull; what is fetched is a leader's snapshot."""
        stack = self.crew.stack
        policy, statistics = self.rule.momentum_policy, self.rule.statistics_policy
        for pull in outcome.pulls:
            slots = {name: slot[row : row + 1] for name, slot in stack.slots.items()}
            for name, value in merge_momentum(policy, slots, pull, view).items():
                stack.slots[name][row : row + 1] = value
            if pull.rows and (statistics == "leader" or pull.replaced):
                source = view.members[pull.sources[view.ranks[0]]]
                for name, value in view.board[source].buffers.items():
                    stack.buffers[name][row] = value

    def _view(self, row: int) -> Behind:
        members = self.crew.members
        here = {member.number for member in members}
        return Behind(
            row,
            [member.number for member in members],
            [member.group for member in members],
            {number: shot for number, shot in self.board.items() if number in here},
        )

    def _signals(self, row: int) -> Signals:
        crew, number = self.crew, self.crew.members[row].number
        return replace(
            self.signals[number],
            scores=crew.scores(getattr(self.rule, "score", "own"), row),
            judge=self._judge(row),
        )

    def _judge(self, row: int) -> Any:
        crew, member = self.crew, self.crew.members[row]

        def judge(x: Tensor) -> list[float]:
            buffers = {name: rows[row] for name, rows in crew.stack.buffers.items()}
            return [crew.judge.loss(vector, buffers, member.recent) for vector in x]

        return judge

    def _remove(self, row: int, how: str) -> None:
        """With a worker its snapshot is gone, and whatever was still on its way from it."""
        number, time = self.crew.members[row].number, self.time
        self.board.pop(number, None)
        self._fetches.pop(number, None)
        self._next_round.pop(number, None)
        for other, fetch in list(self._fetches.items()):
            if number in fetch.sources and fetch.arrival > time:
                del self._fetches[other]
                self.crew.happened("lost_pull", time, worker=other, source=number)
        super()._remove(row, how)
