"""A worker's side of the supervisor's control endpoint, over HTTP on the standard library alone.

Two background threads do all the talking: one waits for news (a long poll), the other delivers
the newest report and the queued events and, by doing so, shows that this process is alive. So
every call of :class:`HttpLink` but ``ready`` answers from memory. Importing this module imports
neither torch nor torchft.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping

from shoal.errors import ResumableStop, UsageError
from shoal.world.elastic.endpoint import ControlClient, Refused, versions

REPORT_SECONDS = 0.25  # a changed report is posted at most this often
HEARTBEAT_SECONDS = 0.5  # an unchanged one is repeated this often, with the age of its phase
WATCH_SECONDS = 10.0  # how long one long poll may take
CLOSE_SECONDS = 5.0  # how long close() tries to deliver what is queued
EVENTS_PER_POST = 64


class HttpLink:
    """The :class:`~shoal.world.elastic.contract.Link` of a worker started by ``shoal run``.

    Args:
        address: ``HOST:PORT`` of the control endpoint.
        token: the run's secret.
        name: this worker's name in the run.
        advertise: address under which other workers reach this one.

    Raises:
        UsageError: the supervisor refused this worker (other versions, a wrong token, a name it
            does not know), or none answers.
    """

    def __init__(self, address: str, token: str, name: str, advertise: str) -> None:
        self._address, self._token, self._name, self._advertise = address, token, name, advertise
        hello = {
            "name": name,
            "pid": os.getpid(),
            "host": platform.node(),
            "versions": versions(),
        }
        client = ControlClient(address, token)
        try:
            reply = client.call("hello", hello)
        except Refused as error:
            raise UsageError(f"worker {name}: refused by the supervisor: {error}") from None
        except OSError as error:
            raise UsageError(
                f"SHOAL_CONTROL = {address}: no supervisor answers there ({error}); start workers "
                "with `shoal run`, or unset SHOAL_CONTROL to train alone"
            ) from None
        finally:
            client.close()
        self._news: dict[str, object] = reply
        self._signalled = False
        self._latest: tuple[int, dict[str, object], float] | None = None
        self._reported = 0
        self._has_commits = False
        self._events: deque[tuple[int, str]] = deque()
        self._event_count = 0
        self._knocks = 0
        self._prompt = False
        self._closed = False
        self._closed_at = math.inf
        self._outbox = threading.Condition()
        self._watcher = ControlClient(address, token)
        self._threads = [
            threading.Thread(target=self._watch, name="shoal-watch", daemon=True),
            threading.Thread(target=self._post, name="shoal-post", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def coordinator(self) -> str:
        """Address of the lighthouse, ``http://HOST:PORT``."""
        return str(self._news["coordinator"])

    @property
    def name(self) -> str:
        """This worker's name, unique in the run."""
        return self._name

    @property
    def token(self) -> str:
        """The run's secret."""
        return self._token

    @property
    def advertise(self) -> str:
        """Address under which other workers reach this one."""
        return self._advertise

    @property
    def min_workers(self) -> int:
        """The run goes on with at least this many workers."""
        return int(_number(self._news, "min_workers"))

    @property
    def patience_seconds(self) -> float:
        """How long workers wait below ``min_workers`` before they stop in order."""
        return _number(self._news, "patience_seconds")

    def ready(self) -> None:
        """Block until this worker may enter its first quorum: the start barrier.

        Raises:
            ResumableStop: the supervisor gave the start up, or is gone.
        """
        client = ControlClient(self._address, self._token)
        try:
            while True:
                try:
                    reply = client.call("ready", {"name": self._name}, wait_seconds=WATCH_SECONDS)
                except (OSError, Refused) as error:
                    raise ResumableStop(
                        f"worker {self._name}: lost the supervisor: {error}"
                    ) from None
                if reply["stopping"]:
                    raise ResumableStop(
                        f"worker {self._name}: the run stops before this worker started"
                    )
                if reply["open"]:
                    return
        finally:
            client.close()

    def announce(self) -> None:
        """Knock: ``joins()`` grows by one on all other workers."""
        with self._outbox:
            self._knocks += 1
            self._outbox.notify_all()

    def joins(self) -> int:
        """How often other workers knocked so far."""
        return int(_number(self._news, "joins"))

    def trained(self) -> bool:
        """Whether another worker that has committed something is believed alive."""
        return bool(self._news["trained"])

    def leave_requested(self) -> bool:
        """Whether this worker was asked to leave in order, by the supervisor or by a signal."""
        return self._signalled or bool(self._news["leave"])

    def leave_on_signals(self) -> None:
        """Take SIGTERM and SIGUSR1 as requests to leave. Call it from the main thread."""

        def request(_signum: int, _frame: object) -> None:
            self._signalled = True

        signal.signal(signal.SIGTERM, request)
        signal.signal(signal.SIGUSR1, request)

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Say where this worker is; the latest wins. Posted from the background."""
        self._reported += 1
        row: dict[str, object] = dict(progress)
        self._latest = (self._reported, row, time.monotonic())
        if self._is_prompt(row):
            with self._outbox:
                self._prompt = True
                self._outbox.notify_all()

    def event(self, row: Mapping[str, object]) -> None:
        """Queue an event; events arrive in order, each once.

        Raises:
            TypeError: the row is not JSON-able.
        """
        with self._outbox:
            self._events.append((self._event_count, json.dumps(dict(row))))
            self._event_count += 1
            self._outbox.notify_all()

    def close(self) -> None:
        """Deliver what is queued (bounded) and stop the threads. Harmless when called twice."""
        with self._outbox:
            if self._closed:
                return
            self._closed = True
            self._closed_at = time.monotonic()
            self._outbox.notify_all()
        atexit.unregister(self.close)
        for thread in self._threads:
            self._watcher.interrupt()
            thread.join(CLOSE_SECONDS)

    def _is_prompt(self, row: Mapping[str, object]) -> bool:
        """Worth a message of its own: the first commit, and a mark the supervisor waits for."""
        if not self._has_commits and _number(row, "commits") > 0:
            self._has_commits = True
            return True
        return any(
            mark is not None and _number(row, key) >= mark
            for key, mark in (
                ("step", self._mark("mark_step")),
                ("samples", self._mark("mark_samples")),
            )
        )

    def _mark(self, key: str) -> float | None:
        mark = self._news.get(key)
        return mark if isinstance(mark, int | float) else None

    def _watch(self) -> None:
        """Follow the supervisor's news; silent while it cannot be reached."""
        client = self._watcher
        pause = 0.05
        while not self._closed:
            try:
                body = {"name": self._name, "seen": self._news["version"]}
                self._news = client.call("watch", body, wait_seconds=WATCH_SECONDS)
                pause = 0.05
            except (OSError, Refused):
                with self._outbox:
                    if not self._closed:
                        self._outbox.wait(pause)
                pause = min(2 * pause, 1.0)
        client.close()

    def _post(self) -> None:
        """Deliver knocks, events and the newest report; repeat the report as a heartbeat."""
        client = ControlClient(self._address, self._token)
        posted_knocks, posted_report, posted_at = 0, -1, -math.inf
        pause = REPORT_SECONDS
        while True:
            with self._outbox:
                quiet = not self._events and self._knocks == posted_knocks
                if quiet and not self._prompt and not self._closed:
                    self._outbox.wait(pause)
                self._prompt = False
                closing, knocks = self._closed, self._knocks
                events = [self._events[i] for i in range(min(len(self._events), EVENTS_PER_POST))]
            try:
                if knocks != posted_knocks:
                    client.call("announce", {"name": self._name, "knocks": knocks})
                    posted_knocks = knocks
                if events:
                    self._deliver(client, events)
                latest = self._latest
                now = time.monotonic()
                changed = latest is not None and latest[0] != posted_report
                if latest is not None and (changed or now - posted_at >= HEARTBEAT_SECONDS):
                    count, row, said_at = latest
                    body = {"name": self._name, "row": row, "age_seconds": now - said_at}
                    client.call("progress", body)
                    posted_report, posted_at = count, now
                pause = REPORT_SECONDS
            except (OSError, Refused) as error:
                # Events are worth some tries more, unless nobody is there to take them.
                if closing and (isinstance(error, ConnectionRefusedError) or self._is_late()):
                    break
                pause = min(2 * pause, 1.0)
                time.sleep(0.05 if closing else pause)
                continue
            if closing and not self._events:
                with contextlib.suppress(OSError, Refused):
                    client.call("bye", {"name": self._name})
                break
        client.close()

    def _is_late(self) -> bool:
        return time.monotonic() - self._closed_at > CLOSE_SECONDS

    def _deliver(self, client: ControlClient, events: list[tuple[int, str]]) -> None:
        """Post a run of events; the supervisor drops those it has already."""
        rows = [json.loads(text) for _, text in events]
        client.call("event", {"name": self._name, "first": events[0][0], "rows": rows})
        with self._outbox:
            for _ in events:
                self._events.popleft()


def _number(row: Mapping[str, object], key: str) -> float:
    value = row.get(key)
    return value if isinstance(value, int | float) else -math.inf


def connect() -> HttpLink:
    """The link of this process, from the environment that ``shoal run`` gives its workers.

    Raises:
        UsageError: the environment is not that of a worker, or the supervisor refused this one.
    """
    missing = [
        key for key in ("SHOAL_CONTROL", "SHOAL_TOKEN", "SHOAL_WORKER") if not os.environ.get(key)
    ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} unset; a worker of a fleet is started by `shoal run`"
        )
    return HttpLink(
        os.environ["SHOAL_CONTROL"],
        os.environ["SHOAL_TOKEN"],
        os.environ["SHOAL_WORKER"],
        os.environ.get("SHOAL_ADVERTISE", "127.0.0.1"),
    )
