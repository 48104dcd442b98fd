"""The supervisor's decisions, each a pure function: replacing, hanging, endings, settings."""

import os
import signal

import pytest

from shoal.errors import UsageError
from shoal.fleet.supervisor.endings import Survivors, classify
from shoal.fleet.supervisor.environment import threads_per_worker, worker_environment
from shoal.fleet.supervisor.follow import LogFollower
from shoal.fleet.supervisor.member import Member
from shoal.fleet.supervisor.notice import NoticeFile
from shoal.fleet.supervisor.processes import last_line, last_traceback
from shoal.fleet.supervisor.replacements import Replacements
from shoal.fleet.supervisor.roster import NO_LIMIT
from shoal.fleet.supervisor.rundir import (
    RunLock,
    check_fresh,
    check_joined,
    default_dir,
    find_control,
    is_shared,
    latest_dir,
)
from shoal.fleet.supervisor.script import parse
from shoal.fleet.supervisor.script_watch import ScriptWatch
from shoal.fleet.supervisor.settings import Settings, parse_workers
from shoal.fleet.supervisor.stopping import Stop
from shoal.fleet.supervisor.watchdog import Watchdog
from shoal.fleet.supervisor.worker_main import DIVERGED
from shoal.ledger.journal import Journal


def member(**fields):
    return Member(**{"name": "w0", "index": 0, "host": "", "started": 0.0, **fields})


# ---- replacing -----------------------------------------------------------------------------------


def test_deaths_without_progress_wait_longer_and_longer_and_end():
    policy = Replacements(max_restarts=5, window_seconds=300.0)
    due = [policy.died(0.0, took_part=False, fleet_commits=-1) for _ in range(6)]
    assert due == [0.0, 0.5, 1.0, 2.0, 4.0, None]


def test_the_wait_is_bounded_and_old_deaths_are_forgotten():
    policy = Replacements(max_restarts=20, window_seconds=300.0)
    waits = [policy.died(0.0, took_part=False, fleet_commits=-1) for _ in range(15)]
    assert max(waits) == 30.0
    assert policy.died(301.0, took_part=False, fleet_commits=-1) == 301.0


def test_a_fleet_that_goes_on_replaces_at_once_and_for_ever():
    policy = Replacements(max_restarts=2, window_seconds=300.0)
    for step in range(50):
        assert policy.died(float(step), took_part=True, fleet_commits=step) == float(step)
    # The same step again and again is no progress: a sample that kills every worker.
    due = [policy.died(60.0, took_part=True, fleet_commits=49) for _ in range(3)]
    assert due == [60.0, 60.5, None]


def test_max_restarts_0_never_replaces():
    policy = Replacements(max_restarts=0, window_seconds=300.0)
    assert policy.died(0.0, took_part=True, fleet_commits=5) is None


def test_exceptions_before_any_commit_are_the_scripts():
    policy = Replacements(max_restarts=10, window_seconds=300.0)
    tries = [policy.is_hopeless(by_exception=True, ever_committed=False) for _ in range(3)]
    assert tries == [False, False, True]
    assert not policy.is_hopeless(by_exception=True, ever_committed=True)


# ---- hanging -------------------------------------------------------------------------------------


def hears(worker, now, phase="compute", seconds=0.0, step=5):
    worker.heard, worker.row = now, {"phase": phase, "step": step}
    worker.progressed = now - seconds


def phases(watchdog, workers, now):
    return [(hang.name, hang.phase) for hang in watchdog.look(workers, now)]


def test_the_culprit_is_found_and_its_victims_are_not():
    watchdog = Watchdog(10.0, 100.0)
    culprit, victim = member(hello=0.0), member(name="w1", hello=0.0)
    for now in range(0, 12):
        hears(culprit, float(now), seconds=float(now))
        hears(victim, float(now), phase="exchange", seconds=float(now))
        assert phases(watchdog, [culprit, victim], float(now)) == (
            [("w0", "compute")] if now > 10 else []
        )


def test_a_stopped_process_is_found_by_its_silence():
    watchdog = Watchdog(10.0, 100.0)
    stopped, victim = member(hello=0.0), member(name="w1", hello=0.0)
    hears(stopped, 0.0, phase="exchange")
    for now in range(0, 12):
        hears(victim, float(now), phase="exchange", seconds=float(now))
        assert phases(watchdog, [stopped, victim], float(now)) == (
            [("w0", "silent")] if now > 10 else []
        )


def test_a_worker_that_is_slow_by_nature_is_left_alone():
    watchdog = Watchdog(10.0, 100.0)
    slow = member(hello=0.0)
    now = 0.0
    for step in range(1, 4):  # steps of 9 seconds
        for age in range(9):
            hears(slow, now, seconds=float(age), step=step)
            assert phases(watchdog, [slow], now) == []
            now += 1.0
    for age in range(40):  # then one of 40: five times the longest seen is allowed
        hears(slow, now, seconds=float(age), step=4)
        assert phases(watchdog, [slow], now) == []
        now += 1.0
    hears(slow, now, seconds=41.0, step=4)
    assert phases(watchdog, [slow], now) == [("w0", "compute")]


def test_the_first_step_and_the_users_own_code_get_longer():
    watchdog = Watchdog(10.0, 1000.0)
    first, own = member(hello=0.0), member(name="w1", hello=0.0)
    for now in range(0, 102):
        hears(first, float(now), seconds=float(now), step=0)
        hears(own, float(now), phase="user", seconds=float(now), step=5)
        expected = [("w0", "compute"), ("w1", "user")] if now > 100 else []
        assert phases(watchdog, [first, own], float(now)) == expected


def test_waiting_below_the_minimum_is_no_hang():
    watchdog = Watchdog(2.0, 20.0)
    waits = member(hello=0.0)
    for now in range(0, 300):
        hears(waits, float(now), phase="quorum", seconds=float(now))
        assert phases(watchdog, [waits], float(now)) == []


def test_a_first_evaluation_gets_longer_and_a_later_one_goes_by_the_first():
    watchdog = Watchdog(10.0, 1000.0)
    worker = member(hello=0.0)
    now = 0.0
    for age in range(0, 99):  # one chunk takes ten times what a step may take
        hears(worker, now, phase="evaluate", seconds=float(age))
        assert phases(watchdog, [worker], now) == []
        now += 1.0
    hears(worker, now, phase="compute", seconds=0.0)
    assert phases(watchdog, [worker], now) == []
    for age in range(0, 600, 4):
        now += 4.0
        hears(worker, now, phase="evaluate", seconds=float(age))
        expected = [("w0", "evaluate")] if age > 5 * 98 else []
        assert phases(watchdog, [worker], now) == expected


def test_nobody_is_judged_for_the_supervisors_own_sleep():
    watchdog = Watchdog(10.0, 100.0)
    worker = member(hello=0.0)
    hears(worker, 0.0)
    assert phases(watchdog, [worker], 0.0) == []
    assert phases(watchdog, [worker], 500.0) == []  # the machine slept
    hears(worker, 501.0)
    for now in range(501, 512):
        assert phases(watchdog, [worker], float(now)) == []
    assert phases(watchdog, [worker], 512.0) == [("w0", "silent")]


def test_silence_means_nothing_before_the_first_report_and_after_the_last():
    watchdog = Watchdog(10.0, 100.0)
    at_work, done, dead = (
        member(hello=1.0),
        member(closed=True, heard=0.0),
        member(ended=1.0, heard=0.0),
    )
    stuck = member(name="w9")
    for now in range(0, 102, 3):
        found = phases(watchdog, [at_work, done, dead, stuck], float(now))
        assert found == ([("w9", "start")] if now > 100 else [])


# ---- endings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "stopping", "reason", "replace", "stop_code"),
    [
        ({}, 0, False, "finished", False, None),
        ({"leave": 1.0}, 0, False, "left", False, None),
        ({"leave": 1.0}, 75, False, "left", False, None),
        ({}, 1, False, "crash", True, None),
        ({}, DIVERGED, False, "diverged", False, 1),
        ({}, 2, False, "user-error", False, 2),
        ({}, 2, True, "user-error", False, 2),
        ({}, 75, False, "resumable", False, 75),
        ({}, -signal.SIGKILL, False, "killed", True, None),
        ({"leave": 1.0}, -signal.SIGKILL, False, "killed", False, None),
        ({}, -signal.SIGSEGV, False, "crash", True, None),
        ({"killed": "script"}, -signal.SIGKILL, False, "script", False, None),
        ({"killed": "hang"}, -signal.SIGKILL, False, "hang", True, None),
        ({"killed": "hang"}, -signal.SIGKILL, True, "hang", False, None),
        ({"killed": "drain"}, -signal.SIGKILL, True, "drain", False, None),
        ({"leave": 1.0}, 75, True, "stopped", False, None),
        ({"leave": 1.0}, 1, True, "crash", False, None),
        # All end by the same agreed error; whose end is seen first stops the run.
        ({"leave": 1.0}, DIVERGED, True, "diverged", False, 1),
    ],
)
def test_what_an_end_means(fields, code, stopping, reason, replace, stop_code):
    ending = classify(member(**fields), code, stopping=stopping, others_train=False)
    assert (ending.reason, ending.replace, ending.stop_code) == (reason, replace, stop_code)


@pytest.mark.parametrize(
    ("commits", "code", "replace", "stop_code"),
    [
        (-1, 75, True, None),  # it waited in vain: the fleet did not let it in
        (-1, 2, False, None),  # its own mistake: other versions, another model
        (5, 75, False, 75),
        (5, 2, False, 2),
        (-1, DIVERGED, False, 1),
    ],
)
def test_a_newcomer_does_not_end_a_healthy_run(commits, code, replace, stop_code):
    ending = classify(member(row={"commits": commits}), code, stopping=False, others_train=True)
    assert (ending.replace, ending.stop_code) == (replace, stop_code)


@pytest.mark.parametrize(
    ("fields", "reason", "counts"),
    [
        ({"code": 1}, "crash", True),
        ({"code": -signal.SIGSEGV}, "crash", True),
        ({"code": 75}, "resumable", True),
        ({"code": 1, "row": {"commits": -1}}, "crash", False),
        ({"code": -9}, "killed", False),
        ({"code": -9, "killed": "script"}, "script", False),
        ({"code": -9, "killed": "hang"}, "hang", False),
        ({"code": -9, "killed": "hang", "is_victim": True}, "hang", True),
        ({"code": 2}, "user-error", False),
        ({"code": DIVERGED}, "diverged", False),
        ({"code": 0, "leave": 1.0}, "left", False),
        ({"code": 1, "leave": 1.0}, "crash", False),
        ({"code": 1, "host": "far"}, "elsewhere", True),
        ({"code": 75, "host": "far"}, "elsewhere", True),
        ({"code": 0, "host": "far"}, "elsewhere", False),
        ({"code": -9, "host": "far"}, "elsewhere", False),
        ({"code": -signal.SIGABRT, "host": "far"}, "elsewhere", True),
        ({"code": -9, "host": "far"}, "lost", False),
    ],
)
def test_whose_end_an_elastic_run_must_not_have(fields, reason, counts):
    assert Survivors().counts(member(**{"row": {"commits": 5}, **fields}), reason) is counts


def test_a_divergence_during_a_drain_is_no_orderly_stop():
    end = Stop()
    end.begin(75, 60.0)
    assert end.fail(1, "the loss is nan", already_stopping=True)
    assert not end.fail(1, "the same again", already_stopping=True)
    assert (end.settle([member(leave=1.0, code=DIVERGED)]), end.message) == (1, "the loss is nan")


def test_of_several_killed_in_one_stall_at_most_one_hung():
    survivors = Survivors()
    assert [survivors.hung(commits) for commits in (7, 7, 7, 9, 9)] == [
        *(False, True, True),
        *(False, True),
    ]


def test_one_traceback_is_the_last_with_its_whole_chain(tmp_path):
    log = tmp_path / "w0.log"
    assert (last_line(log), last_traceback(log)) == ("", "")
    log.write_text("epoch 0\n")
    assert (last_line(log), last_traceback(log)) == ("epoch 0", "epoch 0")
    chain = (
        "Traceback (most recent call last):\n  a\nKeyError: 1\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  b\nValueError: 2\n"
    )
    log.write_text(
        "Traceback (most recent call last):\n  old\nOSError: 0\nhandled\n" + chain + "\n"
    )
    assert last_traceback(log) == chain.rstrip()
    assert last_line(log) == "ValueError: 2"


# ---- settings and the run directory --------------------------------------------------------------


def test_workers_are_a_number_or_a_range():
    assert parse_workers("3") == (3, 1, NO_LIMIT)
    assert parse_workers("1:4") == (4, 1, 4)
    assert parse_workers("2:2") == (2, 2, 2)
    for text in ("0", "0:4", "-1", "", "a", "1:", ":4", "1:2:3", "1.5"):
        with pytest.raises(UsageError, match="--workers"):
            parse_workers(text)
    with pytest.raises(UsageError, match="did you mean --workers 1:4"):
        parse_workers("4:1")


def settings(tmp_path, **fields):
    train = tmp_path / "train.py"
    train.write_text("")
    return Settings(**{"train_script": train, "run_dir": tmp_path / "run", **fields})


def test_settings_that_cannot_work_are_refused(tmp_path):
    for fields, message in (
        ({"train_script": tmp_path / "none.py"}, "no such file"),
        ({"hang_seconds": 0.0}, "--hang-seconds 0; .* above 0; .* default of 60"),
        ({"checkpoint_seconds": float("nan")}, "--checkpoint-every nan; .* default of 60"),
        ({"patience_seconds": -1.0}, "--patience -1; .* default of 300"),
        ({"port": 70000}, "--port 70000; .* 1 to 65535, or 0"),
        ({"coordinator_port": -1}, "--coordinator-port -1"),
        ({"max_restarts": -1}, "--max-restarts -1; .* default of 10"),
    ):
        with pytest.raises(UsageError, match=message):
            settings(tmp_path, **fields)
    with pytest.raises(UsageError, match="--advertise"):
        _ = settings(tmp_path, bind="0.0.0.0").reachable
    assert settings(tmp_path, bind="0.0.0.0", advertise="10.0.0.5").reachable == "10.0.0.5"


def test_workers_find_what_they_need_in_their_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    join = parse("[[event]]\nat_step = 1\njoin = 2")
    given = settings(tmp_path, start=2, events=join, resume=True, checkpoint_seconds=5.0)
    environment = worker_environment(given, "w7", 1, "127.0.0.1:5", "secret")
    assert environment["LOCAL_RANK"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["SHOAL_CONTROL"] == "127.0.0.1:5"
    assert environment["SHOAL_TOKEN"] == "secret"
    assert environment["SHOAL_WORKER"] == "w7"
    assert environment["SHOAL_RESUME"] == "1"
    assert environment["SHOAL_CHECKPOINT_SECONDS"] == "5.0"
    assert threads_per_worker(settings(tmp_path, start=100)) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SHOAL_RESUME", "1")
    environment = worker_environment(settings(tmp_path), "w7", 0, "127.0.0.1:5", "secret")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "SHOAL_RESUME" not in environment


def test_run_directories_are_numbered(tmp_path):
    train = tmp_path / "train.py"
    assert default_dir(train, tmp_path / "runs").name == "train-1"
    with pytest.raises(UsageError, match="no run of train"):
        latest_dir(train, tmp_path / "runs")
    for name in ("train-1", "train-2", "train-10", "train-old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert default_dir(train, tmp_path / "runs").name == "train-3"
    assert latest_dir(train, tmp_path / "runs").name == "train-10"


def test_one_supervisor_holds_a_directory(tmp_path):
    lock = RunLock(tmp_path / "run")
    with pytest.raises(UsageError, match="another supervisor runs in this directory"):
        RunLock(tmp_path / "run")
    lock.release()
    RunLock(tmp_path / "run").release()


def test_a_directory_is_started_once_and_resumed_after(tmp_path):
    assert check_fresh(tmp_path, resume=False) == 0
    with pytest.raises(UsageError, match="holds no run to resume"):
        check_fresh(tmp_path, resume=True)
    with Journal(tmp_path / "events.jsonl") as events:
        events.append({"kind": "worker_started", "worker": "w3"})
        events.append({"kind": "worker_started", "worker": "w9"})
        events.append({"kind": "worker_joined", "worker": "x12"})
    with pytest.raises(UsageError, match="holds a run already"):
        check_fresh(tmp_path, resume=False)
    assert check_fresh(tmp_path, resume=True) == 13


def test_a_joined_machine_keeps_out_of_other_runs_checkpoints(tmp_path):
    check_joined(tmp_path / "none")
    assert not is_shared(tmp_path, "t")
    (tmp_path / "control.json").write_text('{"host": "h", "port": 5, "token": "t"}')
    assert is_shared(tmp_path, "t")
    assert not is_shared(tmp_path, "another")
    (tmp_path / "checkpoints" / "step-000000000001").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds checkpoints of another run"):
        check_joined(tmp_path)


def test_a_run_is_found_by_its_control_file_alone(tmp_path):
    with pytest.raises(UsageError, match="no such run directory"):
        find_control(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="not running"):
        find_control(str(tmp_path))
    (tmp_path / "control.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        find_control(str(tmp_path))
    (tmp_path / "control.json").write_text('{"host": "h", "port": 5, "token": "t"}')
    assert find_control(str(tmp_path)) == ("h:5", "t")


def test_a_script_that_changes_on_disk_is_noticed_once_each_time(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("one")
    watch = ScriptWatch(script)
    at_start = watch.sha256
    assert watch.change(0.0) is None
    script.write_text("one")  # saved again as it was
    os.utime(script, (1, 1))
    assert watch.change(2.0) is None
    script.write_text("another")
    assert watch.change(2.5) is None  # looked at a moment ago
    row = watch.change(2.5, at_once=True)
    assert (
        "train.py has changed since the start: workers that start from now on run other"
        in row["text"]
    )
    assert (row["sha256_at_start"], row["sha256"] == at_start[:16]) == (at_start[:16], False)
    assert watch.change(4.0) is None
    script.unlink()
    assert "cannot be read any more" in watch.change(6.0)["text"]
    script.write_text("one")
    assert "is again what the run was started with" in watch.change(8.0)["text"]
    assert watch.change(10.0) is None


def test_a_notice_is_taken_once_and_again_when_written_anew(tmp_path):
    path = tmp_path / "notice"
    notice = NoticeFile(path)
    assert notice.take() is None
    path.write_text("w1 w2\n")
    assert notice.take() == ["w1", "w2"]
    assert notice.take() is None
    path.unlink()
    (tmp_path / "next").write_text("")
    (tmp_path / "next").rename(path)
    assert notice.take() == []
    assert NoticeFile(None).take() is None


def test_the_first_workers_lines_are_passed_on_without_its_traceback(tmp_path):
    lines = []
    follower = LogFollower(lines.append)
    first, second = tmp_path / "w0.log", tmp_path / "w1.log"
    follower.follow(first)  # not there yet
    first.write_text("epoch 0\nepo")
    second.write_text("old\n")
    follower.follow(first)
    assert lines == ["epoch 0"]
    first.write_text("epoch 0\nepoch 1\nTraceback (most recent call last):\n  a\nKeyError\n")
    follower.follow(first)
    follower.follow(second)  # from here on only what is new
    with second.open("a") as file:
        file.write("new\n")
    follower.finish(first)
    follower.finish(second)
    assert lines == ["epoch 0", "epoch 1", "new"]
