"""What travels: a record of every transfer that a rule asked for, and its exact payload by class of link.

Payload with p workers and messages of N bytes:

    scores      p (p - 1) m      every worker's m bytes to every other one
    broadcast   (p - 1) N        a chain through those who listen, node by node
    mean        2 (p - 1) N      a ring: reduce-scatter and all-gather, node by node; largest likewise
    fetch, push N                between a worker and the server
    send        N                from each worker to one other

The seconds that these take are priced elsewhere, from the same records.

Source: Teng et al. 2019 as costed in section 5 of the notes; the score message is the paper's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

TransferKind = Literal["scores", "broadcast", "mean", "largest", "fetch", "push", "send"]
LinkClass = Literal["intra", "inter"]

SERVER = -1
"""The server's place among the workers: on a node of its own."""

SCORE_BYTES = 12
"""A score message: three numbers of 4 bytes in the paper; here a rank of 4 bytes and a score of 8."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective, or one message.

    Args:
        kind: what it is.
        workers: who takes part, by number in the run; of a message its sender and its receiver.
        size: bytes of one message.
        source: who has what is broadcast.
    """

    kind: TransferKind
    workers: tuple[int, ...]
    size: int
    source: int | None = None


Hop = tuple[int, int, int]
"""(from, to, bytes)"""


def hops(transfer: Transfer, nodes: dict[int, int]) -> list[Hop]:
    """The messages of a transfer, one by one.

    Args:
        transfer: the transfer.
        nodes: the node of each worker.
    """
    size, everyone = transfer.size, transfer.workers
    if transfer.kind in ("fetch", "push", "send"):
        source, target = everyone
        return [(source, target, size)] if source != target else []
    if transfer.kind == "scores":
        return [(a, b, size) for a in everyone for b in everyone if a != b]
    if transfer.kind == "broadcast":
        assert transfer.source is not None
        line = _node_by_node(everyone, nodes, first=transfer.source)
        return [(a, b, size) for a, b in pairwise(line)]
    return _ring(_node_by_node(everyone, nodes), size)


def _node_by_node(
    workers: Sequence[int], nodes: dict[int, int], first: int | None = None
) -> list[int]:
    home = None if first is None else nodes[first]
    return sorted(workers, key=lambda w: (nodes[w] != home, nodes[w], w != first, w))


def _ring(line: list[int], size: int) -> list[Hop]:
    """Around the ring each piece is sent 2 (p - 1) times; a worker sends all but two of them twice."""
    count = len(line)
    if count < 2:
        return []
    each, extra = divmod(size, count)
    pieces = [each + (place < extra) for place in range(count)]
    return [
        (
            line[place],
            line[(place + 1) % count],
            2 * size - pieces[(place + 1) % count] - pieces[(place + 2) % count],
        )
        for place in range(count)
    ]


def link_bytes(transfer: Transfer, nodes: dict[int, int]) -> dict[LinkClass, int]:
    """The bytes of a transfer by class of link: the sum over :func:`hops`.

    Args:
        transfer: the transfer.
        nodes: the node of each worker.
    """
    counted: dict[LinkClass, int] = {"intra": 0, "inter": 0}
    if transfer.kind == "scores":
        # All pairs, of which hundreds of workers have too many to list in every round.
        workers = len(transfer.workers)
        sizes = Counter(nodes[worker] for worker in transfer.workers)
        inside = sum(count * (count - 1) for count in sizes.values())
        counted["intra"] = inside * transfer.size
        counted["inter"] = (workers * (workers - 1) - inside) * transfer.size
        return counted
    places = {**nodes, SERVER: SERVER}
    for source, target, size in hops(transfer, nodes):
        counted["intra" if places[source] == places[target] else "inter"] += size
    return counted


@dataclass(kw_only=True)
class Traffic:
    """Every transfer so far, and its bytes.

    Args:
        nodes: the node of each worker.
    """

    nodes: dict[int, int]
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    payload_bytes: dict[LinkClass, int] = field(default_factory=lambda: {"intra": 0, "inter": 0})
    sent_bytes: dict[TransferKind, int] = field(default_factory=dict[TransferKind, int])

    def add(self, transfer: Transfer) -> None:
        """Note a transfer and count its messages."""
        self.transfers.append(transfer)
        for link, size in link_bytes(transfer, self.nodes).items():
            self.payload_bytes[link] += size
            self.sent_bytes[transfer.kind] = self.sent_bytes.get(transfer.kind, 0) + size

    def total_bytes(self) -> int:
        """Payload of all transfers, all links together."""
        return sum(self.payload_bytes.values())

    def take(self) -> list[Transfer]:
        """The transfers noted since the last call; their bytes stay counted."""
        taken, self.transfers = self.transfers, []
        return taken
