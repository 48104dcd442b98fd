"""One worker as the supervisor knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Member:
    """One worker, from its start to its end. Times are monotonic seconds of the supervisor."""

    name: str
    index: int
    host: str  # "" for the supervisor's own machine, else the joining machine's name
    started: float
    pid: int | None = None
    hello: float | None = None
    at_barrier: bool = False
    heard: float | None = None  # last report
    row: dict[str, object] = field(default_factory=dict)
    progressed: float = 0.0  # when its phase last began or its report last changed
    leave: float | None = None  # when it was asked to leave
    closed: bool = False  # its link was closed in order; it says nothing any more
    killed: str | None = None  # why the supervisor killed it: "script", "hang", "drain"
    is_victim: bool = False  # killed for hanging, but another one did
    ended: float | None = None
    code: int | None = None
    knocks: int = 0
    events_seen: int = 0
    rows_seen: int = 0

    @property
    def alive(self) -> bool:
        """Whether its process is not known to have ended."""
        return self.ended is None

    @property
    def staying(self) -> bool:
        """Alive, and neither asked to leave nor killed."""
        return self.alive and self.leave is None and self.killed is None

    @property
    def is_unneeded(self) -> bool:
        """Asked to leave before it has said hello: it has no state to save, and cannot hear of it."""
        return self.alive and self.leave is not None and self.hello is None

    @property
    def commits(self) -> float:
        """Exchanges its state went through, as reported; -1 before the first report."""
        return number(self.row, "commits", -1)


def number(row: Mapping[str, object], key: str, default: float) -> float:
    """The number at ``key`` of a worker's report, or ``default`` where it holds none."""
    value = row.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
