"""What a person sees: event lines, progress lines, the live table."""

import io

from shoal.fleet.supervisor.member import Member
from shoal.fleet.supervisor.screen import (
    LiveScreen,
    PlainScreen,
    Progress,
    duration,
    event_line,
    open_screen,
    progress_line,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def member(name, **row):
    return Member(name=name, index=0, host="", started=0.0, hello=1.0, pid=42, row=row)


def a_view(progress=None, now=0.0, samples=500):
    w0 = member(
        "w0",
        step=50,
        samples=samples,
        commits=50,
        workers=2,
        total_samples=2000,
        epoch=1,
        phase="compute",
        global_batch=20,
        lr=0.1,
        lr_target=0.2,
        loss=1.25,
    )
    w1 = member("w1", step=49, samples=samples - 20, commits=49, workers=2, phase="exchange")
    return (progress or Progress()).view([w0, w1], now)


def test_a_membership_event_is_one_line_with_everything():
    row = {
        "kind": "join",
        "time": 1.0,
        "step": 40,
        "samples": 800,
        "workers_before": 1,
        "workers_after": 3,
        "names": ["w1", "w2"],
        "global_batch": 60,
        "lr": 0.1,
        "lr_target": 0.3,
        "ramp_end_step": 64,
        "seconds_without_progress": 0.123,
    }
    assert event_line(row) == (
        "[join] step 40 · samples 800 · workers 1 → 3 (w1, w2) · global batch 60 · lr 0.1 → 0.3 · "
        "ramp ends at step 64 · 0.12 s without progress"
    )
    down = {**row, "kind": "kill", "lr_target": 0.1, "ramp_end_step": None}
    assert "· lr 0.1 · 0.12 s" in event_line(down)


def test_other_events_show_what_they_hold():
    row = {"kind": "worker_exited", "time": 1.0, "worker": "w1", "code": -9, "signal": None}
    assert event_line(row) == "[worker_exited] worker w1 · code -9"
    assert event_line({"kind": "fleet_lost", "time": 1.0}) == "[fleet_lost]"


def test_progress_is_measured_over_the_last_seconds():
    progress = Progress()
    assert a_view(progress, 0.0, 500).rate is None
    view = a_view(progress, 5.0, 1000)
    assert view.rate == 100.0
    assert view.eta_seconds == 10.0
    assert progress_line(view) == (
        "step 50 · samples 1,000 of 2,000 · epoch 1 · workers 2 · global batch 20 · lr 0.1 → 0.2 · "
        "loss 1.25 · 100 samples/s · 10s left"
    )
    for second in range(6, 40):  # faster from now on: old seconds are forgotten
        view = a_view(progress, float(second), 1000 + 200 * second)
    assert view.rate == 200.0


def test_nothing_is_made_up_before_the_first_report():
    view = Progress().view([Member(name="w0", index=0, host="", started=0.0)], 0.0)
    assert progress_line(view) == "step 0 · samples 0 · workers 0 +1 starting"


def test_workers_are_the_members_of_the_last_committed_step():
    reports = [
        member("w0", step=50, samples=1000, commits=50, workers=2, phase="compute"),
        member("w1", step=50, samples=1000, commits=50, workers=2, phase="compute"),
        # Let in, its state on its way; at the door; still importing.
        member("w2", step=0, samples=0, commits=-1, workers=1, phase="quorum"),
        member("w3"),
        Member(name="w4", index=0, host="", started=0.0),
        # Asked to leave before it began: nobody waits for it.
        Member(name="w5", index=0, host="", started=0.0, leave=1.0),
    ]
    assert "· workers 2 +3 starting ·" in progress_line(Progress().view(reports, 0.0)) + " ·"
    reports[0].row["workers"] = reports[1].row["workers"] = 3
    reports[2].row.update(samples=1000, commits=50, workers=3)
    del reports[1], reports[2:]  # one has just died: the next step has not been committed yet
    assert progress_line(Progress().view(reports, 0.0)).endswith("· workers 3")


def test_durations_are_short():
    assert [duration(s) for s in (0.4, 59.4, 60, 185, 7620)] == [
        "0s",
        "59s",
        "1m00s",
        "3m05s",
        "2h07m",
    ]


def test_a_terminal_gets_a_live_table_with_lines_above():
    stream = Terminal()
    screen = open_screen(stream, "shoal run train.py")
    assert isinstance(screen, LiveScreen)
    screen.line("[kill] a line [with brackets]")
    screen.show(a_view())
    screen.close()
    shown = stream.getvalue()
    for text in ("[kill] a line [with brackets]", "shoal run train.py", "w0", "exchange", "42"):
        assert text in shown
    assert "loss 1.25" in " ".join(shown.split())


def test_elsewhere_lines_are_plain(monkeypatch):
    stream = io.StringIO()
    screen = open_screen(stream, "title")
    assert isinstance(screen, PlainScreen)
    now = [1000.0]
    monkeypatch.setattr("shoal.fleet.supervisor.screen.time.monotonic", lambda: now[0])
    screen = PlainScreen(stream)
    screen.line("a line")
    for _ in range(3):
        screen.show(a_view())
    now[0] += 6.0
    screen.show(a_view())
    screen.show(a_view())
    now[0] += 6.0
    screen.show(a_view())  # nothing has moved
    screen.close()
    assert stream.getvalue().splitlines() == ["a line", progress_line(a_view())]
