"""Process groups that can be formed anew in milliseconds and torn down at once.

A worker owns one store (an in-process TCPStore server) and one Gloo device (a listening socket) for
its whole life; a group is a set of connections between the devices of its members, which meet at the
store of one of them. Keys are prefixed by the group's token, so nothing stale is ever read.

Tearing a group down has to be seen by peers that are blocked on this worker, and has to free this
worker's own threads that are blocked on a peer. Gloo's ``abort()`` does nothing, and dropping the
group waits for its threads. What works is to shut the connections' sockets down (measured: 0.3 ms,
and the peers fail within 1 ms; without it they wait for their whole time limit). They are known from
the process's own table of descriptors (:mod:`.sockets`): their local port is our device's, or their
remote port a peer's.

A process that this one forks (a DataLoader's worker) inherits the sockets, and would keep them open
when this one is killed: the peers would not notice. So it lets go of them as its first act.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from shoal.errors import ShoalError
from shoal.world.elastic.nccl import NcclEngine, is_wanted
from shoal.world.elastic.sockets import (
    connections_of,
    is_closed,
    let_go,
    listening_port,
    own_sockets,
    shut_down,
)
from shoal.world.elastic.state_server import fetch_where, join_address, listen, split_address
from shoal.world.elastic.timing import Timing

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.1

# Those alive in this process, for its forked children to let go of.
_grounds: weakref.WeakSet[Ground] = weakref.WeakSet()


class FormFailed(ShoalError):
    """The members of a quorum did not all meet; another quorum has to be asked for."""


class Pending(Protocol):
    """A reduction under way in a group, as torch has it."""

    def wait(self, timeout: timedelta) -> object:
        """Wait; raise RuntimeError when it failed, and also when ``timeout`` has passed."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """What is needed to meet a member.

    Args:
        name: its name.
        nonce: the word of its last quorum request.
        store: ``HOST:PORT`` of its store.
        state: ``HOST:PORT`` of its state server.
        listener: port of its Gloo device, 0 if unknown.
    """

    name: str
    nonce: str
    store: str
    state: str
    listener: int


class Ground:
    """What this worker's groups stand on: its store and its device, made once.

    Args:
        host: the address that other workers reach this one under.
        device: where reduced tensors live.
        timing: time constants.

    Attributes:
        ports: this worker's listening ports; others of its servers may be added.

    Raises:
        UsageError: this machine does not have that address.
    """

    def __init__(self, host: str, device: str, timing: Timing):
        self.timing = timing
        listening = listen(host)
        port = int(listening.getsockname()[1])
        self.store_address = join_address(host, port)
        # The store takes the descriptor over and closes it.
        self.store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timing.form_seconds),
            master_listen_fd=listening.detach(),
        )
        before = set(own_sockets())
        self.device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        self.listener = listening_port(set(own_sockets()) - before)
        self.tensors = torch.device(device)
        self.ports = {port, self.listener} - {0}
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()
        _grounds.add(self)

    def meet(self, owner: Member) -> dist.Store:
        """A new connection to the store of ``owner``, this worker's own included.

        A connection serves one request at a time, so that an attempt that was given up while it
        waited for a key would block the next one on the same connection.

        Raises:
            FormFailed: nobody listens there any more.
        """
        host, port = split_address(owner.store)
        limit = self.timing.form_seconds
        try:
            # The store's client tries a refused address until its time limit; we need to know now.
            socket.create_connection((host, port), limit).close()
            return dist.TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=limit),
            )
        except (OSError, RuntimeError) as error:
            raise FormFailed(f"the store of {owner.name} is gone: {error}") from error


class Group:
    """The connections of one membership.

    Args:
        engine: the process group; None for connections that never became one.
        sockets: its connections, as descriptor → identity.
        nccl: reduces CUDA tensors in its place.
    """

    def __init__(
        self,
        engine: dist.ProcessGroupGloo | None,
        sockets: Mapping[int, str],
        nccl: NcclEngine | None = None,
    ):
        self._engine = engine
        self._nccl = nccl
        self._sockets = dict(sockets)
        self._options = dist.AllreduceOptions()
        self._limit = 0.0

    def all_reduce(self, tensor: Tensor, limit_seconds: float) -> Pending:
        """Start to sum ``tensor`` over the members, in place.

        Raises:
            RuntimeError: a connection is known to be lost already.
        """
        engine = self._engine
        if engine is None:
            raise RuntimeError("this group was torn down")
        if self._nccl is not None and tensor.is_cuda:
            return self._nccl.all_reduce(tensor, limit_seconds)
        if limit_seconds != self._limit:
            self._limit = limit_seconds
            self._options = dist.AllreduceOptions()
            self._options.reduceOp = dist.ReduceOp.SUM  # pyright: ignore - stubs lack it
            self._options.timeout = timedelta(seconds=limit_seconds)
        return engine.allreduce([tensor], self._options)  # pyright: ignore - stubs lack it

    def broken(self) -> bool:
        """Whether a connection has been closed, by a peer or here."""
        if self._engine is None:
            return True
        return any(is_closed(*connection) for connection in self._sockets.items())

    def sever(self) -> None:
        """Cut all connections: peers and our own threads that wait in this group fail at once.

        May be called from any thread.
        """
        for descriptor, identity in self._sockets.items():
            shut_down(descriptor, identity)

    def close(self) -> None:
        """Cut all connections and forget the group. Harmless when called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self.sever()
            # Its destructor waits for its threads, and one of them may be stuck (see Reduction).
            nccl, self._nccl = self._nccl, None
            last = [engine, nccl]
            del engine

            def bury() -> None:
                if nccl is not None:
                    nccl.abort()
                last.clear()

            threading.Thread(target=bury, name="shoal-bury", daemon=True).start()

    @property
    def identities(self) -> Collection[str]:
        """The connections' identities (see :mod:`.sockets`)."""
        return self._sockets.values()


def form(
    *,
    ground: Ground,
    members: Sequence[Member],
    me: str,
    owner: Member,
    token: str,
    secret: str,
) -> Group | None:
    """Meet the other members and connect to each of them.

    Args:
        ground: this worker's store and device.
        members: all members in rank order.
        me: this worker's name.
        owner: the member at whose store they meet.
        token: the new membership's token, the same on all members and never used before.
        secret: the run's token, for asking a missing member where it is.

    Returns:
        The group, or None for a single member, who needs none.

    Raises:
        FormFailed: a member is gone, or is asking for another quorum, or did not come in time.
    """
    if len(members) == 1:
        return None
    started = monotonic()
    limit = ground.timing.form_seconds
    rank = next(i for i, member in enumerate(members) if member.name == me)
    others = [member for i, member in enumerate(members) if i != rank]
    store = dist.PrefixStore(token, ground.meet(owner))
    ports = {member.listener for member in others}
    before = connections_of(ground.listener, ports)
    try:
        _roll_call(store, members, rank, secret, started + limit)
    except RuntimeError as error:
        raise FormFailed(f"the store of {owner.name} is gone: {error}") from error
    try:
        engine = _engine(ground, store, rank, len(members), lambda: _look_for(others, secret))
    except FormFailed:
        # Whoever is connected to us already must not wait for us.
        Group(None, _fresh(ground, ports, before)).sever()
        raise
    connections = _fresh(ground, ports, before)
    nccl = None
    if is_wanted(ground.tensors):
        try:
            nccl = NcclEngine(dist.PrefixStore("nccl", store), rank, len(members), ground.tensors)
        except RuntimeError as error:
            Group(engine, connections).close()
            raise FormFailed(f"NCCL could not connect the members: {error}") from error
    group = Group(engine, connections, nccl)
    ground.groups.add(group)
    _log.debug(
        "membership %s of %d formed in %.1f ms, %d connections",
        token,
        len(members),
        1e3 * (monotonic() - started),
        len(connections),
    )
    return group


def _engine(
    ground: Ground, store: dist.Store, rank: int, size: int, look: Callable[[], None]
) -> dist.ProcessGroupGloo:
    """Connect to all members, in a thread: while it waits we look whether they are still there.

    A thread that is left behind ends by its time limit, and its connections with it.
    """
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore - stubs lack it
    options._devices = [ground.device]
    options._threads = 2
    options._timeout = timedelta(seconds=ground.timing.form_seconds)
    outcome: list[dist.ProcessGroupGloo | BaseException] = []
    done = threading.Event()

    def connect() -> None:
        try:
            outcome.append(dist.ProcessGroupGloo(store, rank, size, options))
        except BaseException as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=connect, name="shoal-connect", daemon=True).start()
    while not done.wait(_LOOK_SECONDS):
        look()
    engine = outcome.pop()
    if isinstance(engine, BaseException):
        raise FormFailed(f"the members could not connect: {engine}") from engine
    return engine


def _roll_call(
    store: dist.Store, members: Sequence[Member], rank: int, secret: str, deadline: float
) -> None:
    """Wait until all members are at the store; give up when one will not come.

    No member gives up once all are there, so that either all of them go on to connect or none does,
    unless one dies in between.
    """
    store.set(f"here/{rank}", "1")
    missing = {i: member for i, member in enumerate(members) if i != rank}
    pause, next_look = 0.0005, monotonic() + _LOOK_SECONDS
    while True:
        missing = {i: m for i, m in missing.items() if not store.check([f"here/{i}"])}
        if not missing:
            return
        now = monotonic()
        if now >= deadline:
            names = ", ".join(member.name for member in missing.values())
            raise FormFailed(f"{names} did not come to the meeting")
        if now >= next_look:
            _look_for(list(missing.values()), secret)
            next_look = monotonic() + _LOOK_SECONDS
        sleep(pause)
        pause = min(2 * pause, 0.01)


def _look_for(members: Sequence[Member], secret: str) -> None:
    """Raise FormFailed if a member is gone, or has given this membership up."""
    for member in members:
        where = fetch_where(member.state, secret, 1.0)
        if where is None:
            raise FormFailed(f"{member.name} is gone")
        if where.get("nonce") != member.nonce:
            raise FormFailed(f"{member.name} is asking for another quorum")


def _fresh(ground: Ground, ports: set[int], before: Mapping[int, str]) -> dict[int, str]:
    """Connections that were not there before."""
    return dict(connections_of(ground.listener, ports).items() - before.items())


def _let_go() -> None:
    """In a forked child: close the parent's sockets, so that they end when the parent does."""
    grounds = list(_grounds)
    if grounds:
        let_go(
            {port for ground in grounds for port in ground.ports},
            {name for ground in grounds for group in ground.groups for name in group.identities},
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
