"""How far workers may train by themselves before their sync rule has anything to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.errors import UsageError
from shoal.sync.contract import Signals, SyncRule
from shoal.sync.stacked import Stacked
from shoal.sync.states import Counters

ACCOUNT_STEPS = 64
"""Steps after which the account of a rule without rounds is settled."""

_MOST_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a rule does between now and its next round.

    Args:
        steps: until the round falls due.
        silent: of them, those at the beginning around which the rule changes nothing.
        reduces: whether it exchanges gradients in the next step; ``steps`` is then 1.
        moves_before: whether ``before_step`` moves the weights.
        keeps_books: whether ``rest`` changes the state.
    """

    steps: int
    silent: int
    reduces: bool = False
    moves_before: bool = False
    keeps_books: bool = False


def outlook(rule: SyncRule[Any], state: Counters, x: Tensor, exchange: Stacked) -> Outlook:
    """What comes until the next round, found by asking the rule; nothing is sent or changed.

    Args:
        rule: of the run.
        state: its present state.
        x: present weights.
        exchange: the present workers.

    Raises:
        UsageError: no round ever falls due.
    """
    if reduces(rule, state, x, exchange):
        return Outlook(steps=1, silent=0, reduces=True)
    silent, moves_before, keeps_books = 0, False, False
    for step in range(1, _MOST_STEPS + 1):
        begun = rule.before_step(state, x)
        is_silent = begun[0] is x and begun[1] is state
        moves_before = moves_before or begun[0] is not x
        state = rule.observe(state, Signals())
        is_due = rule.is_due(state) if rule.period is not None else step >= ACCOUNT_STEPS
        if not is_due and not keeps_books and not moves_before:
            rested = rule.rest(state, x, exchange)
            is_silent = is_silent and rested.x is x
            keeps_books = rested.state is not state
        if is_silent and not keeps_books and silent == step - 1:
            silent = step
        if is_due:
            return Outlook(
                steps=step, silent=silent, moves_before=moves_before, keeps_books=keeps_books
            )
    raise UsageError(
        f"sync rule {rule.name}: no round falls due within {_MOST_STEPS} steps; lower sync_every"
    )


def reduces(rule: SyncRule[Any], state: Counters, x: Tensor, exchange: Stacked) -> bool:
    """Whether the rule exchanges gradients in the next step."""
    if type(rule).reduce_gradients is SyncRule.reduce_gradients:
        return False
    if rule.period is None:
        return True
    # A rule with rounds may exchange gradients at first only: later it gives back what it is given.
    aside = Stacked(exchange.workers)
    return rule.reduce_gradients(state, x, aside, Signals())[0] is not x
