"""This process's own sockets, found in its table of descriptors (Linux).

Libraries keep theirs to themselves; these functions reach them from outside. A descriptor may be closed
and used again at any moment by another thread, so each look is taken through a duplicate, and a socket
is known by its identity (``socket:[INODE]``), which no other socket ever has.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

from shoal.children import INTERNET, let_go_of

_DESCRIPTORS = "/proc/self/fd"


def own_sockets() -> dict[int, str]:
    """This process's sockets, as descriptor → ``socket:[INODE]``."""
    found: dict[int, str] = {}
    # The directory does not exist outside Linux: then connections end by their time limits.
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    """A second handle of a socket, which stays valid when its owner closes the first."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def listening_port(descriptors: set[int]) -> int:
    """The port of the one listening TCP socket among ``descriptors``, 0 if there is none."""
    for descriptor in descriptors:
        handle = _duplicate(descriptor)
        if handle is None:
            continue
        with handle, contextlib.suppress(OSError):
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return int(handle.getsockname()[1])
    return 0


def connections_of(listener: int, peers: set[int]) -> dict[int, str]:
    """Connected TCP sockets from or to our device, as descriptor → identity."""
    found: dict[int, str] = {}
    for descriptor, identity in own_sockets().items():
        handle = _duplicate(descriptor)
        if handle is None:
            continue
        with handle, contextlib.suppress(OSError):
            if handle.family not in INTERNET:
                continue
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            local, remote = int(handle.getsockname()[1]), int(handle.getpeername()[1])
            if (listener and local == listener) or (remote in peers and remote):
                found[descriptor] = identity
    return found


def is_closed(descriptor: int, identity: str) -> bool:
    """Whether a connection has ended: the descriptor is no longer it, or its peer has hung up."""
    handle = _duplicate(descriptor)
    if handle is None:
        return True
    with handle:
        try:
            if os.readlink(f"{_DESCRIPTORS}/{handle.fileno()}") != identity:
                return True
        except OSError:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLRDHUP)
        return bool(poll.poll(0))


def shut_down(descriptor: int, identity: str) -> None:
    """Shut one connection down, if the descriptor is still that connection."""
    handle = _duplicate(descriptor)
    if handle is None:
        return
    with handle, contextlib.suppress(OSError):
        if os.readlink(f"{_DESCRIPTORS}/{handle.fileno()}") == identity:
            handle.shutdown(socket.SHUT_RDWR)


def let_go(ports: set[int], identities: set[str]) -> None:
    """Close the sockets of some local ports, and some connections besides.

    See :func:`shoal.children.let_go_of` for what becomes of the descriptors.
    """
    doomed: list[int] = []
    for descriptor, identity in own_sockets().items():
        if identity in identities:
            doomed.append(descriptor)
            continue
        handle = _duplicate(descriptor)
        if handle is None:
            continue
        with handle, contextlib.suppress(OSError):
            if handle.family in INTERNET and int(handle.getsockname()[1]) in ports:
                doomed.append(descriptor)
    let_go_of(doomed)
