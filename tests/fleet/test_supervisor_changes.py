"""``shoal run`` with real processes: resizing, scripts, hangs, drains, notices, other machines."""

import json
import os
import re
import signal

import pytest
from supervised import TRAIN, WORKER, Run, is_running, stop, until

from shoal.cli import main
from shoal.fleet.supervisor.rundir import find_control

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(script, *options, **more):
        runs.append(Run(tmp_path, script, *options, **more))
        return runs[-1]

    yield start
    for one in reversed(runs):
        one.close()


def codes(one):
    return {row["worker"]: (row["code"], row["reason"]) for row in one.events("worker_exited")}


def script(tmp_path, text):
    (tmp_path / "script.toml").write_text(text)
    return str(tmp_path / "script.toml")


def test_resize_grows_and_shrinks_the_newest_first(run, capsys):
    one = run(TRAIN, "--workers", "1:3")
    one.until_at_work("w0", "w1", "w2")
    assert main(["resize", str(one.run_dir), "1"]) == 0
    assert capsys.readouterr().out == f"{one.run_dir}: workers 3 → 1\n"
    until(lambda: len(codes(one)) == 2, "two leaves")
    assert codes(one) == {"w1": (0, "left"), "w2": (0, "left")}
    assert main(["resize", str(one.run_dir), "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers_before": 1, "workers_after": 2}
    one.until_at_work("w0", "w3")
    for number in ("4", "0"):
        assert main(["resize", str(one.run_dir), number]) == 2
        error = capsys.readouterr().err
        assert f"workers = {number}; this run takes 1 to 3" in error
        assert len(error.splitlines()) == 1
    one.finish()
    assert one.wait() == 0
    assert one.events("respawn") == []
    assert main(["resize", str(one.run_dir), "2"]) == 2
    assert "not running" in capsys.readouterr().err


def test_a_script_plays_joins_kills_and_leaves_without_replacements(run, tmp_path):
    events = """
    [[event]]
    at_step = 5
    join = 2
    [[event]]
    at_samples = 800
    kill = 1
    name = "w0"
    """
    one = run(TRAIN, "--script", script(tmp_path, events))
    until(lambda: codes(one).get("w0") == (-9, "script"), "the kill")
    one.until_at_work("w1", "w2")
    played = [(row["action"], row["names"]) for row in one.events("script")]
    assert played == [("join", []), ("kill", ["w0"])]
    assert one.events("script")[0]["step"] >= 5
    assert one.events("script")[1]["samples"] >= 800
    one.finish()
    assert one.wait() == 0
    assert set(one.pids()) == {"w0", "w1", "w2"}


def test_a_scripted_leave_is_orderly(run, tmp_path):
    one = run(
        TRAIN, "--workers", "2", "--script", script(tmp_path, "[[event]]\nat_step=5\nleave=1")
    )
    until(lambda: codes(one) == {"w1": (0, "left")}, "the leave")
    one.finish()
    assert one.wait() == 0


def test_a_script_outside_the_range_of_workers_is_refused(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    events = script(tmp_path, "[[event]]\nat_step=5\njoin=2")
    given = ["--workers", "1:2", "--script", events, "--run-dir", str(tmp_path / "run")]
    assert main(["run", *given, str(tmp_path / "train.py")]) == 2
    assert "event 1 (join = 2) makes 4 workers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_coordinator_is_restarted_on_its_port(run, tmp_path):
    told = WORKER + (
        "import urllib.request\n"
        "def work(step):\n"
        "    report(step)\n"
        "    try:\n"
        "        page = urllib.request.urlopen(link.coordinator, timeout=5).status\n"
        "    except OSError:\n"
        "        page = None\n"
        "    if step in (1, 40):\n"
        "        link.event({'kind': 'note', 'page': page, 'at': link.coordinator})\n"
        "train()\n"
    )
    one = run(told, "--script", script(tmp_path, "[[event]]\nat_step=5\nkill_coordinator=true"))
    before, after = one.until_events("note", 2)
    assert before["page"] == after["page"] == 200
    assert before["at"] == after["at"]
    assert len(one.events("coordinator_restarted")) == 1
    one.finish()
    assert one.wait() == 0


def test_a_hung_worker_is_killed_and_replaced_and_its_victim_is_not(run, tmp_path):
    waits = WORKER + (
        "def work(step):\n"
        "    report(step, 'exchange' if link.name == 'w0' and step > 5 else 'compute')\n"
        "    while link.name == 'w0' and step > 5 and not (here / 'finish').exists():\n"
        "        time.sleep(0.02)\n"
        "train()\n"
    )
    events = "[[event]]\nat_step=5\nhang=1\nname='w1'"
    one = run(
        waits, "--workers", "2", "--hang-seconds", "2.5", "--script", script(tmp_path, events)
    )
    (hang,) = one.until_events("hang", 1)
    assert (hang["worker"], hang["phase"]) == ("w1", "silent")
    one.until_at_work("w2")
    assert codes(one) == {"w1": (-9, "hang")}
    one.finish()
    assert one.wait() == 0
    assert [row["worker"] for row in one.events("hang")] == ["w1"]


def test_a_worker_stuck_in_its_own_step_is_killed(run):
    stuck = WORKER + (
        "def work(step):\n"
        "    report(step)\n"
        "    while link.name == 'w0' and step == 5:\n"
        "        time.sleep(0.02)\n"
        "train()\n"
    )
    one = run(stuck, "--hang-seconds", "2")
    (hang,) = one.until_events("hang", 1)
    assert (hang["worker"], hang["phase"]) == ("w0", "compute")
    one.until_at_work("w1")
    one.finish()
    assert one.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_drains_and_exits_75(run, number):
    one = run(TRAIN, "--workers", "2")
    one.until_at_work("w0", "w1")
    one.process.send_signal(number)
    assert one.wait() == 75
    assert codes(one) == {"w0": (75, "stopped"), "w1": (75, "stopped")}
    summary = json.loads((one.run_dir / "summary.json").read_text())
    assert (summary["resumable"], summary["exit_code"]) == (True, 75)


def test_a_second_interrupt_kills_at_once(run):
    deaf = WORKER + "def leave(): pass\ntrain()\n"
    one = run(deaf)
    one.until_at_work("w0")
    one.process.send_signal(signal.SIGINT)
    one.until_events("drain", 1)
    one.process.send_signal(signal.SIGINT)
    assert one.wait(20.0) == 130
    assert codes(one) == {"w0": (-9, "drain")}
    assert "killed before they had left in order; --resume goes on from" in one.err
    assert json.loads((one.run_dir / "summary.json").read_text())["resumable"] is False


@pytest.mark.parametrize(("deaf", "status"), [("w0 w1", 1), ("w1", 75)])
def test_who_does_not_leave_in_time_is_killed(run, deaf, status):
    """When nobody has left in order, nobody has written a checkpoint: that is no orderly stop."""
    stays = WORKER + (
        "orderly = leave\n"
        f"def leave():\n    if link.name not in {deaf!r}.split(): orderly()\n"
        "train()\n"
    )
    one = run(stays, "--workers", "2", "--drain-seconds", "1")
    one.until_at_work("w0", "w1")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait(20.0) == status
    assert codes(one)["w1"] == (-9, "drain")
    assert codes(one)["w0"] == ((75, "stopped") if status == 75 else (-9, "drain"))


def test_workers_that_have_not_begun_are_ended_at_once(run):
    one = run("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    until(lambda: "loading" in one.out, "the start")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait(20.0) == 75


def test_a_notice_empties_the_machine_or_takes_those_it_names(run, tmp_path):
    notice = tmp_path / "notice"
    one = run(TRAIN, "--workers", "3", environment={"SHOAL_NOTICE_FILE": str(notice)})
    one.until_at_work("w0", "w1", "w2")
    (tmp_path / "draft").write_text("w1")
    (tmp_path / "draft").rename(notice)
    until(lambda: codes(one) == {"w1": (0, "left")}, "the leave of w1")
    (tmp_path / "draft").write_text("")
    (tmp_path / "draft").rename(notice)
    assert one.wait() == 75
    assert codes(one)["w0"] == codes(one)["w2"] == (75, "stopped")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_worker_lets_it_leave(run, number):
    one = run(TRAIN, "--workers", "2")
    one.until_at_work("w0", "w1")
    os.kill(one.pids()["w0"], number)
    until(lambda: codes(one) == {"w0": (0, "finished")}, "the leave of w0")
    one.finish()
    assert one.wait() == 0
    assert set(one.pids()) == {"w0", "w1"}  # it is not replaced


def test_another_machine_adds_workers_and_replaces_its_own(run, tmp_path):
    one = run(TRAIN, "--workers", "1:3")
    one.until_at_work("w0")
    address, token = find_control(str(one.run_dir))
    # The fleet began with 3, which is all it takes.
    full = run(
        TRAIN, "--join", address, run_dir=tmp_path / "far", environment={"SHOAL_TOKEN": token}
    )
    assert full.wait() == 2
    assert "the fleet has 3 workers and takes at most 3" in full.err
    assert main(["resize", str(one.run_dir), "1"]) == 0
    until(lambda: len(codes(one)) == 2, "two leaves")
    token_file = str(one.run_dir / "control.json")
    far = run(
        *(TRAIN, "--workers", "2", "--join", address, "--token-file", token_file),
        run_dir=tmp_path / "far",
    )
    one.until_at_work("w0", "x3", "x4")
    hosts = {m["name"]: m["host"] for m in one.control("status")["members"]}
    assert (hosts["w0"], hosts["x3"] != "") == ("", True)
    pid = {m["name"]: m["pid"] for m in one.control("status")["members"]}["x4"]
    stop(pid)
    one.until_at_work("x3", "x5")
    assert codes(one)["x4"] == (-9, "elsewhere")
    assert [row["worker"] for row in one.events("worker_joined")] == ["x3", "x4", "x5"]
    far.process.send_signal(signal.SIGTERM)  # that machine goes away
    assert far.wait() == 0
    assert one.control("status")["workers"] == 1
    assert (far.run_dir / "logs" / "x5.log").exists()
    assert not (far.run_dir / "events.jsonl").exists()
    one.finish()
    assert one.wait() == 0


def test_a_script_that_changes_while_it_runs_is_warned_of(run, tmp_path):
    one = run(TRAIN, "--workers", "1")
    one.until_at_work("w0")
    address, token = find_control(str(one.run_dir))
    far = run(
        TRAIN, "--join", address, run_dir=tmp_path / "far", environment={"SHOAL_TOKEN": token}
    )
    one.until_at_work("x1")
    (one.directory / "train.py").write_text(TRAIN + "# edited\n")
    (row,) = one.until_events("script_changed", 1)
    assert row["sha256_at_start"] == one.events("start")[0]["script_sha256"][:16] != row["sha256"]
    until(lambda: "[script_changed] train.py has changed since the start" in far.out, "far, too")
    stop(one.pids()["w0"])
    one.until_at_work("w2")
    one.finish()
    assert (one.wait(), far.wait()) == (0, 0)
    assert len(one.events("script_changed")) == 1
    shown = [line for line in one.out.splitlines() if "run other code" in line]
    assert len(shown) == 1 and shown[0].startswith("[script_changed] train.py has changed since")


def test_workers_of_another_machine_diverge_too(run, tmp_path):
    """The first machine has given its own worker back: what is left there stops the run."""
    diverges = WORKER + (
        "from shoal.errors import DivergedError\n"
        "def work(step):\n"
        "    report(step)\n"
        "    if (here / 'nan').exists():\n"
        "        raise DivergedError('the loss is nan')\n"
        "orderly = leave\n"
        "def leave():\n    (here / 'nan').exists() or orderly()\n"
        "train()\n"
    )
    one = run(diverges, "--workers", "1")
    one.until_at_work("w0")
    address, token = find_control(str(one.run_dir))
    far = run(
        *(diverges, "--workers", "2", "--join", address),
        run_dir=tmp_path / "far",
        environment={"SHOAL_TOKEN": token},
    )
    one.until_at_work("x1", "x2")
    one.control("leave", name="w0")
    until(lambda: codes(one).get("w0") == (0, "left"), "the leave of w0")
    (tmp_path / "nan").touch()
    assert one.wait() == 1
    assert far.wait() == 1
    assert re.fullmatch(r"x[12] on .*: a non-finite loss; see its log there\n", one.err)
    assert codes(one) == {"w0": (0, "left"), "x1": (65, "diverged"), "x2": (65, "diverged")}


def test_joining_fails_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    base = ["run", "--run-dir", str(tmp_path / "far"), "--join"]
    train = str(tmp_path / "train.py")
    for more, message in (
        (["127.0.0.1:1", train], "no token; set SHOAL_TOKEN"),
        (["127.0.0.1:1", "--token-file", str(tmp_path / "none"), train], "cannot be read"),
        (["nowhere", "--token-file", train, train], "is empty"),
    ):
        assert main([*base, *more]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    monkeypatch.setenv("SHOAL_TOKEN", "x")
    assert main([*base, "127.0.0.1:1", train]) == 2
    assert "no supervisor answers there" in capsys.readouterr().err
    assert main([*base, "nowhere", train]) == 2
    assert "it must be HOST:PORT" in capsys.readouterr().err
    assert not (tmp_path / "far").exists()
    # Checkpoints of something else would be taken for the run's.
    (tmp_path / "far" / "checkpoints" / "step-000000000007").mkdir(parents=True)
    assert main([*base, "127.0.0.1:1", train]) == 2
    assert "holds checkpoints of another run" in capsys.readouterr().err


def test_a_killed_joiner_leaves_no_orphans(run, tmp_path):
    one = run(TRAIN, "--workers", "1", "--hang-seconds", "2")
    one.until_at_work("w0")
    address, token = find_control(str(one.run_dir))
    far = run(
        TRAIN, "--join", address, run_dir=tmp_path / "far", environment={"SHOAL_TOKEN": token}
    )
    one.until_at_work("x1")
    pid = {m["name"]: m["pid"] for m in one.control("status")["members"]}["x1"]
    far.process.kill()
    until(lambda: not is_running(pid), "end of x1", 10.0)
    # Nobody tells of its end: its silence does.
    until(lambda: codes(one).get("x1") == (-9, "lost"), "x1 given up")
    one.finish()
    assert one.wait() == 0
