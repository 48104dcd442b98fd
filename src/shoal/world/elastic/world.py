"""The elastic world: workers come, go and are killed while the others train on.

In the order of a step:

* ``start_step`` returns the standing membership without asking anybody, unless the last exchange
  failed, the reduced flags said that a quorum is wanted, or there was none yet. All members see the
  same flags, so they come to ask together; a member that saw a failure alone tears its connections
  down, which makes the others fail and ask as well.
* A quorum (:mod:`.quorum`) names the members and where each stands; :mod:`.election` says whose
  state counts; the members meet and connect (:mod:`.groups`); whoever lags fetches the state from a
  peer (:mod:`.state_server`).
* A worker that leaves says so in the flags of its last exchange. The others connect without it, and
  without a quorum.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
from collections.abc import Mapping
from importlib.metadata import version
from time import monotonic, sleep

from torch import Tensor

import shoal
from shoal.errors import ExchangeFailed, ResumableStop, ShoalError
from shoal.world.contract import Change, Membership, StateHolder, Work
from shoal.world.elastic.changes import changes_between
from shoal.world.elastic.contract import Link
from shoal.world.elastic.election import Verdict, elect
from shoal.world.elastic.groups import FormFailed, Ground, Group, Member, form
from shoal.world.elastic.quorum import Ballot, Coordinator, check_versions
from shoal.world.elastic.reductions import DONE, LostReduction, Reduction
from shoal.world.elastic.state_server import StateServer, fetch_state, fetch_where, join_address
from shoal.world.elastic.timing import Pace, Timing
from shoal.world.elastic.transport import TransferError
from shoal.world.elastic.watch import PeerWatch

_log = logging.getLogger(__name__)

# Slots of the flags: want a quorum, put it off, and one per rank for leaving.
_WANT, _DEFER, _LEAVE = 0, 1, 2
_REFUSED_PAUSE_SECONDS = 0.1


class ElasticWorld:
    """A worker's place in a fleet whose members change; implements :class:`shoal.world.World`.

    Args:
        link: this worker's side of the supervisor's control endpoint.
        timing: time constants; the defaults if None.
        device: where reduced tensors live: ``"cpu"`` (Gloo) or ``"cuda"``, ``"cuda:1"`` (NCCL).
        min_workers: below this the world waits for more, up to ``timing.patience_seconds``.
    """

    def __init__(
        self,
        link: Link,
        *,
        timing: Timing | None = None,
        device: str = "cpu",
        min_workers: int = 1,
    ):
        self._link = link
        self._timing = timing = timing or Timing()
        self._min_workers = min_workers
        self._pace = Pace(timing)
        self._coordinator = Coordinator(link, timing)
        self._ground = Ground(link.advertise, device, timing)
        self._server = StateServer(link.advertise, link.token, timing.transfer_idle_seconds)
        self._watch = PeerWatch(link.token, timing, self._give_up)
        self._holder: StateHolder | None = None
        self._membership: Membership | None = None
        self._members: dict[str, Member] = {}
        self._peers: tuple[Member, ...] = ()
        self._group: Group | None = None
        self._changes: list[Change] = []
        self._entered = False
        # What the next start_step does. Equal on all members, or a failure has torn connections.
        self._must_ask = True
        self._wanted = False
        self._leavers: frozenset[str] = frozenset()
        self._departed: frozenset[str] = frozenset()
        # This worker's own view; it acts on it by flags only.
        self._knocks = 0
        self._since_quorum = 0
        self._defer_until = float("-inf")
        self._leave = False
        # The exchange under way.
        self._open = False
        self._failure: BaseException | None = None
        self._limit_seconds = timing.first_exchange_seconds
        self._begun = 0.0
        self._left = False
        self._closed = False
        self._versions = {
            "shoal": shoal.__version__,
            "torch": version("torch").split("+")[0],
            "torchft": version("torchft"),
            "byte order": sys.byteorder,
        }

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet; called once, before the first ``start_step``."""
        self._holder = holder

    # --- one exchange

    @property
    def flag_slots(self) -> int:
        """Two slots and one per worker."""
        assert self._membership is not None, "flag_slots is known after the first start_step"
        return _LEAVE + self._membership.workers

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """Make sure of the membership for the next exchange; see :class:`shoal.world.World`.

        Raises:
            ResumableStop: too few workers, or no coordinator, for longer than the patience; or this
                worker was asked to leave while it waited for others.
            UsageError: another member runs other versions.
        """
        if self._left or self._closed:
            raise ShoalError("this worker has left the fleet; no step can start")
        if self._open:
            assert self._membership is not None
            return self._membership
        self._limit_seconds = self._pace.limit_seconds
        if self._leavers and not self._must_ask:
            self._shrink_locally()
        if self._must_ask or (self._wanted and not shrink_only):
            self._renew(shrink_only)
        self._open = True
        self._failure = None
        self._begun = monotonic()
        if self._peers:
            self._watch.exchange_begins(self._peers)
        assert self._membership is not None
        return self._membership

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` over the members, in place, in the background."""
        if self._failure is not None:
            return LostReduction(self._failure)
        if self._group is None:
            return DONE
        try:
            return Reduction(self._group.all_reduce(tensor, self._limit_seconds), self._fail)
        except RuntimeError as error:
            return LostReduction(self._fail(error))

    def write_flags(self, slots: Tensor) -> None:
        """Write what this worker wants the others to know."""
        assert self._membership is not None
        # Nobody wants a quorum while the coordinator is away: all would stand still for it.
        if self._coordinator.answers and (
            self._since_quorum >= self._timing.quorum_every or self._link.joins() != self._knocks
        ):
            slots[_WANT] = 1.0
        if monotonic() < self._defer_until:
            slots[_DEFER] = 1.0
        if self._leave or self._link.leave_requested():
            slots[_LEAVE + self._membership.ranks[0]] = 1.0

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange: the summed flags on the CPU, or None if this worker saw it fail."""
        self._open = False
        self._watch.exchange_ends()
        self._server.withdraw()
        if flags is None:
            self._cut()
            self._must_ask = True
            self._pace.interrupted()
            return
        assert self._failure is None, "an exchange that failed is settled with None"
        assert self._membership is not None
        self._pace.committed()
        self._since_quorum += 1
        seen: list[float] = flags.tolist()
        names = self._membership.names
        self._leavers = frozenset(
            n for n, leaves in zip(names, seen[_LEAVE:], strict=True) if leaves
        )
        if self._link.name in self._leavers:
            self._left = True
            self._coordinator.stop_heartbeats()
        elif self._leavers:
            # A quorum asked for now would wait for the leavers' heartbeats to expire.
            self._departed |= self._leavers
            self._defer_until = monotonic() + 1.5 * self._timing.heartbeat_timeout_seconds
        elif seen[_WANT] and not seen[_DEFER]:
            self._wanted = True

    def request_leave(self) -> None:
        """Announce in the next exchange that this worker leaves after it."""
        self._leave = True

    @property
    def left(self) -> bool:
        """Whether an exchange that carried this worker's leave has been settled."""
        return self._left

    @property
    def survivors(self) -> int:
        """Once ``left``: how many workers go on without this one; 0 when all left together."""
        assert self._membership is not None
        return self._membership.workers - len(self._leavers)

    # --- what surrounds it

    def take_changes(self) -> list[Change]:
        """Changes of membership since the last call, oldest first."""
        taken, self._changes = self._changes, []
        return taken

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Tell the supervisor where this worker is."""
        self._link.report(progress)

    def event(self, row: Mapping[str, object]) -> None:
        """Hand an event to the supervisor."""
        self._link.event(row)

    def close(self) -> None:
        """Free sockets, threads and process groups. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        self._coordinator.close()
        self._watch.close()
        self._cut()
        self._server.close()
        self._link.close()

    # --- membership

    def _renew(self, shrink_only: bool) -> None:
        """Ask for quorums until one leads to a membership that works."""
        timing = self._timing
        if not self._entered:
            self._coordinator.start()
            self._link.ready()
            self._entered = True
        started = monotonic()
        deadline = started + timing.patience_seconds
        refusal = ""
        while True:
            knocks = self._link.joins()
            ballot = self._ballot(shrink_only)
            self._server.tell({"nonce": ballot.nonce})
            peers = self._coordinator.ask(
                ballot, deadline, self._while_waiting, knock=ballot.last == ""
            )
            if peers is not None:
                check_versions(ballot, peers)
                peers = _admitted(peers)
                refused = self._refusal(ballot.name, peers)
                if not refused and monotonic() - started < timing.shrink_doubt_seconds:
                    refused = self._doubt(peers)
                if not refused:
                    try:
                        self._adopt(peers)
                    except (FormFailed, TransferError) as error:
                        _log.warning("membership not formed, asking again: %s", error)
                        self._cut()
                        self._must_ask = True
                    else:
                        self._knocks, self._since_quorum = knocks, 0
                        self._must_ask = self._wanted = False
                        return
                elif refused != refusal:
                    _log.warning("waiting: %s", refused)
                refusal = refused or refusal
            if monotonic() >= deadline:
                raise ResumableStop(
                    f"no membership for {timing.patience_seconds:g} s"
                    f"{': ' + refusal if refusal else ''}; the run can be resumed"
                )
            if refusal:
                sleep(_REFUSED_PAUSE_SECONDS)
                self._while_waiting(0.0)

    def _ballot(self, shrink_only: bool) -> Ballot:
        """What this worker says of itself in its next quorum request."""
        assert self._holder is not None, "attach() comes before start_step()"
        last = self._membership.token if self._membership is not None else ""
        return Ballot(
            name=self._link.name,
            position=self._holder.position(),
            nonce=secrets.token_hex(8),
            store=self._ground.store_address,
            state=join_address(self._link.advertise, self._server.port),
            listener=self._ground.listener,
            standing="" if self._must_ask else last,
            last=last,
            # Who has no membership yet joins a fleet, whatever its loop does first.
            shrink_only=shrink_only and last != "",
            trained=self._link.trained(),
            versions=self._versions,
        )

    def _while_waiting(self, waited_seconds: float) -> None:
        """Knock on a request that stays unanswered; give up if this worker is to leave."""
        if self._leave or self._link.leave_requested():
            raise ResumableStop("asked to leave while waiting for other workers")
        if waited_seconds > 0:
            self._link.announce()

    def _refusal(self, name: str, peers: Mapping[str, Ballot]) -> str:
        """Why this quorum is not good enough; all its members come to the same result."""
        if name not in peers:
            return "the fleet is in an evaluation and lets nobody in"
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
        for member in self._peers:
            missing = member.name not in peers and member.name not in self._departed
            if missing and fetch_where(member.state, self._link.token, 0.3) is not None:
                return f"{member.name} is alive but not in the quorum"
        return ""

    def _adopt(self, peers: Mapping[str, Ballot]) -> None:
        """Become a member of this quorum: connect, and hand over or take the state.

        Raises:
            FormFailed: the members did not all meet.
            TransferError: the state could not be fetched.
        """
        names = tuple(peers)
        verdict = elect({name: peer.position for name, peer in peers.items()})
        old = self._membership
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

    def _know(self, members: Mapping[str, Member]) -> None:
        """Remember the members' latest ballots."""
        self._members = dict(members)
        self._peers = tuple(m for name, m in members.items() if name != self._link.name)

    def _shrink_locally(self) -> None:
        """Go on without those that left in order; no quorum is needed."""
        assert self._membership is not None
        leavers, self._leavers = self._leavers, frozenset()
        rest = {n: m for n, m in self._members.items() if n not in leavers}
        word = "|".join((self._membership.token, *sorted(leavers)))
        token = hashlib.blake2b(word.encode(), digest_size=8).hexdigest()
        try:
            self._connect(rest, min(rest), token)
        except FormFailed as error:
            _log.warning("going on without %s needs a quorum: %s", ", ".join(leavers), error)
            self._cut()
            self._must_ask = True
        else:
            self._know(rest)

    def _connect(self, members: Mapping[str, Member], owner: str, token: str) -> None:
        """Form the group of ``members`` and let the old one go."""
        names = tuple(sorted(members))
        group = form(
            ground=self._ground,
            members=[members[name] for name in names],
            me=self._link.name,
            owner=members[owner],
            token=token,
            secret=self._link.token,
        )
        # Only now has everybody left the old group: its last bytes are where they belong.
        self._cut()
        old = self._membership.names if self._membership is not None else ()
        self._group = group
        self._membership = Membership(
            names=names, ranks=(names.index(self._link.name),), token=token
        )
        self._changes += changes_between(old, names, self._departed)
        self._departed = frozenset()
        self._pace.interrupted()
        _log.info("membership %s: %s", token, ", ".join(names))

    def _hand_over(self, members: Mapping[str, Member], verdict: Verdict, token: str) -> None:
        """Start the run, serve the snapshot, or fetch it, as the verdict says."""
        holder, me = self._holder, self._link.name
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
        if verdict.sources:
            # The others wait in their first exchange for those that still fetch.
            self._limit_seconds = max(self._limit_seconds, self._timing.heal_seconds)

    def _fail(self, error: BaseException) -> ExchangeFailed:
        """This worker saw the exchange fail: no reduction of it can succeed here any more."""
        if self._failure is None:
            self._failure = error
            _log.info("exchange failed: %s", error)
            self._cut()
            ran_out = monotonic() - self._begun >= self._limit_seconds
            if ran_out and self._limit_seconds == self._pace.limit_seconds:
                self._pace.timed_out()
        return ExchangeFailed(f"a peer was lost during an exchange: {error}")

    def _give_up(self, name: str) -> None:
        """A peer stays silent (called in the watching thread): end the exchange that waits for it."""
        group = self._group
        _log.warning("worker %s does not answer; going on without it", name)
        if group is not None:
            group.sever()

    def _cut(self) -> None:
        """Tear the connections down, so that whoever waits for us sees it at once."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _admitted(peers: Mapping[str, Ballot]) -> dict[str, Ballot]:
    """All peers; during an evaluation those alone that share a last membership with it."""
    evaluating = {peer.last for peer in peers.values() if peer.shrink_only}
    if not evaluating:
        return dict(peers)
    return {name: peer for name, peer in peers.items() if peer.last in evaluating}
