"""The control endpoint: a small HTTP/JSON server with a per-run token.

Workers, ``shoal resize`` and ``shoal run --join`` post to it; a roster holds the state.
Every request needs the token (compared in constant time), is bounded in size and in time, and is
answered with JSON; an error is ``{"error": one line}``.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shoal.errors import UsageError
from shoal.fleet.supervisor.roster import Roster
from shoal.world.elastic.endpoint import TOKEN_HEADER, version_conflict, versions
from shoal.world.elastic.link import WATCH_SECONDS

MAX_BODY_BYTES = 1 << 20
IDLE_SECONDS = 60.0
MAX_CONNECTIONS = 1024

Body = Mapping[str, object]
Reply = dict[str, object]


class BadRequest(Exception):
    """A request this endpoint does not take; ``status`` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Verbs:
    """What the endpoint does for each verb: pure dispatch on a roster, without any network.

    Args:
        roster: the state.
        status: makes the document that ``status`` answers with.
        joined: what a machine that joins is told besides its workers' names.
    """

    def __init__(
        self, roster: Roster, status: Callable[[], Reply], joined: Callable[[], Reply]
    ) -> None:
        self._roster, self._status, self._joined = roster, status, joined
        self._verbs: dict[str, Callable[[Body], Reply]] = {
            "hello": self._hello,
            "ready": self._ready,
            "announce": self._announce,
            "watch": self._watch,
            "progress": self._progress,
            "event": self._event,
            "metrics": self._metrics,
            "bye": self._bye,
            "resize": self._resize,
            "leave": self._leave,
            "join": self._join,
            "exited": self._exited,
            "orders": self._orders,
            "status": lambda _body: self._status(),
        }

    def __call__(self, verb: str, body: Body) -> Reply:
        """Answer one request.

        Raises:
            BadRequest: what was asked cannot be done; the text says why.
        """
        handler = self._verbs.get(verb)
        if handler is None:
            raise BadRequest(404, f"no verb {verb[:40]!r}; there are {', '.join(self._verbs)}")
        try:
            return handler(body)
        except UsageError as error:
            raise BadRequest(400, str(error)) from None

    def _hello(self, body: Body) -> Reply:
        self._check_versions(body)
        name = _text(body, "name")
        if not self._roster.hello(name, _integer(body, "pid"), _text(body, "host")):
            raise BadRequest(409, f"worker = {name!r}; no such worker was started in this run")
        return self._roster.news(name)

    def _ready(self, body: Body) -> Reply:
        name = _text(body, "name")
        is_open = self._roster.wait_ready(name, WATCH_SECONDS)
        stopping = self._roster.stopping or self._roster.turned_back(name)
        return {"open": is_open, "stopping": stopping}

    def _announce(self, body: Body) -> Reply:
        self._roster.knock(_text(body, "name"), _integer(body, "knocks"))
        return {}

    def _watch(self, body: Body) -> Reply:
        return self._roster.wait_news(_text(body, "name"), _integer(body, "seen"), WATCH_SECONDS)

    def _progress(self, body: Body) -> Reply:
        row, age = body.get("row"), body.get("age_seconds")
        if not isinstance(row, dict) or not isinstance(age, int | float):
            raise BadRequest(400, "progress takes a row (an object) and age_seconds (a number)")
        self._roster.progress(_text(body, "name"), row, float(age))
        return {}

    def _event(self, body: Body) -> Reply:
        self._roster.take(_text(body, "name"), _integer(body, "first"), _rows(body))
        return {}

    def _metrics(self, body: Body) -> Reply:
        self._roster.take_metrics(_text(body, "name"), _integer(body, "first"), _rows(body))
        return {}

    def _bye(self, body: Body) -> Reply:
        self._roster.bye(_text(body, "name"))
        return {}

    def _resize(self, body: Body) -> Reply:
        before, after = self._roster.resize(_integer(body, "workers"))
        return {"workers_before": before, "workers_after": after}

    def _leave(self, body: Body) -> Reply:
        name = _text(body, "name")
        if not self._roster.ask_to_leave(name):
            raise BadRequest(400, f"name = {name!r}; no worker of that name is in the fleet")
        return {"name": name}

    def _join(self, body: Body) -> Reply:
        self._check_versions(body)
        host = _text(body, "host") or "unnamed"
        members = self._roster.admit(_integer(body, "workers"), host)
        return {"names": [member.name for member in members], **self._joined()}

    def _exited(self, body: Body) -> Reply:
        member = self._roster.get(_text(body, "name"))
        if member is None or not member.host:
            raise BadRequest(400, "only workers of another machine are reported ended")
        self._roster.ended(member.name, _integer(body, "code"))
        return {}

    def _orders(self, body: Body) -> Reply:
        names = body.get("names")
        if not isinstance(names, list):
            raise BadRequest(400, "orders takes names, a list")
        kill, end = self._roster.orders([str(name) for name in names])
        return {"kill": kill, "end": end, "stopping": self._roster.stopping}

    def _check_versions(self, body: Body) -> None:
        theirs = body.get("versions")
        conflict = version_conflict(versions(), theirs if isinstance(theirs, dict) else {})
        if conflict:
            raise BadRequest(409, conflict)


def _text(body: Body, key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or len(value) > 256:
        raise BadRequest(400, f"{key} is missing or not a short text")
    return value


def _rows(body: Body) -> list[dict[str, object]]:
    rows = body.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadRequest(400, "rows is missing or not a list of objects")
    return rows


def _integer(body: Body, key: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(400, f"{key} is missing or not a whole number")
    return value


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    @property
    def _owner(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def do_POST(self) -> None:
        try:
            self._answer(200, self._owner.verbs(self.path.lstrip("/"), self._body()))
        except BadRequest as error:
            self._answer(error.status, {"error": str(error)})

    def _body(self) -> Body:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise BadRequest(413, f"a request has a length, of at most {MAX_BODY_BYTES} bytes")
        raw = self.rfile.read(int(length))  # before any refusal: unread bytes would reset the reply
        given = self.headers.get(TOKEN_HEADER, "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self._owner.token.encode()):
            self.close_connection = True
            raise BadRequest(401, "the token is not this run's (SHOAL_TOKEN or --token-file)")
        try:
            body = json.loads(raw)
        except ValueError:
            raise BadRequest(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise BadRequest(400, "the body is not a JSON object")
        return body

    def _answer(self, status: int, reply: Reply) -> None:
        payload = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are many and hold nothing a user wants to read."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], token: str, verbs: Verbs) -> None:
        self.token, self.verbs = token, verbs
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without the name look-up of the base class, which can take seconds."""
        # A restart within a minute must get the port; two supervisors cannot share it all the same.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def process_request(self, request: object, client_address: object) -> None:
        """Serve in a thread of its own, unless too many are open."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Serve one connection and free its slot."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A worker that dies in the middle of a request is no event of its own."""


class ControlServer:
    """The endpoint on a socket, served from background threads until :meth:`close`.

    Args:
        bind: address to listen on.
        port: port to listen on, 0 for any.
        token: the run's secret.
        verbs: what answers.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, bind: str, port: int, token: str, verbs: Verbs) -> None:
        try:
            self._server = _Server((bind, port), token, verbs)
        except OSError as error:
            raise UsageError(
                f"--bind {bind} --port {port}: cannot listen there ({error.strerror or error}); "
                "choose another port, or leave --port out to take any free one"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="shoal-control",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
