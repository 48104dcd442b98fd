"""Rules with a server variable: each worker visits the server alone, every so many of its own steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.sync.contract import SyncRule
from shoal.sync.stacked import Stacked
from shoal.world.virtual.alone import Alone
from shoal.world.virtual.crew import Member
from shoal.world.virtual.outlook import outlook


def has_server(rule: SyncRule[Any], x: Tensor, layout: Sequence[Size]) -> bool:
    """Whether a rule keeps its average on a server.

    Args:
        rule: the rule.
        x: any weights ``[rows, d]``.
        layout: shapes of the parameters.
    """
    aside = Stacked(len(x))
    rule.init(x, aside, layout)
    try:
        return aside.server is not None
    except UsageError:
        return False


class ServerRun(Alone):
    """A simulated run of asynchronous EASGD, EAMSGD or DOWNPOUR.

    A visit is a fetch and a push. The server has one port each way, so visits wait for each other.
    """

    def _center(self) -> Tensor | None:
        return self.exchange.server

    def _begin(self, member: Member) -> None:
        row = self.crew.rank(member.number)
        assert row is not None
        ahead = outlook(
            self.rule, self.states[member.number], self.crew.x[row : row + 1], self.exchange
        )
        self._send(member, ahead.steps, ahead.silent)

    def _stop(self, row: int) -> None:
        crew, member = self.crew, self.crew.members[row]
        mine = crew.x[row : row + 1]
        outcome = self.rule.exchange_round(
            self.states[member.number],
            mine,
            self.exchange.only(row),
            self.signals[member.number],
        )
        mine.copy_(outcome.x)
        self.states[member.number] = outcome.state
        self.published[member.number] = mine[0].clone()
        self._carry(self.exchange.traffic.take(), member)
        crew.leases.settle([member.number])
        crew.record.rounds += 1
