"""What a collective costs on given links: seconds, messages, and the bytes its formula says.

With p workers, messages of N bytes, latency a and bandwidth B of one class of links:

    tree              ceil(log2 p) (a + N/B)         (p - 1) N
    chain             (p - 1) a + N/B                (p - 1) N          pipelined
    ring              2 (p - 1) (a + N/(p B))        2 (p - 1) N        all-reduce
    parameter server  2 p (a + N/B)                  2 p N              one worker after another
    score all-gather  ceil(log2 p) a                 p (p - 1) m        m bytes of each worker

Where the workers are on several nodes, a line or ring goes node by node, so that it crosses each border
once; its latency is that of its own hops and its bandwidth that of the slowest of them. Bytes are counted
from the messages themselves, which are listed one by one; the formula stands beside them.

Source: section 5 of the notes on Teng et al. 2019.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.sync.traffic import SERVER, Transfer
from shoal.world.virtual.links import Hop, LinkName, Network, Port


@dataclass(frozen=True, kw_only=True)
class Price:
    """One collective or transfer.

    Args:
        seconds: from its start to its end on free links.
        hops: its messages.
        ports: what it takes while it lasts.
        formula_bytes: its payload by the table above, all links together.
    """

    seconds: float
    hops: tuple[Hop, ...]
    ports: tuple[Port, ...]
    formula_bytes: int

    def counted_bytes(self, network: Network, name: LinkName | None = None) -> int:
        """The bytes of its messages, of one class of links or of both."""
        chosen = (h for h in self.hops if name in (None, network.name(h.source, h.target)))
        return sum(hop.size for hop in chosen)


NOTHING = Price(seconds=0.0, hops=(), ports=(), formula_bytes=0)
"""What one worker alone pays."""


def chain(network: Network, source: int, workers: Sequence[int], size: int) -> Price:
    """A broadcast of ``size`` bytes from ``source`` along a pipelined line through ``workers``.

    Args:
        network: the links.
        source: who has the bytes; one of ``workers`` or not.
        workers: who has them afterwards.
        size: N, bytes.
    """
    line = network.in_order({*workers, source}, first=source)
    hops = tuple(Hop(a, b, size) for a, b in itertools.pairwise(line))
    if not hops:
        return NOTHING
    links = [network.link(hop.source, hop.target) for hop in hops]
    latency = sum(link.latency_seconds for link in links)
    return Price(
        seconds=latency + size / min(link.bytes_per_second for link in links),
        hops=hops,
        ports=_ports(network, hops),
        formula_bytes=(len(line) - 1) * size,
    )


def tree(network: Network, source: int, workers: Sequence[int], size: int) -> Price:
    """A broadcast of ``size`` bytes by a binomial tree: in each round all who have them send them on.

    Args: as :func:`chain`.
    """
    line = network.in_order({*workers, source}, first=source)
    hops: list[Hop] = []
    seconds, have = 0.0, 1
    while have < len(line):
        targets = range(have, min(2 * have, len(line)))
        level = [Hop(line[target - have], line[target], size) for target in targets]
        seconds += max(network.seconds(hop) for hop in level)
        hops += level
        have *= 2
    return Price(
        seconds=seconds,
        hops=tuple(hops),
        ports=_ports(network, hops),
        formula_bytes=(len(line) - 1) * size,
    )


def ring(network: Network, workers: Sequence[int], size: int) -> Price:
    """An all-reduce of ``size`` bytes by reduce-scatter and all-gather around a ring.

    The bytes are cut into p pieces, equal but for a remainder. Worker i sends all pieces but one in each
    half; which one differs, so that over the ring each piece is sent 2 (p - 1) times.

    Args:
        network: the links.
        workers: who takes part.
        size: N, bytes.
    """
    line = network.in_order(workers)
    count = len(line)
    if count < 2:
        return NOTHING
    each, extra = divmod(size, count)
    pieces = [each + (place < extra) for place in range(count)]
    hops = tuple(
        Hop(
            line[place],
            line[(place + 1) % count],
            2 * size - pieces[(place + 1) % count] - pieces[(place + 2) % count],
        )
        for place in range(count)
    )
    links = [network.link(hop.source, hop.target) for hop in hops]
    latency = max(link.latency_seconds for link in links)
    bandwidth = min(link.bytes_per_second for link in links)
    return Price(
        seconds=2 * (count - 1) * (latency + size / (count * bandwidth)),
        hops=hops,
        ports=_ports(network, hops),
        formula_bytes=2 * (count - 1) * size,
    )


def parameter_server(network: Network, workers: Sequence[int], size: int) -> Price:
    """``size`` bytes from each worker to a server and back, one worker after the other.

    Args: as :func:`ring`.
    """
    hops = tuple(hop for w in workers for hop in (Hop(w, SERVER, size), Hop(SERVER, w, size)))
    return Price(
        seconds=sum(network.seconds(hop) for hop in hops),
        hops=hops,
        ports=_ports(network, hops),
        formula_bytes=2 * len(workers) * size,
    )


def score_all_gather(network: Network, workers: Sequence[int], size: int) -> Price:
    """Every worker's score message to every other one.

    The messages are so short that only latency counts.

    Args:
        network: the links.
        workers: who takes part.
        size: m, bytes of one worker's message.
    """
    hops = tuple(Hop(a, b, size) for a in workers for b in workers if a != b)
    if not hops:
        return NOTHING
    latency = max(network.link(hop.source, hop.target).latency_seconds for hop in hops)
    return Price(
        seconds=math.ceil(math.log2(len(workers))) * latency,
        hops=hops,
        ports=_ports(network, hops),
        formula_bytes=len(workers) * (len(workers) - 1) * size,
    )


def messages(network: Network, sent: Sequence[tuple[int, int, int]]) -> Price:
    """Messages that are all sent at once (gossip, one pull): the busiest port decides.

    Args:
        network: the links.
        sent: (source, target, bytes) of each.
    """
    hops = tuple(Hop(*one) for one in sent if one[0] != one[1])
    if not hops:
        return NOTHING
    busy: dict[Port, float] = {}
    for hop in hops:
        for port in network.ports(hop):
            carried = hop.size / network.link(hop.source, hop.target).bytes_per_second
            busy[port] = busy.get(port, 0.0) + carried
    latency = max(network.link(hop.source, hop.target).latency_seconds for hop in hops)
    return Price(
        seconds=latency + max(busy.values()),
        hops=hops,
        ports=tuple(sorted(busy)),
        formula_bytes=sum(hop.size for hop in hops),
    )


BroadcastName = Literal["chain", "tree"]


def price_of(network: Network, transfer: Transfer, *, broadcast: BroadcastName = "chain") -> Price:
    """What a transfer costs that a sync rule asked for.

    Args:
        network: the links.
        transfer: as the rule's exchange recorded it, its size that of the real message.
        broadcast: how weights go from one worker to others.
    """
    workers, size = transfer.workers, transfer.size
    if transfer.kind == "scores":
        return score_all_gather(network, workers, size)
    if transfer.kind in ("mean", "largest"):
        return ring(network, workers, size)
    if transfer.kind == "broadcast":
        assert transfer.source is not None, "a broadcast has a source"
        spread = chain if broadcast == "chain" else tree
        return spread(network, transfer.source, workers, size)
    source, target = workers
    return messages(network, [(source, target, size)])


def _ports(network: Network, hops: Sequence[Hop]) -> tuple[Port, ...]:
    return tuple(sorted({port for hop in hops for port in network.ports(hop)}))
