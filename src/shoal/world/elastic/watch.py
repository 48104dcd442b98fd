"""Notices peers that neither answer nor close their connections: a lost host, a suspended process.

A process that dies closes its connections, and whoever waits for it fails at once. A host that loses
power or network closes nothing, and a reduction would wait for its whole time limit, which has to be
long because a peer may be slow for good reasons. So while an exchange lasts, a thread asks the others'
state servers; who stays silent is given up. A peer whose training hangs still answers: to kill it is the
supervisor's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from shoal.world.elastic.groups import Member
from shoal.world.elastic.state_server import fetch_where
from shoal.world.elastic.timing import Timing


class PeerWatch:
    """Asks the peers of an exchange that lasts.

    Args:
        secret: the run's token.
        timing: ``silent_peer_seconds`` is how long a peer may stay silent.
        give_up: called, in the watching thread, with the name of a silent peer.
    """

    def __init__(self, secret: str, timing: Timing, give_up: Callable[[str], None]):
        self._secret = secret
        self._patience = timing.silent_peer_seconds
        self._period = min(1.0, timing.silent_peer_seconds / 3)
        self._give_up = give_up
        self._peers: Sequence[Member] = ()
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-peers", daemon=True)
        self._thread.start()

    def exchange_begins(self, peers: Sequence[Member]) -> None:
        """An exchange with ``peers`` begins now; costs two assignments."""
        self._peers = peers
        self._since = monotonic()

    def exchange_ends(self) -> None:
        """Nobody is waited for."""
        self._since = None

    def close(self) -> None:
        """Stop watching. Harmless when called twice."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        exchange: float | None = None
        heard: dict[str, float] = {}
        while not self._stop.wait(self._period):
            since = self._since
            if since is None or monotonic() - since < self._period:
                continue
            if since != exchange:
                exchange, heard = since, {}
            for peer in self._peers:
                answer = fetch_where(peer.state, self._secret, self._period)
                if self._stop.is_set() or self._since != since:
                    break
                now = monotonic()
                if answer is not None:
                    heard[peer.name] = now
                elif now - heard.setdefault(peer.name, since) > self._patience:
                    self._since = None
                    self._give_up(peer.name)
                    break
