"""The control endpoint and the workers' link, both real, in one process."""

import http.client
import json
import math
import signal
import socket
import threading

import pytest

from shoal.errors import ResumableStop, UsageError
from shoal.fleet.supervisor.control import MAX_BODY_BYTES, ControlServer, Verbs
from shoal.fleet.supervisor.forwarding import MetricsForwarder
from shoal.fleet.supervisor.roster import REMOTE_SILENCE_SECONDS, Roster
from shoal.ledger.journal import Journal
from shoal.world.elastic import link as link_module
from shoal.world.elastic.endpoint import (
    TOKEN_HEADER,
    ControlClient,
    Refused,
    version_conflict,
    versions,
)
from shoal.world.elastic.link import HttpLink, connect

from supervised import until  # isort: skip

TOKEN = "a token"


class Place:
    """A roster behind a served endpoint, and links to it."""

    def __init__(self, **settings):
        self.roster = Roster(**{"start": 2, "coordinator": "http://127.0.0.1:1", **settings})
        verbs = Verbs(self.roster, lambda: {"workers": 2}, lambda: {"resume": False})
        self.server = ControlServer("127.0.0.1", 0, TOKEN, verbs)
        self.address = f"127.0.0.1:{self.server.port}"
        self.links = []

    def worker(self):
        member = self.roster.add()
        self.links.append(HttpLink(self.address, TOKEN, member.name, "10.0.0.7"))
        return self.links[-1]

    def call(self, verb, **body):
        client = ControlClient(self.address, TOKEN)
        try:
            return client.call(verb, body)
        finally:
            client.close()

    def raw(self, method="POST", path="/status", body=b"{}", headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body, headers or {TOKEN_HEADER: TOKEN})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture
def place():
    made = []

    def make(**settings):
        made.append(Place(**settings))
        return made[-1]

    yield make
    for one in made:
        for worker in one.links:
            worker.close()
        one.server.close()


def test_a_link_knows_who_it_is_and_where_things_are(place):
    worker = place(minimum=2, patience_seconds=7.0).worker()
    assert (worker.name, worker.token, worker.advertise) == ("w0", TOKEN, "10.0.0.7")
    assert worker.coordinator == "http://127.0.0.1:1"
    assert (worker.min_workers, worker.patience_seconds) == (2, 7.0)
    assert (worker.joins(), worker.trained(), worker.leave_requested()) == (0, False, False)


def test_the_barrier_opens_when_all_are_there_and_stays_open(place):
    one = place(start=2)
    first, second = one.worker(), one.worker()
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (first.ready(), entered.set()))
    waiting.start()
    until(lambda: one.roster.get("w0").at_barrier, "w0 at the barrier")
    assert not entered.is_set()
    second.ready()
    waiting.join(10)
    assert entered.is_set()
    one.worker().ready()  # a late one passes at once


def test_the_barrier_waits_no_longer_than_told(place):
    one = place(start=3, gather_seconds=0.3)
    one.worker().ready()


def test_a_run_that_stops_does_not_let_workers_begin(place):
    one = place(start=2)
    worker = one.worker()
    threading.Timer(0.1, one.roster.stop).start()
    with pytest.raises(ResumableStop, match="the run stops"):
        worker.ready()
    until(worker.leave_requested, "the news")


def test_who_is_asked_to_leave_at_the_barrier_does_not_begin_and_is_not_waited_for(place):
    one = place(start=3)
    first, second, third = (one.worker() for _ in range(3))
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (first.ready(), entered.set()))
    waiting.start()
    until(lambda: one.roster.get("w0").at_barrier, "w0 at the barrier")
    threading.Timer(0.1, lambda: one.call("leave", name="w1")).start()
    with pytest.raises(ResumableStop):
        second.ready()
    assert one.roster.news("w1")["turned_back"]
    assert not entered.is_set()
    assert one.roster.resize(1) == (2, 1)  # w2, which has not come to the barrier
    waiting.join(10)
    assert entered.is_set()
    with pytest.raises(ResumableStop):
        third.ready()  # though it is open
    one.roster.stop()
    assert not one.roster.news("w1")["turned_back"]  # the run can be resumed with it


def test_who_has_trained_is_not_turned_back():
    roster = Roster(start=2)
    for name in ("w0", "w1"):
        roster.add()
        roster.progress(name, {"commits": 3}, 0.0)
    roster.ask_to_leave("w1")
    assert not roster.news("w1")["turned_back"]


def test_after_the_loss_of_all_that_trained_the_barrier_gathers_anew():
    roster = Roster(start=2)
    for name in ("w0", "w1"):
        roster.add()
        roster.progress(name, {"commits": 3}, 0.0)
        is_open = roster.wait_ready(name, 0.0)
    assert is_open
    roster.ended("w0", -9)
    assert not roster.lost_everybody()
    roster.add()
    assert roster.wait_ready("w2", 0.0)  # a replacement joins the one that is left
    roster.ended("w1", -9)
    assert roster.lost_everybody()
    assert not roster.lost_everybody()  # told once
    roster.add()
    assert not roster.wait_ready("w2", 0.0)  # w2 alone does not begin
    assert roster.wait_ready("w3", 0.0)


def test_knocks_of_others_are_counted_and_ones_own_are_not(place):
    one = place()
    first, second = one.worker(), one.worker()
    first.announce()
    first.announce()
    until(lambda: second.joins() == 2, "two knocks")
    second.announce()
    until(lambda: first.joins() == 1, "one knock")
    assert second.joins() == 2


def test_trained_means_another_one_that_committed_and_lives(place):
    one = place()
    first, second = one.worker(), one.worker()
    first.report({"commits": 0, "phase": "quorum"})
    until(lambda: one.roster.get("w0").row, "the report")
    assert not second.trained()
    first.report({"commits": 1, "phase": "compute"})
    until(second.trained, "the first commit")
    assert not first.trained()
    one.roster.ended("w0", -9)
    until(lambda: not second.trained(), "its end")


def test_a_worker_elsewhere_is_believed_dead_when_it_says_nothing():
    now = [0.0]
    roster = Roster(start=1, clock=lambda: now[0])
    (far,) = roster.admit(1, "far")
    roster.add()
    assert far.name == "x0"
    roster.progress(far.name, {"commits": 1}, 0.0)
    assert roster.news("w1")["trained"]
    now[0] = REMOTE_SILENCE_SECONDS + 0.1
    assert not roster.news("w1")["trained"]


def test_events_come_once_each_and_in_order_whatever_the_network_does(place, monkeypatch):
    one = place()
    real, failures = ControlClient.call, [0]

    def flaky(self, verb, body=None, **more):
        reply = real(self, verb, body, **more)
        if verb == "event" and failures[0] < 3:
            failures[0] += 1
            raise ConnectionResetError  # delivered, but the answer was lost
        return reply

    monkeypatch.setattr(ControlClient, "call", flaky)
    worker = one.worker()
    for number in range(200):
        worker.event({"kind": "note", "number": number})
    worker.close()
    assert failures[0] == 3
    got = [row["number"] for _, row in one.roster.take_events()]
    assert got == list(range(200))


def test_an_event_that_is_not_json_is_refused_where_it_is_made(place):
    with pytest.raises(TypeError):
        place().worker().event({"kind": object()})


def test_the_latest_report_wins_and_repeats_as_a_sign_of_life(place):
    one = place()
    worker = one.worker()
    for step in range(1000):
        worker.report({"step": step, "phase": "compute", "phase_seconds": 2.0})
    member = one.roster.get("w0")
    until(lambda: member.row.get("step") == 999, "the last report")
    first, began = member.heard, member.progressed
    until(lambda: member.heard > first + 0.5, "a heartbeat")
    assert member.progressed == pytest.approx(began, abs=0.25)  # its phase goes on
    assert member.heard - member.progressed > 2.0


def test_a_report_at_a_mark_is_sent_at_once(place, monkeypatch):
    monkeypatch.setattr(link_module, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(link_module, "HEARTBEAT_SECONDS", 3600.0)
    one = place()
    worker = one.worker()
    one.roster.set_marks(40, None)
    until(lambda: worker._news["mark_step"] == 40, "the news of the mark")
    worker.report({"step": 39})
    worker.report({"step": 40})
    until(lambda: one.roster.get("w0").row.get("step") == 40, "the report")


def test_closing_delivers_everything_and_says_good_bye(place):
    one = place()
    worker = one.worker()
    worker.event({"kind": "finish"})
    worker.report({"step": 7})
    worker.close()
    worker.close()
    member = one.roster.get("w0")
    assert (member.row["step"], member.closed) == (7, True)
    assert one.roster.take_events() == [("w0", {"kind": "finish"})]


def test_closing_without_a_supervisor_ends(place):
    one = place()
    worker = one.worker()
    one.server.close()
    worker.event({"kind": "finish"})
    worker.close()


def test_leaves_reach_the_worker_and_shrink_the_fleet(place):
    one = place(start=2)
    first, second = one.worker(), one.worker()
    one.call("leave", name="w1")
    until(second.leave_requested, "the request")
    assert not first.leave_requested()
    assert one.roster.wanted_local == 1
    with pytest.raises(Refused, match="no worker of that name"):
        one.call("leave", name="w1")


def test_signals_are_requests_to_leave(place):
    worker = place().worker()
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        worker.leave_on_signals()
        assert not worker.leave_requested()
        signal.raise_signal(signal.SIGUSR1)
        assert worker.leave_requested()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("staying", "far", "ask", "left", "wanted"),
    [
        (3, 0, 1, ["w1", "w2"], 1),
        (3, 0, 3, [], 3),
        (1, 0, 4, [], 4),
        (2, 1, 1, ["w1", "x2"], 1),  # x2 is elsewhere
        (1, 2, 2, ["x2"], 1),
        (1, 2, 5, [], 3),
    ],
)
def test_resize_counts_workers_of_all_machines(staying, far, ask, left, wanted):
    roster = Roster(start=staying)
    for _ in range(staying):
        roster.add()
    if far:
        roster.admit(far, "far")
    assert roster.resize(ask) == (staying + far, ask)
    assert [m.name for m in roster.members() if m.leave is not None] == left
    assert roster.wanted_local == wanted


def test_resize_gives_up_workers_that_were_not_started_yet_first():
    roster = Roster(start=3)
    roster.add()  # two are still to come, in back-off
    assert roster.resize(2) == (3, 2)
    assert roster.wanted_local == 2
    assert roster.staying()[0].leave is None


def test_nothing_changes_any_more_when_the_run_ends():
    roster = Roster(start=1)
    roster.finishing = True
    with pytest.raises(UsageError, match="the run is ending"):
        roster.resize(2)
    with pytest.raises(UsageError, match="the run is ending"):
        roster.admit(1, "far")


# ---- who may speak, and how ----------------------------------------------------------------------


def test_without_the_token_nothing_is_answered(place):
    one = place()
    for headers in ({}, {TOKEN_HEADER: "another"}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: "\xe4"}):
        status, body = one.raw(headers={"X-Other": "1", **headers})
        assert status == 401
        assert "workers" not in json.loads(body)
    assert one.raw() == (200, b'{"workers": 2}')
    with pytest.raises(UsageError, match="worker w0: refused by the supervisor: the token"):
        HttpLink(one.address, "another", one.roster.add().name, "127.0.0.1")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/resize", b"{", 400, "not JSON"),
        ("/resize", b"[1]", 400, "not a JSON object"),
        ("/resize", b"{}", 400, "workers is missing"),
        ("/resize", b'{"workers": true}', 400, "not a whole number"),
        ("/resize", b'{"workers": 0}', 400, "this run takes 1 to"),
        ("/progress", b'{"name": "w0"}', 400, "takes a row"),
        ("/event", b'{"name": "w0", "rows": [1], "first": 0}', 400, "a list of objects"),
        ("/metrics", b'{"name": "w0", "first": 0}', 400, "a list of objects"),
        ("/orders", b"{}", 400, "takes names"),
        ("/watch", b'{"name": 5, "seen": 0}', 400, "name is missing"),
        ("/leave", b'{"name": "' + b"x" * 300 + b'"}', 400, "not a short text"),
        ("/nothing", b"{}", 404, "no verb 'nothing'"),
    ],
)
def test_bad_requests_are_answered_in_one_line(place, path, body, status, message):
    got, reply = place().raw(path=path, body=body)
    error = json.loads(reply)["error"]
    assert got == status
    assert message in error
    assert "\n" not in error


def test_requests_are_bounded(place):
    one = place()
    with socket.create_connection(("127.0.0.1", one.server.port), 10) as raw:
        head = f"POST /status HTTP/1.1\r\n{TOKEN_HEADER}: {TOKEN}\r\nContent-Length: {{}}\r\n\r\n"
        raw.sendall(head.format(MAX_BODY_BYTES + 1).encode())
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
    with socket.create_connection(("127.0.0.1", one.server.port), 10) as raw:
        raw.sendall(f"POST /status HTTP/1.1\r\n{TOKEN_HEADER}: {TOKEN}\r\n\r\n".encode())
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
    assert one.raw(method="GET")[0] == 501
    assert one.raw()[0] == 200


def test_strangers_are_refused_by_name(place):
    with pytest.raises(UsageError, match="no such worker was started in this run"):
        HttpLink(place().address, TOKEN, "w7", "127.0.0.1")


def test_mixed_versions_are_refused_by_name(place, monkeypatch):
    one = place()
    assert version_conflict(versions(), versions()) is None
    theirs = {**versions(), "torchft": "0.1.0"}
    monkeypatch.setattr(link_module, "versions", lambda: theirs)
    with pytest.raises(UsageError, match=r"torchft 0\.1\.0 on the worker, .* on the supervisor"):
        one.worker()
    with pytest.raises(Refused, match=r"torchft 0\.1\.0") as refused:
        one.call("join", workers=1, host="far", versions=theirs)
    assert refused.value.status == 409
    assert len(one.roster.members()) == 1  # nobody was let in by the second


def test_another_machine_is_given_names_and_told_whom_to_kill(place):
    one = place(start=1)
    one.worker()
    reply = one.call("join", workers=2, host="far", versions=versions())
    assert reply["names"] == ["x1", "x2"]
    assert [m.host for m in one.roster.members()] == ["", "far", "far"]
    assert [(name, row["kind"]) for name, row in one.roster.take_events()] == [
        ("x1", "worker_joined"),
        ("x2", "worker_joined"),
    ]
    one.roster.get("x2").killed = "hang"
    one.call("leave", name="x1")
    assert one.call("orders", names=["x1", "x2", "x9"]) == {
        "kill": ["x2"],
        "end": ["x1"],  # it has not said hello
        "stopping": False,
    }
    one.call("hello", name="x1", pid=7, host="far", versions=versions())
    assert one.call("orders", names=["x1", "x2", "x9"])["end"] == []
    one.call("exited", name="x2", code=-9)
    assert not one.roster.get("x2").alive


def test_metrics_of_another_machine_are_sent_on_each_row_once(place, tmp_path):
    one = place(start=1)
    one.worker()
    (name,) = one.call("join", workers=1, host="far", versions=versions())["names"]
    client = ControlClient(one.address, TOKEN)
    forwarder = MetricsForwarder(client, tmp_path)
    forwarder.forward(name)  # it has written nothing yet
    with Journal(tmp_path / "metrics" / f"{name}.jsonl") as journal:
        for step in range(1200):
            journal.append({"step": step, "loss": math.nan})
        with journal.path.open("a") as torn:
            torn.write('{"step": 12')
        forwarder.forward(name)
        forwarder.forward(name)
        with journal.path.open("a") as rest:
            rest.write('00, "loss": 1.0}\n')
        forwarder.forward(name)
    client.close()
    # What the supervisor has already is dropped there, too.
    one.call("metrics", name=name, first=1199, rows=[{"step": -1}, {"step": -1}])
    got = one.roster.metrics()
    assert {who for who, _ in got} == {name}
    assert [row["step"] for _, row in got] == list(range(1201))
    with pytest.raises(Refused, match="only metrics of another machine's workers"):
        one.call("metrics", name="w0", first=0, rows=[])


def test_a_worker_needs_the_environment_of_shoal_run(monkeypatch):
    for key in ("SHOAL_CONTROL", "SHOAL_TOKEN", "SHOAL_WORKER"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(UsageError, match="SHOAL_CONTROL, SHOAL_TOKEN, SHOAL_WORKER unset"):
        connect()
    monkeypatch.setenv("SHOAL_CONTROL", "127.0.0.1:1")
    monkeypatch.setenv("SHOAL_TOKEN", "t")
    monkeypatch.setenv("SHOAL_WORKER", "w0")
    with pytest.raises(UsageError, match="no supervisor answers there"):
        connect()
    monkeypatch.setenv("SHOAL_CONTROL", "nonsense")
    with pytest.raises(UsageError, match="it must be HOST:PORT"):
        connect()


def test_a_port_in_use_is_refused(place):
    one = place()
    with pytest.raises(UsageError, match=f"--port {one.server.port}: cannot listen there"):
        ControlServer("127.0.0.1", one.server.port, TOKEN, Verbs(one.roster, dict, dict))
