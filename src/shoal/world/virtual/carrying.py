"""A round's transfers in virtual time: who waits for whom, and for which link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.sync.traffic import Transfer
from shoal.world.virtual.links import Links
from shoal.world.virtual.pricing import BroadcastName, Price, messages, price_of


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What transfers did to those who took part.

    Args:
        ends: when each worker may go on.
        waiting: seconds each one stood still for others or for a link.
        exchanging: seconds each one stood still for bytes under way.
        formula_bytes: payload by the formulas of the prices.
    """

    ends: Mapping[int, float]
    waiting: Mapping[int, float]
    exchanging: Mapping[int, float]
    formula_bytes: int


def carry(
    links: Links,
    transfers: Sequence[Transfer],
    ready: Mapping[int, float],
    *,
    broadcast: BroadcastName = "chain",
) -> Carried:
    """Let transfers happen, each as soon as all who take part, and its links, are free.

    A transfer holds up those who take part in it and nobody else: groups whose members talk only among
    themselves do so side by side. A run of ``send``s is one exchange in which all send at once.

    Args:
        links: that carry them; their times and counts move on.
        transfers: in the order in which the rule asked for them.
        ready: when each worker has come to the round.
        broadcast: how weights go from one worker to others.

    Returns:
        For every worker of ``ready``, taking part or not.
    """
    ends = dict(ready)
    waiting, exchanging = dict.fromkeys(ready, 0.0), dict.fromkeys(ready, 0.0)
    formula_bytes = 0
    for workers, price in _priced(links, transfers, broadcast):
        here = [worker for worker in workers if worker in ends]
        earliest = max((ends[worker] for worker in here), default=0.0)
        begin = links.start(price.ports, earliest, price.seconds)
        links.count(price.hops)
        formula_bytes += price.formula_bytes
        for worker in here:
            waiting[worker] += begin - ends[worker]
            exchanging[worker] += price.seconds
            ends[worker] = begin + price.seconds
    return Carried(ends=ends, waiting=waiting, exchanging=exchanging, formula_bytes=formula_bytes)


def _priced(
    links: Links, transfers: Sequence[Transfer], broadcast: BroadcastName
) -> list[tuple[tuple[int, ...], Price]]:
    """Who takes part in each transfer, and its price; neighbouring sends as one."""
    found: list[tuple[tuple[int, ...], Price]] = []
    sends: list[Transfer] = []
    for place, transfer in enumerate(transfers):
        if transfer.kind != "send":
            found.append((transfer.workers, price_of(links.network, transfer, broadcast=broadcast)))
            continue
        sends.append(transfer)
        is_last = place + 1 == len(transfers) or transfers[place + 1].kind != "send"
        if is_last or _sends_again(sends, transfers[place + 1]):
            everyone = tuple(sorted({worker for one in sends for worker in one.workers}))
            sent = [(one.workers[0], one.workers[1], one.size) for one in sends]
            found.append((everyone, messages(links.network, sent)))
            sends = []
    return found


def _sends_again(sends: Sequence[Transfer], other: Transfer) -> bool:
    """Whether a worker of ``other`` has sent already: then it belongs to the next exchange."""
    return other.workers[0] in {one.workers[0] for one in sends}
