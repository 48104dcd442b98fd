"""The shipped suite finds each kind of fault, in rules that are right but for that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from shoal.sync import Exchange, LocalSGD, Outcome, Signals, SyncRule
from shoal.sync.states import Counters, StateValue
from shoal.testing import sync as suite
from shoal.testing.sync_formulas import FORMULAS


@dataclass(frozen=True, kw_only=True)
class Sound(SyncRule[Counters]):
    """Local SGD again, to be broken below."""

    sync_every: int = 3

    name = "sound"
    alone = "plain SGD"
    state_type = Counters

    @property
    def period(self) -> int:
        return self.sync_every

    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> Counters:
        return Counters()

    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        x = exchange.mean(x).repeat(x.shape[0], 1)
        return Outcome(x=x, state=replace(state, since=0), is_round=True)


class WritesInPlace(Sound):
    def after_step(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        return super().after_step(state, x, exchange, signals)

    def before_step(self, state: Counters, x: Tensor) -> tuple[Tensor, Counters]:
        return x.mul_(0.5), state


class LooksAtOtherRows(Sound):
    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        mean = x.mean(dim=0, keepdim=True).expand_as(x).clone()
        return Outcome(x=mean, state=replace(state, since=0), is_round=True)


class ForgetsItsCount(Sound):
    def state_dict(self, state: Counters) -> dict[str, StateValue]:
        return super().state_dict(replace(state, since=0))


class SkipsARound(Sound):
    def is_due(self, state: Counters) -> bool:
        return state.since >= self.sync_every and state.steps != 2 * self.sync_every


class NeverSilent(Sound):
    def rest(self, state: Counters, x: Tensor, exchange: Exchange) -> Outcome[Counters]:
        exchange.mean(x)
        return Outcome(x=x, state=state)


class FollowsTheFirst(Sound):
    """Takes whatever comes first among losses that are not a number."""

    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        assert signals.losses is not None
        scores = exchange.scores(signals.losses.tolist())
        share = scores[0] / min(scores)
        mean = exchange.mean(x).repeat(x.shape[0], 1) * share
        return Outcome(x=mean, state=replace(state, since=0), is_round=True)


class NotQuitePlain(Sound):
    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        moved = x + (exchange.mean(x) - x * (1 + 1e-6))
        return Outcome(x=moved, state=replace(state, since=0), is_round=True)


class TakesAnyState(Sound):
    def load_state_dict(self, values: Any) -> Counters:
        return Counters(steps=values["steps"], since=values["since"])


class MovesOldWorkers(Sound):
    def welcome(
        self, state: Counters, x: Tensor, rows: Sequence[int], exchange: Exchange
    ) -> tuple[Tensor, Counters]:
        return exchange.mean(x).repeat(x.shape[0], 1), state


class KeepsCounting(Sound):
    def exchange_round(
        self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[Counters]:
        outcome = super().exchange_round(state, x, exchange, signals)
        since = state.since % self.sync_every
        return replace(outcome, state=replace(outcome.state, since=since))


class SaysNothing(Sound):
    alone = ""


FAULTS: list[tuple[type[Sound], Callable[[Any], None], str]] = [
    (WritesInPlace, lambda rule: suite.check_purity(rule, 2), "has written into the weights"),
    (LooksAtOtherRows, lambda rule: suite.check_one_row_each(rule, 3), "rows that are not its own"),
    (ForgetsItsCount, lambda rule: suite.check_resume(rule, 2), "came back changed"),
    (SkipsARound, lambda rule: suite.check_counter(rule, 2), r"they are due after \[3, 6, 9, 12\]"),
    (
        NeverSilent,
        lambda rule: suite.check_bytes(rule, 2, FORMULAS["local_sgd_3"]),
        "the formula says",
    ),
    (FollowsTheFirst, lambda rule: suite.check_bad_scores(rule, 3), "are not finite"),
    (NotQuitePlain, suite.check_alone, "not plain SGD, first in step 2"),
    (TakesAnyState, suite.check_foreign_state, "accepted a state"),
    (MovesOldWorkers, lambda rule: suite.check_joins(rule, 2), "a join moved workers"),
    (KeepsCounting, lambda rule: suite.check_early_round(rule, 2), "it begins anew"),
    (SaysNothing, suite.check_declarations, "alone is empty"),
]


@pytest.fixture(autouse=True)
def formula_of_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(rule: Sound, p: int, size: int, steps: int) -> int:
        return FORMULAS["local_sgd"](LocalSGD(sync_every=rule.sync_every), p, size, steps)

    monkeypatch.setitem(FORMULAS, "local_sgd_3", formula)
    monkeypatch.setitem(FORMULAS, "sound", formula)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_sound_rule_passes(workers: int) -> None:
    suite.check_rule(Sound(), workers=workers)


@pytest.mark.parametrize(
    ("kind", "check", "message"), FAULTS, ids=[k.__name__ for k, _, _ in FAULTS]
)
def test_a_fault_is_found_by_its_check(
    kind: type[Sound], check: Callable[[Any], None], message: str
) -> None:
    check(Sound())
    with pytest.raises(AssertionError, match=message):
        check(kind())


def test_a_rule_of_which_workers_ask_for_different_things_is_no_hang() -> None:
    class Deserts(Sound):
        def exchange_round(
            self, state: Counters, x: Tensor, exchange: Exchange, signals: Signals
        ) -> Outcome[Counters]:
            if 1 in exchange.ranks and len(exchange.ranks) == 1:
                raise ValueError("rank 1 will not")
            return super().exchange_round(state, x, exchange, signals)

    with pytest.raises(ValueError, match="rank 1 will not"):
        suite.check_one_row_each(Deserts(), 2)
    assert torch.get_num_threads() == 1
