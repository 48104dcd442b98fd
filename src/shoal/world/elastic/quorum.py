"""The coordinator seen from a worker: heartbeats, and quorums that outlive its restarts.

torchft's ``ManagerServer`` is used as a heart that beats in a native thread, whatever Python does,
and its ``LighthouseClient`` asks for quorums. torchft's Python ``Manager`` is not used: it would
heal by comparing step numbers only, and its wrapper of DDP does not survive a peer's death.

A second, slow thread looks whether the coordinator answers. It alone builds and rebuilds the
connection, so a coordinator that is lost and comes back between two quorums is not noticed by the
steps.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Protocol
from urllib.parse import urlsplit

from shoal.errors import ResumableStop
from shoal.world.contract import Position
from shoal.world.elastic.contract import Link
from shoal.world.elastic.ranking import rank_order
from shoal.world.elastic.timing import Timing

# torchft reads it once, when it is imported; its default writes lines for every connection.
os.environ.setdefault("RUST_LOG", "warn")
from torchft.coordination import LighthouseClient, ManagerServer, Quorum

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What a worker says of itself in a quorum; all members see it.

    Args:
        name: the worker's name.
        position: where its state stands.
        nonce: a random word, new for each request; keys of a meeting are derived from it.
        store: ``HOST:PORT`` of its store.
        state: ``HOST:PORT`` of its state server.
        listener: port at which it takes reductions' connections.
        standing: token of its membership if that still works, else "".
        last: token of its last membership, "" before the first.
        shrink_only: it is in an evaluation and wants nobody new.
        trained: it believes that a worker with commits is alive.
        versions: versions that must be equal in a fleet.
    """

    name: str
    position: Position
    nonce: str
    store: str
    state: str
    listener: int
    standing: str
    last: str
    shrink_only: bool
    trained: bool
    versions: Mapping[str, str]

    def data(self) -> dict[Hashable, object]:
        """The part that travels as the quorum's free data."""
        return {
            "commits": self.position.commits,
            "lineage": self.position.lineage,
            "offer": self.position.offer,
            "nonce": self.nonce,
            "listener": self.listener,
            "standing": self.standing,
            "last": self.last,
            "trained": self.trained,
            "versions": dict(self.versions),
        }


def peers_of(quorum: Quorum) -> dict[str, Ballot]:
    """The members' ballots by name, in rank order.

    A member that is no shoal worker of this version is passed over: everybody else goes on without it,
    whoever it is and whatever it does there.
    """
    peers: dict[str, Ballot] = {}
    for member in sorted(quorum.participants, key=lambda member: rank_order(member.replica_id)):
        data = member.data or {}
        try:
            peers[member.replica_id] = Ballot(
                name=member.replica_id,
                position=Position(
                    commits=int(str(data["commits"])),
                    lineage=str(data["lineage"]),
                    offer=int(str(data["offer"])),
                ),
                nonce=str(data["nonce"]),
                store=member.store_address,
                state=member.address,
                listener=int(str(data["listener"])),
                standing=str(data["standing"]),
                last=str(data["last"]),
                shrink_only=member.shrink_only,
                trained=bool(data["trained"]),
                versions=_words(data["versions"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            _log.warning(
                "the coordinator has a member %r that is no worker of this version of shoal (%r); "
                "going on without it",
                member.replica_id,
                error,
            )
    return peers


def _words(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError("versions are not a mapping")
    return {str(key): str(item) for key, item in value.items()}


class Patience(Protocol):
    """How long to go on waiting."""

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        ...


class Coordinator:
    """This worker's connection to the lighthouse.

    Args:
        link: gives the coordinator's address, and takes the knocks.
        timing: time constants.
    """

    def __init__(self, link: Link, timing: Timing):
        self._link = link
        self._timing = timing
        self._heart: ManagerServer | None = None
        self._client: LighthouseClient | None = None
        self._address = ""
        self._state = threading.Condition()
        self._answers = False
        self._returned_at = float("-inf")
        self._stopped = False
        self._look = threading.Event()
        self._prober: threading.Thread | None = None

    @property
    def answers(self) -> bool:
        """Whether the coordinator answered when it was last looked at."""
        return self._answers

    def start(self) -> None:
        """Begin to send heartbeats and to watch the coordinator.

        Raises:
            ResumableStop: it could not be reached within the patience.
        """
        self._prober = threading.Thread(target=self._probe, name="shoal-coordinator", daemon=True)
        self._prober.start()
        deadline = monotonic() + self._timing.patience_seconds
        self._await_answer(lambda: monotonic() >= deadline, lambda: None)

    def ask(
        self,
        ballot: Ballot,
        patience: Patience,
        interrupt: Callable[[float], None],
        *,
        knock: bool,
    ) -> dict[str, Ballot] | None:
        """Ask for a quorum once, in a thread, so that signals are handled while it lasts.

        Args:
            ballot: what to say of this worker.
            patience: how long to wait for a coordinator that does not answer.
            interrupt: called about every knock_seconds with how long the request has lasted; what
                it raises is raised here.
            knock: announce the request at once; the fleet has to be told that somebody is there.

        Returns:
            The members' ballots, or None when the request failed and should be made again.

        Raises:
            ResumableStop: the coordinator did not come back in time.
        """
        self._await_answer(patience.is_over, lambda: interrupt(0.0))
        client = self._client
        assert client is not None
        reply: list[Quorum | BaseException] = []
        done = threading.Event()

        def request() -> None:
            try:
                reply.append(
                    client.quorum(
                        ballot.name,
                        timeout=timedelta(seconds=self._timing.ask_seconds),
                        address=ballot.state,
                        store_address=ballot.store,
                        step=max(0, ballot.position.commits),
                        world_size=1,
                        shrink_only=ballot.shrink_only,
                        data=ballot.data(),
                    )
                )
            except BaseException as error:
                reply.append(error)
            done.set()

        threading.Thread(target=request, name="shoal-quorum", daemon=True).start()
        asked = monotonic()
        if knock:
            # After the request: whoever hears the knock then finds the request there.
            self._link.announce()
        while not done.wait(self._timing.knock_seconds):
            interrupt(monotonic() - asked)
        outcome = reply[0]
        if isinstance(outcome, Quorum):
            return peers_of(outcome)
        if isinstance(outcome, TimeoutError):
            return None
        _log.info("the coordinator was lost during a quorum: %s", outcome)
        self._lost(client)
        return None

    def stop_heartbeats(self) -> None:
        """Fall silent at once: the coordinator takes this worker for gone after its timeout."""
        with self._state:
            self._stopped = True
            heart, self._heart = self._heart, None
            self._state.notify_all()
        self._look.set()
        if heart is not None:
            heart.shutdown()

    def close(self) -> None:
        """Stop heartbeats and the watching thread. Harmless when called twice."""
        self.stop_heartbeats()
        if self._prober is not None:
            self._prober.join(2 * self._timing.connect_seconds)
            self._prober = None

    def _await_answer(self, is_over: Callable[[], bool], interrupt: Callable[[], None]) -> None:
        """Wait until the coordinator answers and had time to gather the others' heartbeats."""
        while True:
            with self._state:
                now = monotonic()
                ready_at = self._returned_at + self._timing.regather_seconds
                if self._stopped:
                    raise ResumableStop("this worker has closed its connection to the coordinator")
                if self._answers and now >= ready_at:
                    return
                if is_over():
                    raise ResumableStop(
                        f"the coordinator at {self._link.coordinator} did not answer for "
                        f"{self._timing.patience_seconds:g} s; the run can be resumed"
                    )
                wait = self._timing.knock_seconds
                self._state.wait(min(wait, ready_at - now) if self._answers else wait)
            interrupt()

    def _lost(self, client: LighthouseClient) -> None:
        with self._state:
            if self._client is client:
                self._answers = False
        self._look.set()

    def _probe(self) -> None:
        """The watching thread: look, rebuild what is lost, sleep."""
        pause = self._timing.probe_seconds
        built_before = False
        while not self._stopped:
            try:
                if self._answers and self._client is not None:
                    self._client.heartbeat(
                        self._link.name, timedelta(seconds=self._timing.connect_seconds)
                    )
                else:
                    self._build(returned=built_before)
                    built_before = True
                pause = self._timing.probe_seconds
            except (RuntimeError, TimeoutError, OSError) as error:
                if self._answers:
                    _log.warning("the coordinator does not answer: %s", error)
                    pause = 0.02
                with self._state:
                    self._answers = False
                # Back-off is bounded low: the fleet stands still until the first quorum.
                pause = min(2 * pause, self._timing.probe_seconds)
            self._look.wait(pause)
            self._look.clear()

    def _build(self, *, returned: bool) -> None:
        """Connect, beat, and only then let requests through."""
        address = self._link.coordinator
        parts = urlsplit(address)
        limit = self._timing.connect_seconds
        # torchft tries a refused address until its limit; a refusal is known at once from here.
        socket.create_connection((parts.hostname or "", parts.port or 80), limit).close()
        client = LighthouseClient(address, timedelta(seconds=limit))
        heart = ManagerServer(
            self._link.name,
            address,
            "127.0.0.1",
            "127.0.0.1:0",
            "none",
            1,
            heartbeat_interval=timedelta(seconds=self._timing.heartbeat_seconds),
            connect_timeout=timedelta(seconds=limit),
            quorum_retries=0,
        )
        client.heartbeat(self._link.name, timedelta(seconds=limit))
        with self._state:
            old, self._heart = self._heart, heart
            if self._stopped:
                old, self._heart = heart, None
            self._client = client
            self._answers = True
            if returned:
                self._returned_at = monotonic()
                _log.warning("the coordinator at %s is back", address)
            self._state.notify_all()
        if old is not None:
            old.shutdown()
