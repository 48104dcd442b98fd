"""Links between virtual workers: two classes, the time they are taken for, and the bytes they carried.

Workers live on nodes. Two workers of one node talk over the *intra* class, others over the *inter* class.
A worker has one port of its own for traffic inside its node, and a node one port each for what leaves and
what enters it: that is where transfers wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from shoal.errors import UsageError
from shoal.sync.traffic import SERVER

LinkName = Literal["intra", "inter"]
LINKS: tuple[LinkName, LinkName] = ("intra", "inter")

Port: TypeAlias = tuple[str, int]
"""``("worker", number)``, ``("out", node)`` or ``("in", node)``."""


@dataclass(frozen=True, kw_only=True)
class LinkClass:
    """A kind of link.

    Args:
        latency_seconds: before the first byte arrives, >= 0.
        bytes_per_second: > 0.

    Raises:
        UsageError: a number outside its range.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_seconds < math.inf and 0 < self.bytes_per_second < math.inf):
            raise UsageError(
                f"link latency_seconds = {self.latency_seconds:g}, bytes_per_second = "
                f"{self.bytes_per_second:g}; the first is 0 or more, the second above 0, both finite; "
                "1 GbE is 1e-4 and 117e6"
            )

    def seconds(self, size: float) -> float:
        """Of one message of ``size`` bytes: latency + size / bandwidth."""
        return self.latency_seconds + size / self.bytes_per_second


class Hop(NamedTuple):
    """One message: ``size`` bytes from worker ``source`` to worker ``target``."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """The two classes of links, and which worker is on which node.

    Args:
        intra: inside a node; 10 GB/s and 10 us by default.
        inter: between nodes; 1 Gbit/s Ethernet (117 MB/s, 100 us) by default.
        workers_per_node: worker i is on node i // workers_per_node, >= 1; None: every worker on a node of
            its own.
        nodes: other places, by worker.

    Raises:
        UsageError: ``workers_per_node`` below 1.

    Source: Teng et al. 2019, experiment E11 of the notes: 10 GB/s inside a node, 117 MB/s between nodes.
    """

    intra: LinkClass = field(
        default_factory=lambda: LinkClass(latency_seconds=1e-5, bytes_per_second=10e9)
    )
    inter: LinkClass = field(
        default_factory=lambda: LinkClass(latency_seconds=1e-4, bytes_per_second=117e6)
    )
    workers_per_node: int | None = None
    nodes: Mapping[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise UsageError(
                f"workers_per_node = {self.workers_per_node}; a node holds at least 1; leave it out for "
                "one worker a node"
            )

    def node(self, worker: int) -> int:
        """The worker's node; the parameter server's is none of theirs."""
        if worker == SERVER:
            return SERVER
        return self.nodes.get(worker, worker // (self.workers_per_node or 1))

    def name(self, source: int, target: int) -> LinkName:
        """The class of the link between two workers."""
        return "intra" if self.node(source) == self.node(target) else "inter"

    def link(self, source: int, target: int) -> LinkClass:
        """The link between two workers."""
        return self.intra if self.name(source, target) == "intra" else self.inter

    def seconds(self, hop: Hop) -> float:
        """Of one message alone."""
        return self.link(hop.source, hop.target).seconds(hop.size)

    def ports(self, hop: Hop) -> tuple[Port, Port]:
        """What a message takes at its two ends."""
        if self.name(hop.source, hop.target) == "intra":
            return ("worker", hop.source), ("worker", hop.target)
        return ("out", self.node(hop.source)), ("in", self.node(hop.target))

    def in_order(self, workers: Iterable[int], first: int | None = None) -> list[int]:
        """Workers node by node, so that a line through them crosses each node's border once.

        Args:
            workers: distinct.
            first: begins the line, its node the first.
        """
        home = None if first is None else self.node(first)
        return sorted(workers, key=lambda w: (self.node(w) != home, self.node(w), w != first, w))


class Links:
    """When links are free, and what they have carried.

    Args:
        network: whose links.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._free: dict[Port, float] = {}
        self.counted_bytes: dict[LinkName, int] = dict.fromkeys(LINKS, 0)
        """Bytes of every message carried, by class."""
        self.messages: dict[LinkName, int] = dict.fromkeys(LINKS, 0)
        """How many messages, by class."""

    def start(self, ports: Iterable[Port], ready: float, seconds: float) -> float:
        """Take ports for a transfer as soon as all of them are free.

        Args:
            ports: what it takes, for all its time.
            ready: earliest start.
            seconds: how long it takes.

        Returns:
            When it starts, >= ``ready``.
        """
        taken = list(ports)
        begin = max([ready, *(self._free.get(port, 0.0) for port in taken)])
        for port in taken:
            self._free[port] = begin + seconds
        return begin

    def count(self, hops: Iterable[Hop]) -> None:
        """Note the bytes of messages."""
        for hop in hops:
            name = self.network.name(hop.source, hop.target)
            self.counted_bytes[name] += hop.size
            self.messages[name] += 1

    def tried(self) -> Links:
        """The same links, on which a round may be tried without a trace on these."""
        other = Links(self.network)
        other._free = dict(self._free)
        other.counted_bytes, other.messages = dict(self.counted_bytes), dict(self.messages)
        return other
