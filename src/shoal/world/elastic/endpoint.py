"""How to speak to a control endpoint: one kept-alive HTTP connection, JSON both ways, a token.

On the standard library alone; importing this module imports neither torch nor torchft.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shoal.errors import ShoalError, UsageError

TOKEN_HEADER = "X-Shoal-Token"
BYTE_ORDER = "byte order"
SOURCE = "shoal source"
# Where the code is that decides what workers exchange, and in which order.
_EXCHANGING = ("data", "fleet", "scaling", "sync", "world", "world/elastic")
PATIENCE_SECONDS = 10.0  # a reply later than this: the connection is given up and opened again


class Refused(ShoalError):
    """The control endpoint answered, and said no; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def versions() -> dict[str, str | None]:
    """What must be equal on the supervisor and all workers; None for what is missing.

    A build's local part (``+cpu``) is left out: builds of one version talk to each other. The order of
    bytes counts too, because a state travels as the machine has it; and so does the source itself: with
    an editable install it changes under a run, and a newcomer that exchanges one number more than the
    others ends them (Gloo aborts the process that receives more than it expects).
    """
    found: dict[str, str | None] = {}
    for package in ("shoal", "torch", "torchft"):
        try:
            found[package] = metadata.version(package).split("+")[0]
        except metadata.PackageNotFoundError:
            found[package] = None
    found[BYTE_ORDER] = sys.byteorder
    found[SOURCE] = _LOADED
    return found


def source_digest() -> str:
    """A short hash of the files, as they are now, whose code decides what workers exchange."""
    package = Path(__file__).parents[2]
    word = hashlib.blake2b(digest_size=4)
    for room in _EXCHANGING:
        for path in sorted((package / room).glob("*.py")):
            word.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return word.hexdigest()


# Taken when this is imported, with the code itself: what a process runs does not change with its files.
_LOADED = source_digest()


def version_conflict(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """One line that names the first difference between two :func:`versions`, or None."""
    for package, wanted in ours.items():
        if theirs.get(package) == wanted:
            continue
        if package == BYTE_ORDER:
            return (
                f"byte order {theirs.get(package)} on the worker, {wanted} on the supervisor; states "
                "travel as raw bytes; use machines of one byte order"
            )
        if package == SOURCE:
            return (
                f"{SOURCE} {theirs.get(package) or '(none)'} on the worker, {wanted} on the "
                "supervisor; workers of different code exchange different things; install one version "
                "on both, or, if its files were edited meanwhile, start the run again with --resume"
            )
        return (
            f"{package} {theirs.get(package) or '(none)'} on the worker, "
            f"{wanted or '(none)'} on the supervisor; one fleet runs one version of {package}, "
            f"because mixed ones fail without an error; install {package}=={wanted} there too"
        )
    return None


class ControlClient:
    """One kept-alive connection to a control endpoint. Not shared between threads.

    Args:
        address: ``HOST:PORT`` of the control endpoint.
        token: the run's secret.
        timeout_seconds: the longest wait for a connection or a reply; a long poll adds its own.
    """

    def __init__(self, address: str, token: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"control address = {address!r}; it must be HOST:PORT, e.g. 10.0.0.1:29600"
            )
        self._host, self._port = host.strip("[]"), int(port)
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPConnection | None = None
        self._busy: http.client.HTTPConnection | None = None
        self._interrupted = False

    def call(
        self, verb: str, body: Mapping[str, object] | None = None, *, wait_seconds: float = 0.0
    ) -> dict[str, object]:
        """Post ``body`` to ``verb`` and return the reply.

        Raises:
            Refused: the endpoint answered with an error.
            OSError: it could not be reached, or broke off.
        """
        payload = json.dumps(body or {}).encode()
        headers = {TOKEN_HEADER: self._token, "Content-Type": "application/json"}
        kept_alive = self._connection is not None
        try:
            status, raw = self._exchange(verb, payload, headers, wait_seconds)
        except ConnectionError:
            # The endpoint closes idle connections; that says nothing about whether it is there.
            if not kept_alive or self._interrupted:
                raise
            status, raw = self._exchange(verb, payload, headers, wait_seconds)
        try:
            reply = json.loads(raw)
        except ValueError as error:
            raise ConnectionError(
                f"{self._host}:{self._port} is not a shoal control endpoint"
            ) from error
        if status != 200:
            raise Refused(status, str(reply.get("error", f"HTTP status {status}")))
        return reply

    def _exchange(
        self, verb: str, payload: bytes, headers: dict[str, str], wait_seconds: float
    ) -> tuple[int, bytes]:
        timeout = self._timeout_seconds + wait_seconds
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        elif connection.sock is not None:
            connection.sock.settimeout(timeout)
        self._connection = None
        try:
            if connection.sock is None:
                connection.connect()
            self._busy = connection
            if self._interrupted:
                raise ConnectionAbortedError("interrupted")
            connection.request("POST", f"/{verb}", payload, headers)
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(f"{self._host}:{self._port} broke off: {error!r}") from error
        except OSError:
            connection.close()
            raise
        finally:
            self._busy = None
        self._connection = connection
        return status, raw

    def interrupt(self) -> None:
        """Make a call that waits for its reply fail at once, for good; from any thread."""
        self._interrupted = True
        busy = self._busy
        if busy is not None and busy.sock is not None:
            with contextlib.suppress(OSError):
                busy.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
