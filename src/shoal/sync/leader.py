"""Leader (stochastic) gradient descent: workers are pulled toward the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, nan

import torch
from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.scaling.checks import flag, number_in, whole_number
from shoal.sync.checks import momentum_policy, multiple, one_of, statistics_policy
from shoal.sync.choice import (
    Reign,
    ScoreName,
    choose,
    choose_in_groups,
    lead_margin,
    no_reign,
)
from shoal.sync.contract import (
    Event,
    Exchange,
    MomentumPolicy,
    Outcome,
    Signals,
    StatisticsPolicy,
    SyncRule,
)
from shoal.sync.pulling import follow, toward
from shoal.sync.states import PER_ROW, PER_ROW_FROM_ZERO, Counters
from shoal.sync.windows import noted, window_scores


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaderState(Counters):
    """What the leader rule remembers.

    Args:
        rounds: rounds held.
        windows: ``[rows, window]`` float64, the last losses, used as a ring.
        filled: ``[rows]`` int64, losses ever written there.
        led, leader, switches: see :class:`~shoal.sync.choice.Reign`.
        local_anchor: ``[rows, d]``, the local leader last received; None without an anchor.
        global_anchor: ``[rows, d]``, likewise of the global leader.
        leads_group: ``[rows]`` bool, who led its group in the last round.
        leads_fleet: ``[rows]`` bool, who led the fleet in the last global round.
    """

    rounds: int = 0
    windows: Tensor = field(metadata=PER_ROW_FROM_ZERO)
    filled: Tensor = field(metadata=PER_ROW_FROM_ZERO)
    led: Tensor
    leader: int = -1
    switches: int = 0
    local_anchor: Tensor | None = field(default=None, metadata=PER_ROW)
    global_anchor: Tensor | None = field(default=None, metadata=PER_ROW)
    leads_group: Tensor | None = field(default=None, metadata=PER_ROW_FROM_ZERO)
    leads_fleet: Tensor | None = field(default=None, metadata=PER_ROW_FROM_ZERO)


@dataclass(frozen=True, kw_only=True)
class Leader(SyncRule[LeaderState]):
    """Pull every worker toward the one with the lowest loss, every ``sync_every`` optimizer steps.

    Use it on slow links, with bad or unequal workers, or on rugged landscapes: nothing is averaged, so a
    worker that is wrong pulls nobody. It moves half the bytes of averaging per round. It does not make
    good, equal workers on an easy problem faster than averaging does.

    With x the worker's weights after the complete optimizer step, z its group's leader and z_G the leader
    of all, first the local pull and then, every ``global_sync_every`` steps, the global one::

        x <- x + pull (z - x)             x <- x + global_pull (z_G - x)

    A leader is a worker as it is, never an average, and is not moved by its own pull. Between rounds
    nothing pulls. With one group the local leader leads all, and there is only the first pull.

    Args:
        sync_every: optimizer steps between rounds (tau), >= 1.
        global_sync_every: steps between global rounds (tau_G), a multiple of ``sync_every``. Of effect
            with two groups or more.
        pull: fraction lambda of the way to the local leader, in [0, 1]. Independent of the learning
            rate; the theorems' penalty weight is pull / lr, which
            :func:`~shoal.sync.pulling.pull_scalings` prints. At 0 no weights travel.
        global_pull: the same toward the leader of all.
        groups: how many groups the workers form at the start, >= 1; they may lose some later.
        score: the loss that chooses: ``"own"`` training losses of the last ``window`` steps; a common
            ``"probe"`` set or a ``"held_out"`` one, which the driver evaluates; ``"auto"``: what the
            driver has evaluated, else ``"own"`` (it evaluates a probe set where each worker keeps its
            own part of the data; see :func:`~shoal.sync.choice.resolve_score`).
        window: losses averaged, >= 1; where there are fewer, those that there are.
        verify: followers score a leader themselves before it may pull them; needs ``Signals.judge``.
            A worker that lies about its loss is then harmless.
        anchor: in the steps without a round, pull followers toward the leader they last received, by
            anchor / sync_every a step (global leader: anchor / global_sync_every, and before the local
            one). In [0, 1]; 0: nothing.
        momentum_policy: of a follower's momentum: ``"keep"`` it, ``"reset"``, or ``"interpolate"`` as weights.
        statistics_policy: of BatchNorm: each its ``"own"``, the ``"leader"``'s, the ``"mean"``, or
            ``"recompute"``.

    Raises:
        UsageError: an argument outside its range.

    Source: Teng et al. 2019 (arXiv 1905.10395), Algorithm 1; pull 0.1 as in the authors' later code, tau
        64 and tau_G 128 as in their earlier scripts, window 10 (notes, 1.5 and 2.2). The anchor: their
        later code (notes, 1.3).
    Deviates: a worker with a score or weights that are not finite never leads, and as a follower is
        replaced whole, since a pull would keep what is not finite; a group without any finite score
        follows the leader of all; of equal scores the lowest rank leads; a window that is not full is
        not padded with zeros; a leader is exempt from the anchor, which theirs is not. Each is a
        defect of the authors' code by the notes (2.3).

    Example:
        >>> from shoal.sync.stacked import Stacked
        >>> rule, exchange = Leader(sync_every=1, pull=0.5), Stacked(2)
        >>> x = torch.tensor([[0.0], [8.0]])
        >>> outcome = rule.after_step(
        ...     rule.init(x, exchange), x, exchange, Signals(losses=torch.tensor([0.3, 0.9]))
        ... )
        >>> outcome.x.tolist()
        [[0.0], [4.0]]
    """

    sync_every: int = 64
    global_sync_every: int = 128
    pull: float = 0.1
    global_pull: float = 0.1
    groups: int = 1
    score: ScoreName = "auto"
    window: int = 10
    verify: bool = False
    anchor: float = 0.0
    momentum_policy: MomentumPolicy = "keep"
    statistics_policy: StatisticsPolicy = "own"

    name = "leader"
    alone = "plain SGD: the only worker leads, and a leader is not pulled"
    state_type = LeaderState

    def __post_init__(self) -> None:
        whole_number("Leader", "sync_every", self.sync_every, at_least=1)
        whole_number("Leader", "global_sync_every", self.global_sync_every, at_least=1)
        multiple("Leader", "global_sync_every", self.global_sync_every, of=self.sync_every)
        for name in ("pull", "global_pull", "anchor"):
            number_in("Leader", name, getattr(self, name), low=0, high=1)
        whole_number("Leader", "groups", self.groups, at_least=1)
        whole_number("Leader", "window", self.window, at_least=1)
        one_of("Leader", "score", self.score, ("auto", "own", "probe", "held_out"))
        flag("Leader", "verify", self.verify)
        if self.anchor > 0 and self.pull == 0:
            raise UsageError(
                f"anchor = {self.anchor:g} with pull = 0; no leader is received, so there is none to hold on "
                "to; write Leader(anchor=0.0), or a pull above 0"
            )
        momentum_policy("Leader", self.momentum_policy)
        statistics_policy("Leader", self.statistics_policy)

    @property
    def period(self) -> int:
        """``sync_every``."""
        return self.sync_every

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> LeaderState:
        """No losses yet, nobody has led.

        Raises:
            UsageError: the workers form another number of groups than the rule asks for.
        """
        found = len(set(exchange.group_of))
        if found != self.groups:
            raise UsageError(
                f"groups = {self.groups}; the workers at the start form {found}; form as many groups as the "
                f"rule asks for, or write Leader(groups={found})"
            )
        rows = x.shape[0]
        return LeaderState(
            windows=torch.zeros((rows, self.window), dtype=torch.float64),
            filled=torch.zeros(rows, dtype=torch.int64),
            led=no_reign(),
        )

    def observe(self, state: LeaderState, signals: Signals) -> LeaderState:
        """Count the step and note the losses of the rows that had samples."""
        state = super().observe(state, signals)
        if signals.losses is None:
            return state
        windows, filled = noted(state.windows, state.filled, signals.losses, signals.counts)
        return replace(state, windows=windows, filled=filled)

    def rest(self, state: LeaderState, x: Tensor, exchange: Exchange) -> Outcome[LeaderState]:
        """Nothing; with an anchor the small pull toward the leaders last received."""
        if self.anchor == 0 or state.local_anchor is None:
            return Outcome(x=x, state=state)
        if state.global_anchor is not None:
            part = self.anchor / self.global_sync_every
            x = toward(x, state.global_anchor, part, exempt=state.leads_fleet)
        part = self.anchor / self.sync_every
        x = toward(x, state.local_anchor, part, exempt=state.leads_group)
        return Outcome(x=x, state=state)

    def exchange_round(
        self, state: LeaderState, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[LeaderState]:
        """Scores, the local leaders' weights, and in a global round the global leader's."""
        state = replace(state, since=0, rounds=state.rounds + 1)
        if exchange.workers == 1:
            return Outcome(x=x, state=state)
        scores = exchange.scores(self._own_scores(state, x, signals))
        leader = choose(scores, step=state.steps)
        everyone = (leader,) * exchange.workers
        is_grouped = len(set(exchange.group_of)) > 1
        local = (
            choose_in_groups(scores, exchange.group_of, step=state.steps)
            if is_grouped
            else everyone
        )
        judge = signals.judge if self.verify else None
        moves = [follow(x, local, self.pull, exchange, judge=judge)]
        is_global = is_grouped and state.rounds % self._rounds_per_global == 0
        if is_global:
            moves.append(follow(moves[0].x, everyone, self.global_pull, exchange, judge=judge))
        state, events = self._record(state, scores, leader, local, exchange)
        for move in moves:
            events += move.events(state.steps, exchange)
        state = self._emptied(state, sorted({row for move in moves for row in move.replaced}))
        if self.anchor > 0:
            state = replace(
                state,
                local_anchor=moves[0].received,
                leads_group=moves[0].is_leader,
            )
            if is_global:
                state = replace(
                    state,
                    global_anchor=moves[1].received,
                    leads_fleet=moves[1].is_leader,
                )
        return Outcome(
            x=moves[-1].x,
            state=state,
            events=tuple(events),
            pulls=tuple(
                move.as_pull(is_repairing=inf in scores) for move in moves if move.fraction > 0
            ),
            is_round=True,
        )

    @property
    def _rounds_per_global(self) -> int:
        return self.global_sync_every // self.sync_every

    def _own_scores(self, state: LeaderState, x: Tensor, signals: Signals) -> list[float]:
        """Each local row's score: not a number if it is not finite, infinite if its weights are not.

        So everybody knows from the scores alone whether some worker must be replaced.
        """
        if self.verify and signals.judge is None:
            raise UsageError(
                "Leader(verify=True) without a judge; followers score the received leader themselves; pass "
                "Signals(judge=...), or set verify=False"
            )
        is_given = self.score == "auto" and signals.scores is not None
        if is_given or self.score in ("probe", "held_out"):
            if signals.scores is None:
                raise UsageError(
                    f"Leader(score={self.score!r}) without scores at step {state.steps}; evaluate them "
                    "before a round and pass Signals(scores=...)"
                )
            scores: list[float] = signals.scores.tolist()
        else:
            scores = window_scores(state.windows, state.filled)
        is_sound: list[bool] = torch.isfinite(x).all(dim=1).tolist()
        return [
            (score if isfinite(score) else nan) if sound else inf
            for score, sound in zip(scores, is_sound, strict=True)
        ]

    def _record(
        self,
        state: LeaderState,
        scores: list[float],
        leader: int,
        local: tuple[int, ...],
        exchange: Exchange,
    ) -> tuple[LeaderState, list[Event]]:
        """Who led, by how much, how often, and whether it is always the same."""
        before = Reign(led=state.led, leader=state.leader, switches=state.switches)
        reign = before.after(exchange.members[leader])
        state = replace(state, led=reign.led, leader=reign.leader, switches=reign.switches)
        values: dict[str, object] = {
            "round": state.rounds,
            "scores": scores,
            "leader": reign.leader,
            "local_leaders": [exchange.members[rank] for rank in local],
            "margin": lead_margin(scores, leader),
            "switches": reign.switches,
            "share": reign.share,
        }
        events = [Event(kind="round", step=state.steps, values=values)]
        if reign.is_locked_in and not before.is_locked_in:
            alarm = {"worker": reign.leader, "share": reign.share, "rounds": reign.rounds}
            events.append(Event(kind="lock_in", step=state.steps, values=alarm))
        return state, events

    @staticmethod
    def _emptied(state: LeaderState, rows: Sequence[int]) -> LeaderState:
        """Forget the losses of rows whose weights were replaced: they are another model's."""
        if not rows:
            return state
        filled = state.filled.clone()
        filled[list(rows)] = 0
        return replace(state, filled=filled)
