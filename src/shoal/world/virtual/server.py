"""Rules with a server variable: each worker visits the server alone, every so many of its own steps."""

from __future__ import annotations

from torch import Tensor

from shoal.errors import UsageError
from shoal.world.virtual.alone import Alone
from shoal.world.virtual.crew import Crew, Member
from shoal.world.virtual.outlook import outlook


def has_server(crew: Crew) -> bool:
    """Whether the rule of a fleet keeps its average on a server.

    Args:
        crew: the fleet; nothing of it is changed.
    """
    aside = crew.exchange()
    crew.setup.rule.init(crew.x, aside, crew.stack.shapes)
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
