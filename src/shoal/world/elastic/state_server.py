"""A worker's small HTTP server: its snapshot for those that need it, and where it is.

``GET /state/KEY`` streams the snapshot published under KEY (the token of the membership it was taken
for), waiting a little if it is not published yet. ``GET /where`` tells which quorum request this
worker made last; peers that wait for it in vain ask there. ``GET /settled/TOKEN/N`` answers when this
worker is done with the first N exchanges of the membership TOKEN: a peer that leaves asks it before it
hangs up. All need the run's token in the Authorization header and answer 403 without it. A connection
that says nothing is closed, and there are only so many at a time.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shoal.errors import UsageError
from shoal.world.contract import Tree
from shoal.world.elastic.transport import Payload, TransferError, decode, encode

_log = logging.getLogger(__name__)
# A request comes at once after its connection; a stranger's silence does not hold a thread for long.
REQUEST_SECONDS = 10.0
MAX_CONNECTIONS = 256


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; the host may be a bracketed IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of ``host``.

    Returns:
        The socket, bound to that address alone.

    Raises:
        UsageError: this machine does not have that address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.bind((host, 0))
    except OSError as error:
        server.close()
        raise UsageError(
            f"advertise = {host!r} is not an address of this machine ({error}); give the address "
            "under which the other workers reach it"
        ) from error
    server.listen(128)
    return server


class StateServer:
    """Serves one snapshot at a time.

    Args:
        host: the address to bind.
        token: what a peer has to show.
        patience_seconds: how long a request waits for a snapshot that is not published yet, and how
            long a transfer may stand still.
    """

    def __init__(self, host: str, token: str, patience_seconds: float):
        self._token = token
        self._patience = patience_seconds
        self._changed = threading.Condition()
        self._key = ""
        self._payload: Payload | None = None
        self._closed = False
        self._where = b"{}"
        self._membership, self._settled = "", 0
        self._server = _Server(host, self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="shoal-state", daemon=True
        )
        self._thread.start()

    def publish(self, key: str, tree: Tree) -> None:
        """Serve ``tree``, which must not change any more, under ``key`` until it is withdrawn."""
        payload = encode(tree)
        with self._changed:
            self._key, self._payload = key, payload
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Serve no snapshot; a transfer under way keeps its own reference to the end."""
        if self._payload is not None:
            with self._changed:
                self._payload = None

    def tell(self, where: Mapping[str, str]) -> None:
        """Set what ``/where`` answers."""
        self._where = json.dumps(dict(where)).encode()

    def enter(self, membership: str) -> None:
        """Count exchanges anew, those of ``membership``."""
        with self._changed:
            self._membership, self._settled = membership, 0
            self._changed.notify_all()

    def settle(self) -> None:
        """One more exchange is over here, in whatever way."""
        with self._changed:
            self._settled += 1
            self._changed.notify_all()

    @property
    def settled(self) -> int:
        """Exchanges of the present membership that are over here."""
        return self._settled

    def wait_settled(self, membership: str, count: int) -> bool:
        """Wait until ``count`` exchanges of ``membership`` are over here, or it is not the present one."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._membership != membership or self._settled >= count,
                self._patience,
            )

    def close(self) -> None:
        """Stop serving. Harmless when called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._payload = None
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def admits(self, header: str | None) -> bool:
        """Whether an Authorization header shows the run's token (compared in constant time)."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    def where(self) -> bytes:
        """The JSON that ``/where`` answers."""
        return self._where

    def find(self, key: str) -> Payload | None:
        """The snapshot published under ``key``; waits for it, None if it does not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._key == key and self._payload is not None),
                self._patience,
            )
            return self._payload if self._key == key else None

    @property
    def patience_seconds(self) -> float:
        """How long a transfer may stand still."""
        return self._patience


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, owner: StateServer):
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        listening = listen(host)
        self.address_family = listening.family
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = listening.getsockname()[:2]
        self.owner = owner

    def process_request(self, request: object, client_address: object) -> None:
        """Serve in a thread of its own, unless too many are open."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # pyright: ignore[reportArgumentType] - a socket
            return
        super().process_request(request, client_address)  # pyright: ignore[reportArgumentType]

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Serve one connection and free its slot."""
        try:
            super().process_request_thread(request, client_address)  # pyright: ignore
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        # A peer that dies, or loses its patience, while it reads is an ordinary event here.
        ordinary = isinstance(sys.exception(), OSError)
        _log.log(
            logging.DEBUG if ordinary else logging.ERROR,
            "a reply to %s broke off",
            client_address,
            exc_info=not ordinary,
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        owner = self.server.owner
        self.connection.settimeout(owner.patience_seconds)
        self.close_connection = True
        if not owner.admits(self.headers.get("Authorization")):
            self._answer(403, b"this run's token is needed\n")
        elif self.path == "/where":
            self._answer(200, owner.where())
        elif self.path.startswith("/settled/"):
            membership, _, count = self.path.removeprefix("/settled/").rpartition("/")
            done = count.isdigit() and owner.wait_settled(membership, int(count))
            self._answer(200 if done else 404, b"\n")
        elif self.path.startswith("/state/"):
            payload = owner.find(self.path.removeprefix("/state/"))
            if payload is None:
                self._answer(404, b"no such snapshot\n")
            else:
                self._head(200, payload.length_bytes)
                for chunk in payload.chunks():
                    self.wfile.write(chunk)
        else:
            self._answer(404, b"unknown\n")

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()

    def _answer(self, status: int, body: bytes) -> None:
        self._head(status, len(body))
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


def fetch_state(
    address: str, key: str, token: str, idle_seconds: float, *, expected_nonce: str
) -> Tree:
    """Get a peer's snapshot; waits while the peer still prepares it.

    Args:
        address: ``HOST:PORT`` of its state server.
        key: under which it publishes.
        token: the run's token.
        idle_seconds: the transfer may stand still for this long.
        expected_nonce: the quorum request after which the peer publishes; once it has made another
            one, the snapshot will not come.

    Returns:
        The tree; its tensors are writable and own their memory.

    Raises:
        TransferError: the peer is gone, refused, or sent something incomplete.
    """
    while True:
        tree, status, text = _try_fetch(address, key, token, idle_seconds)
        if status == 200:
            return tree
        where = fetch_where(address, token, idle_seconds) if status == 404 else None
        if where is None or where.get("nonce") != expected_nonce:
            raise TransferError(f"{address} answers {status} to a request for its state: {text}")


def _try_fetch(address: str, key: str, token: str, idle_seconds: float) -> tuple[Tree, int, str]:
    """One request: the tree, the status and the text that explains it."""
    host, port = split_address(address)
    # The peer itself waits up to idle_seconds for the snapshot before it says that there is none.
    connection = http.client.HTTPConnection(host, port, timeout=2 * idle_seconds)
    try:
        connection.request("GET", f"/state/{key}", headers=_credentials(token))
        reply = connection.getresponse()
        if reply.status != 200:
            return None, reply.status, reply.read(200).decode(errors="replace").strip()
        length = reply.getheader("Content-Length")
        if length is None or not length.isdigit():
            raise TransferError(f"{address} does not say how long its state is")
        return decode(reply.readinto, int(length)), 200, ""
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"the state of {address} could not be fetched: {error!r}") from error
    finally:
        connection.close()


def _credentials(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def fetch_where(address: str, token: str, timeout_seconds: float) -> dict[str, str] | None:
    """Ask a peer where it is.

    Returns:
        What it told, or None when it cannot be reached (its process is gone).
    """
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/where", headers=_credentials(token))
        reply = connection.getresponse()
        document = json.loads(reply.read(65536)) if reply.status == 200 else None
        if not isinstance(document, dict):
            return None
        return {str(key): str(value) for key, value in document.items()}
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def await_settled(address: str, membership: str, count: int, token: str, seconds: float) -> bool:
    """Wait until a peer is done with the first ``count`` exchanges of ``membership``.

    Args:
        address: ``HOST:PORT`` of its state server.
        membership: the membership's token.
        count: number of exchanges.
        token: the run's token.
        seconds: the longest wait.

    Returns:
        True when it is, or when the peer is gone; False when the time has passed.
    """
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", f"/settled/{membership}/{count}", headers=_credentials(token))
        return connection.getresponse().status == 200
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    finally:
        connection.close()
