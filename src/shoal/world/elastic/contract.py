"""What an elastic worker needs from whoever started it: the supervisor, or a test.

The world talks to the coordinator (the lighthouse) and to its peers by itself. Everything else it
learns through a link. A link answers from memory: of its calls only ``ready`` may block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Link(Protocol):
    """This worker's side of the supervisor's control endpoint."""

    @property
    def coordinator(self) -> str:
        """Address of the lighthouse, ``http://HOST:PORT``; read again after it was lost."""
        ...

    @property
    def name(self) -> str:
        """This worker's name: unique in the run, not even used again by its replacement."""
        ...

    @property
    def token(self) -> str:
        """The run's secret. Peers show it when they fetch state; it never enters a quorum."""
        ...

    @property
    def advertise(self) -> str:
        """Host name or address under which other workers reach this one; also what is bound."""
        ...

    def ready(self) -> None:
        """Block until this worker may enter its first quorum: the start barrier.

        Raises:
            ResumableStop: the supervisor, which bounds the wait, gave the start up.
        """
        ...

    def announce(self) -> None:
        """Knock: ``joins()`` grows by one on all other workers.

        Called, when this worker's heartbeats run, just before the first quorum request of a blank
        worker, and again about once a second by any worker whose request stays unanswered. The
        workers of the fleet ask for a quorum when they see the number change.
        """
        ...

    def joins(self) -> int:
        """How often workers knocked so far, this worker's own knocks left out; never decreases.

        After the supervisor itself was lost and rebuilt it may restart: any *change* is a knock.
        """
        ...

    def trained(self) -> bool:
        """Whether another worker that has committed something is believed alive.

        Known from the workers' reports (``commits`` > 0) and from their processes. While there is
        one, blank workers do not start a run among themselves.
        """
        ...

    def leave_requested(self) -> bool:
        """Whether the supervisor asked this worker to leave in order (resize, drain, spot)."""
        ...

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Say where this worker is. Never blocks; the latest wins."""
        ...

    def event(self, row: Mapping[str, object]) -> None:
        """Hand over a JSON-able event, kept in order. Never blocks."""
        ...

    def close(self) -> None:
        """Deliver what is queued (bounded), free sockets and threads. Harmless if repeated."""
        ...
