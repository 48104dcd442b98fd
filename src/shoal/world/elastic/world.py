"""The elastic world: workers come, go and are killed while the others train on.

In the order of a step:

* ``start_step`` returns the standing membership without asking anybody, unless the last exchange
  failed, the reduced flags said that a quorum is wanted, or there was none yet. All members see the
  same flags, so they come to ask together; a member that saw a failure alone tears its connections
  down, which makes the others fail and ask as well.
* A quorum (:mod:`.enrolment`, :mod:`.quorum`) names the members and where each stands;
  :mod:`.election` says whose state counts; the members meet and connect (:mod:`.groups`); whoever
  lags fetches the state from a peer (:mod:`.state_server`).
* A worker that leaves says so in the flags of its last exchange. The others connect without it, and
  without a quorum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic

from torch import Tensor

from shoal.errors import ExchangeFailed, ShoalError
from shoal.world.contract import Change, Membership, StateHolder, Work
from shoal.world.elastic.contract import Link
from shoal.world.elastic.enrolment import Enrolment
from shoal.world.elastic.reductions import DONE, LostReduction, Reduction
from shoal.world.elastic.timing import Pace, Timing
from shoal.world.elastic.watch import PeerWatch

_log = logging.getLogger(__name__)

# Slots of the flags: want a quorum, put it off, and one per rank for leaving.
_WANT, _DEFER, _LEAVE = 0, 1, 2


class ElasticWorld:
    """A worker's place in a fleet whose members change; implements the contract's ``World``.

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
        self._pace = Pace(timing)
        self._enrolment = Enrolment(link, timing, device, min_workers, self._wants_to_leave)
        self._watch = PeerWatch(link.token, timing, self._give_up)
        # What the next start_step does. Equal on all members, or a failure has torn connections.
        self._must_ask = True
        self._wanted = False
        self._leavers: frozenset[str] = frozenset()
        # This worker's own view; it acts on it by flags only.
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

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet; called once, before the first ``start_step``."""
        self._enrolment.holder = holder

    # --- one exchange

    @property
    def flag_slots(self) -> int:
        """Two slots and one per worker."""
        return _LEAVE + self._standing.workers

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """Make sure of the membership for the next exchange; see the contract's ``World``.

        Raises:
            ResumableStop: too few workers, or no coordinator, for longer than the patience; or this
                worker was asked to leave while it waited for others.
            UsageError: this worker is new, and runs other versions than the fleet.
        """
        if self._left or self._closed:
            raise ShoalError("this worker has left the fleet; no step can start")
        if self._open:
            return self._standing
        self._limit_seconds = self._pace.limit_seconds
        if self._leavers:
            self._must_ask |= not self._enrolment.shrink(self._leavers)
            self._leavers = frozenset()
        if self._must_ask or (self._wanted and not shrink_only):
            healing = self._enrolment.renew(shrink_only=shrink_only, intact=not self._must_ask)
            if healing:
                self._limit_seconds = max(self._limit_seconds, self._timing.heal_seconds)
            self._pace.interrupted()
            self._since_quorum = 0
            self._must_ask = self._wanted = False
        self._open = True
        self._failure = None
        self._begun = monotonic()
        if self._enrolment.peers:
            self._watch.exchange_begins(self._enrolment.peers)
        return self._standing

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` over the members, in place, in the background."""
        if self._failure is not None:
            return LostReduction(self._failure)
        group = self._enrolment.group
        if group is None:
            return DONE
        try:
            return Reduction(group.all_reduce(tensor, self._limit_seconds), group, self._fail)
        except RuntimeError as error:
            return LostReduction(self._fail(error))

    def write_flags(self, slots: Tensor) -> None:
        """Write what this worker wants the others to know."""
        enrolment = self._enrolment
        # Nobody wants a quorum while the coordinator is away: all would stand still for it.
        if enrolment.coordinator_answers and (
            self._since_quorum >= self._timing.quorum_every
            or self._link.joins() != enrolment.knocks
        ):
            slots[_WANT] = 1.0
        if monotonic() < self._defer_until:
            slots[_DEFER] = 1.0
        if self._wants_to_leave():
            slots[_LEAVE + self._standing.ranks[0]] = 1.0

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange: the summed flags on the CPU, or None if this worker saw it fail."""
        self._open = False
        self._watch.exchange_ends()
        self._enrolment.settled()
        if flags is None:
            self._enrolment.cut()
            self._must_ask = True
            self._pace.interrupted()
            return
        assert self._failure is None, "an exchange that failed is settled with None"
        self._pace.committed()
        self._since_quorum += 1
        seen: list[float] = flags.tolist()
        marks = zip(self._standing.names, seen[_LEAVE:], strict=True)
        self._leavers = frozenset(name for name, leaves in marks if leaves)
        if self._link.name in self._leavers:
            self._left = True
            self._enrolment.fall_silent()
        elif self._leavers:
            # A quorum asked for now would wait for the leavers' heartbeats to expire.
            self._enrolment.departed |= self._leavers
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
        return self._standing.workers - len(self._leavers)

    # --- what surrounds it

    def take_changes(self) -> list[Change]:
        """Changes of membership since the last call, oldest first."""
        return self._enrolment.take_changes()

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Tell the supervisor where this worker is."""
        self._link.report(progress)

    def event(self, row: Mapping[str, object]) -> None:
        """Hand an event to the supervisor."""
        self._link.event(row)

    def close(self) -> None:
        """Free sockets, threads and process groups. Harmless when called twice.

        Between two exchanges it waits, for a limited time, until the peers are done with the last one;
        within an exchange it cuts the connections at once, so that they see it.
        """
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        if not self._open:
            self._enrolment.linger()
        self._enrolment.close()
        self._link.close()

    # --- parts

    @property
    def _standing(self) -> Membership:
        membership = self._enrolment.membership
        assert membership is not None, "there is no membership before the first start_step"
        return membership

    def _wants_to_leave(self) -> bool:
        return self._leave or self._link.leave_requested()

    def _fail(self, error: BaseException) -> ExchangeFailed:
        """This worker saw the exchange fail: no reduction of it can succeed here any more."""
        if self._failure is None:
            self._failure = error
            _log.info("exchange failed: %s", error)
            self._enrolment.cut()
            ran_out = monotonic() - self._begun >= self._limit_seconds
            if ran_out and self._limit_seconds == self._pace.limit_seconds:
                self._pace.timed_out()
        return ExchangeFailed(f"a peer was lost during an exchange: {error}")

    def _give_up(self, name: str) -> None:
        """A peer stays silent (called in the watching thread): end the exchange that waits for it."""
        group = self._enrolment.group
        _log.warning("worker %s does not answer; going on without it", name)
        if group is not None:
            group.sever()
