"""A worker's membership: how it comes about, who gives whom the state, and how it ends.

Everything here happens between two exchanges. What decides that it happens is in :mod:`.world`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Set
from time import monotonic, sleep

from shoal.errors import ResumableStop
from shoal.world.contract import Change, Membership, StateHolder
from shoal.world.elastic.admission import admitted
from shoal.world.elastic.changes import changes_between
from shoal.world.elastic.contract import Link
from shoal.world.elastic.election import Verdict, elect
from shoal.world.elastic.endpoint import versions
from shoal.world.elastic.groups import FormFailed, Ground, Group, Member, form
from shoal.world.elastic.quorum import Ballot, Coordinator
from shoal.world.elastic.ranking import rank_order
from shoal.world.elastic.state_server import (
    StateServer,
    await_settled,
    fetch_state,
    fetch_where,
    join_address,
)
from shoal.world.elastic.timing import Timing
from shoal.world.elastic.transport import TransferError

_log = logging.getLogger(__name__)
_REFUSED_PAUSE_SECONDS = 0.1


class Enrolment:
    """Enters fleets and leaves them.

    Args:
        link: this worker's side of the supervisor's control endpoint.
        timing: time constants.
        device: where reduced tensors live.
        min_workers: a smaller quorum is not accepted.
        wants_to_leave: whether this worker was asked to leave; then it does not wait for others.

    Attributes:
        membership: the present one; None before the first.
        group: its connections; None when there is nobody else, or when they were torn down.
        peers: the other members.
        knocks: the link's count of joins that the last quorum has taken care of.
        departed: members that announced their leave and have not been seen to be gone.
    """

    def __init__(
        self,
        link: Link,
        timing: Timing,
        device: str,
        min_workers: int,
        wants_to_leave: Callable[[], bool],
    ):
        self._link = link
        self._timing = timing
        self._min_workers = min_workers
        self._coordinator = Coordinator(link, timing)
        self._ground = Ground(link.advertise, device, timing)
        self._server = StateServer(link.advertise, link.token, timing.transfer_idle_seconds)
        self._ground.ports.add(self._server.port)
        self._address = join_address(link.advertise, self._server.port)
        self._members: dict[str, Member] = {}
        self._changes: list[Change] = []
        self._entered = False
        self._wants_to_leave = wants_to_leave
        self.holder: StateHolder | None = None
        self.membership: Membership | None = None
        self.group: Group | None = None
        self.peers: tuple[Member, ...] = ()
        self.knocks = 0
        self.departed: frozenset[str] = frozenset()
        self._versions = {name: found or "(none)" for name, found in versions().items()}

    @property
    def coordinator_answers(self) -> bool:
        """Whether the coordinator answered when it was last looked at."""
        return self._coordinator.answers

    def renew(self, *, shrink_only: bool, intact: bool) -> bool:
        """Ask for quorums until one leads to a membership that works.

        Args:
            shrink_only: nobody new is to be let in.
            intact: the standing membership works; it is kept if the quorum has the same members.

        Raises:
            ResumableStop: too few workers, or no coordinator, for longer than the patience; or this
                worker was asked to leave meanwhile.
            UsageError: this worker is new, and runs other versions than the fleet.

        Returns:
            Whether somebody has to be given the state: the others wait for it in their first exchange.
        """
        timing = self._timing
        if not self._entered:
            self._coordinator.start()
            self._link.ready()
            self._entered = True
        started = monotonic()
        patience = Patience(timing.patience_seconds, self._is_waited_for)
        refusal = ""
        while True:
            knocks = self._link.joins()
            ballot = self._ballot(shrink_only=shrink_only, intact=intact)
            self._server.tell({"nonce": ballot.nonce})
            stays = intact
            peers = self._coordinator.ask(
                ballot,
                patience,
                lambda waited, stays=stays: self._while_waiting(waited, stays=stays),
                knock=ballot.last == "",
            )
            if peers is not None:
                peers = admitted(ballot, peers)
                refused = self._refusal(ballot.name, peers)
                if not refused and monotonic() - started < timing.shrink_doubt_seconds:
                    refused = self._doubt(peers)
                if not refused:
                    try:
                        healing = self._adopt(peers)
                    except (FormFailed, TransferError) as error:
                        _log.warning("membership not formed, asking again: %s", error)
                        self.cut()
                        intact = False
                    else:
                        self.knocks = knocks
                        return healing
                elif refused != refusal:
                    _log.warning("waiting: %s", refused)
                refusal = refused or refusal
            if patience.is_over():
                raise ResumableStop(
                    f"no membership for {timing.patience_seconds:g} s"
                    f"{': ' + refusal if refusal else ''}; the run can be resumed"
                )
            if refusal:
                sleep(_REFUSED_PAUSE_SECONDS)
                self._while_waiting(0.0, stays=False)

    def _ballot(self, *, shrink_only: bool, intact: bool) -> Ballot:
        """What this worker says of itself in its next quorum request."""
        assert self.holder is not None, "attach() comes before start_step()"
        last = self.membership.token if self.membership is not None else ""
        return Ballot(
            name=self._link.name,
            position=self.holder.position(),
            nonce=secrets.token_hex(8),
            store=self._ground.store_address,
            state=self._address,
            listener=self._ground.listener,
            standing=last if intact else "",
            last=last,
            # Who has no membership yet joins a fleet, whatever its loop does first.
            shrink_only=shrink_only and last != "",
            trained=self._link.trained(),
            versions=self._versions,
        )

    def _is_waited_for(self) -> bool:
        """A blank worker beside a fleet that trains: sooner or later that lets it in."""
        assert self.holder is not None
        return self.holder.position().commits < 0 and self._link.trained()

    def _while_waiting(self, waited_seconds: float, *, stays: bool) -> None:
        """Knock on a request that stays unanswered; give up if this worker is to leave.

        Not while its membership stands (``stays``): the others wait for it in the same quorum.
        """
        if self._wants_to_leave() and not stays:
            raise ResumableStop("asked to leave while waiting for other workers")
        if waited_seconds > 0:
            self._link.announce()

    def _refusal(self, name: str, peers: Mapping[str, Ballot]) -> str:
        """Why this quorum is not good enough; all its members come to the same result."""
        if name not in peers:
            return "the fleet lets nobody in now (it is in an evaluation, or runs other versions)"
        if len(peers) < self._min_workers:
            return f"{len(peers)} of at least {self._min_workers} workers are here"
        blank = all(peer.position.commits < 0 for peer in peers.values())
        if blank and any(peer.trained for peer in peers.values()):
            return "only blank workers are here, but a worker that has trained is alive elsewhere"
        return ""

    def _doubt(self, peers: Mapping[str, Ballot]) -> str:
        """Why this quorum looks too small: a member that is missing in it is alive.

        A coordinator that has just come back may not have heard of everybody. Should the members of
        the quorum disagree, those that accept it find the others asking for another one.
        """
        for member in self.peers:
            missing = member.name not in peers and member.name not in self.departed
            if missing and fetch_where(member.state, self._link.token, 0.3) is not None:
                return f"{member.name} is alive but not in the quorum"
        return ""

    def _adopt(self, peers: Mapping[str, Ballot]) -> bool:
        """Become a member of this quorum: connect, and hand over or take the state.

        Returns:
            Whether somebody has to be given the state.

        Raises:
            FormFailed: the members did not all meet.
            TransferError: the state could not be fetched.
        """
        names = tuple(peers)
        verdict = elect({name: peer.position for name, peer in peers.items()})
        old = self.membership
        intact = (
            old is not None
            and not verdict.sources
            and names == old.names
            and all(peer.standing == old.token for peer in peers.values())
        )
        members = {
            name: Member(
                name=name,
                nonce=peer.nonce,
                store=peer.store,
                state=peer.state,
                listener=peer.listener,
            )
            for name, peer in peers.items()
        }
        if not intact:
            token = peers[verdict.owner].nonce
            self._connect(members, verdict.owner, token)
            self._hand_over(members, verdict, token)
        self._know(members)
        return bool(verdict.sources)

    def _know(self, members: Mapping[str, Member]) -> None:
        """Remember the members' latest ballots."""
        self._members = dict(members)
        self.peers = tuple(m for name, m in members.items() if name != self._link.name)

    def shrink(self, leavers: Set[str]) -> bool:
        """Go on without those that left in order; no quorum is needed.

        Returns:
            False if the others could not connect; then a quorum is needed after all.
        """
        assert self.membership is not None
        rest = {n: m for n, m in self._members.items() if n not in leavers}
        word = "|".join((self.membership.token, *sorted(leavers)))
        token = hashlib.blake2b(word.encode(), digest_size=8).hexdigest()
        try:
            self._connect(rest, min(rest, key=rank_order), token)
        except FormFailed as error:
            _log.warning("going on without %s needs a quorum: %s", ", ".join(leavers), error)
            self.cut()
            return False
        self._know(rest)
        return True

    def _connect(self, members: Mapping[str, Member], owner: str, token: str) -> None:
        """Form the group of ``members`` and let the old one go."""
        names = tuple(sorted(members, key=rank_order))
        group = form(
            ground=self._ground,
            members=[members[name] for name in names],
            me=self._link.name,
            owner=members[owner],
            token=token,
            secret=self._link.token,
        )
        # Only now has everybody left the old group: its last bytes are where they belong.
        self.cut()
        old = self.membership.names if self.membership is not None else ()
        self.group = group
        self.membership = Membership(
            names=names, ranks=(names.index(self._link.name),), token=token
        )
        self._server.enter(token)
        self._changes += changes_between(old, names, self.departed)
        self.departed = frozenset()
        _log.info("membership %s: %s", token, ", ".join(names))

    def _hand_over(self, members: Mapping[str, Member], verdict: Verdict, token: str) -> None:
        """Start the run, serve the snapshot, or fetch it, as the verdict says."""
        holder, me = self.holder, self._link.name
        assert holder is not None
        if verdict.starter == me:
            holder.bootstrap()
        if me in verdict.sources.values():
            self._server.publish(token, holder.snapshot())
        if me in verdict.sources:
            source = members[verdict.sources[me]]
            started = monotonic()
            tree = fetch_state(
                source.state,
                token,
                self._link.token,
                self._timing.transfer_idle_seconds,
                expected_nonce=source.nonce,
            )
            if not isinstance(tree, dict):
                raise TransferError(f"the state of {source.name} is no dict")
            holder.restore(tree)  # pyright: ignore[reportArgumentType] - keys were checked
            _log.info("took the state of %s in %.3f s", source.name, monotonic() - started)

    def cut(self) -> None:
        """Tear the connections down, so that whoever waits for us sees it at once."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def settled(self) -> None:
        """An exchange is over here: everybody has the state, and peers may learn that it is over."""
        self._server.withdraw()
        self._server.settle()

    def fall_silent(self) -> None:
        """Stop the heartbeats: this worker has left."""
        self._coordinator.stop_heartbeats()

    def take_changes(self) -> list[Change]:
        """Changes of membership since the last call."""
        taken, self._changes = self._changes, []
        return taken

    def linger(self) -> None:
        """Wait, for a limited time, until the peers are done with the last exchange too.

        A worker that hangs up before its peers have read the last bytes of an exchange which it has
        committed itself makes it fail for them, and they would repeat it without this worker.
        """
        if self.group is None or self.membership is None:
            return
        deadline = monotonic() + self._timing.linger_seconds
        for peer in self.peers:
            left = deadline - monotonic()
            word = (self.membership.token, self._server.settled, self._link.token)
            if left <= 0 or not await_settled(peer.state, *word, left):
                _log.info("%s did not end the last exchange in time", peer.name)

    def close(self) -> None:
        """Free sockets, threads and connections. Harmless when called twice."""
        self._coordinator.close()
        self.cut()
        self._server.close()


class Patience:
    """How long to go on waiting.

    Args:
        seconds: the limit, from now on.
        is_sure: whether waiting will end well; as long as it will, no time passes.
    """

    def __init__(self, seconds: float, is_sure: Callable[[], bool]):
        self._seconds, self._is_sure = seconds, is_sure
        self._deadline = monotonic() + seconds

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        now = monotonic()
        if self._is_sure():
            self._deadline = now + self._seconds
        return now >= self._deadline
