"""``shoal run`` with real processes: starting, ending, losing and replacing workers."""

import io
import json
import signal
import socket
import stat
from pathlib import Path

import pytest
from supervised import PRELUDE, TRAIN, WORKER, Run, is_running, stop, until

from shoal.errors import UsageError
from shoal.fleet.supervisor.settings import Settings
from shoal.world.elastic.endpoint import Refused

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(script, *options, **more):
        runs.append(Run(tmp_path, script, *options, **more))
        return runs[-1]

    yield start
    for one in runs:
        one.close()


def test_a_run_from_its_barrier_to_its_files(run, tmp_path):
    late = WORKER.replace(
        "link = connect()",
        "while os.environ['SHOAL_WORKER'] == 'w1' and not (here / 'go').exists(): time.sleep(0.01)\n"
        "link = connect()\nprint('hello from', link.name)",
    )
    one = run(late + "\ntrain()\n", "--workers", "2")
    until(lambda: "w0" in one.pids() and one.control("status")["members"][0]["pid"], "w0")
    until(lambda: "hello from w0" in one.out, "what w0 prints is shown")
    control = one.run_dir / "control.json"
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    assert one.events("through") == []  # the barrier waits for w1
    (tmp_path / "go").touch()
    one.until_at_work("w0", "w1")
    one.finish()
    assert one.wait() == 0
    assert {row["worker"] for row in one.events("through")} == {"w0", "w1"}
    assert not any(row["trained"] for row in one.events("through"))
    assert "hello from w1" not in one.out
    assert "hello from w1" in (one.run_dir / "logs" / "w1.log").read_text()
    assert not control.exists()
    summary = json.loads((one.run_dir / "summary.json").read_text())
    assert summary["workers"] == {"w0": 0, "w1": 0}
    assert (summary["exit_code"], summary["respawns"], summary["resumable"]) == (0, 0, False)
    assert one.err == ""


def test_a_killed_supervisor_leaves_no_orphans(run, tmp_path):
    parent = WORKER + (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "child.start()\n"
        "(here / f'child-{link.name}').write_text(f'{child.pid}')\n"
        "train()\n"
    )
    one = run(parent, "--workers", "2")
    one.until_at_work("w0", "w1")
    children = [int((tmp_path / f"child-{name}").read_text()) for name in ("w0", "w1")]
    family = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
    pids = [int(pid) for pid in family] + children
    assert len(family) == 4  # two workers, the coordinator, the guard
    assert all(is_running(pid) for pid in pids)
    one.process.kill()
    until(lambda: not any(is_running(pid) for pid in pids), "end of all that was started", 10.0)
    # Nothing stands in the way of going on.
    again = run(TRAIN, "--workers", "1", "--resume")
    again.until_at_work("w2")
    again.finish()
    assert again.wait() == 0


def test_a_killed_worker_takes_its_children_along_and_is_replaced(run, tmp_path):
    parent = WORKER + (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "(here / f'child-{link.name}').write_text(f'{child.pid}')\n"
        "train()\n"
    )
    one = run(parent, "--workers", "2")
    one.until_at_work("w0", "w1")
    child = int((tmp_path / "child-w1").read_text())
    stop(one.pids()["w1"])
    one.until_at_work("w0", "w2")  # a new name
    assert not is_running(child)
    assert [row["worker"] for row in one.events("respawn")] == ["w1"]
    assert one.events("through")[-1]["trained"]  # w0 is alive: w2 has to wait for its state
    # Now everybody at once: the new ones begin together, without a peer to heal from.
    for name in ("w0", "w2"):
        stop(one.pids()[name])
    one.until_at_work("w3", "w4")
    assert len(one.events("fleet_lost")) == 1
    assert not one.events("through")[-2]["trained"]
    one.finish()
    assert one.wait() == 0
    summary = json.loads((one.run_dir / "summary.json").read_text())
    assert (summary["respawns"], summary["restarts_of_survivors"]) == (3, 0)
    assert summary["workers"] == {"w0": -9, "w1": -9, "w2": -9, "w3": 0, "w4": 0}


def test_a_broken_script_ends_with_one_traceback(run):
    one = run("def broken():\n    raise KeyError('nothing here')\n\nbroken()\n", "--workers", "3")
    assert one.wait() == 1
    assert one.err.count("Traceback") == 1
    assert one.err.startswith("Traceback (most recent call last):\n  File ")
    assert one.err.splitlines()[-1] == "KeyError: 'nothing here'"
    assert "worker_main" not in one.err
    assert "Traceback" not in one.out
    assert json.loads((one.run_dir / "summary.json").read_text())["exit_code"] == 1


def test_a_worker_that_dies_again_and_again_is_given_up(run):
    again = WORKER + "if link.name != 'w0':\n    os.abort()\ntrain()\n"
    one = run(again, "--workers", "2", "--max-restarts", "2")
    one.until_events("note", 1)
    assert len(one.events("respawn")) == 2
    # One worker is enough for this run: it goes on.
    one.finish()
    assert one.wait() == 0
    assert json.loads((one.run_dir / "summary.json").read_text())["workers"]["w0"] == 0


def test_a_survivor_that_crashes_is_counted(run):
    crash = WORKER + (
        "def work(step):\n"
        "    report(step)\n"
        "    if link.name == 'w1' and step == 20:\n"
        "        raise RuntimeError('lost its peers')\n"
        "train()\n"
    )
    one = run(crash, "--workers", "2")
    one.until_at_work("w0", "w2")
    one.finish()
    assert one.wait() == 0
    summary = json.loads((one.run_dir / "summary.json").read_text())
    assert (summary["respawns"], summary["restarts_of_survivors"]) == (1, 1)


def test_a_script_runs_as_if_by_python_itself(run, tmp_path):
    (tmp_path / "beside.py").write_text("value = 7\n")
    one = run(
        "import beside, multiprocessing, sys\n"
        "class Thing:\n"
        "    pass\n"
        "def double(queue, thing):\n"
        "    queue.put((type(thing).__name__, 2 * beside.value))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=double, args=(queue, Thing()))\n"
        "    child.start()\n"
        "    print('got', *queue.get(), sys.path[0] == __file__.rpartition('/')[0])\n"
        "    child.join()\n"
    )
    assert one.wait() == 0, one.out
    assert "got Thing 14 True" in one.out


def test_below_the_minimum_and_out_of_restarts_the_run_stops_resumable(run):
    one = run(TRAIN, "--workers", "2:2", "--max-restarts", "0")
    one.until_at_work("w0", "w1")
    stop(one.pids()["w0"])
    assert one.wait() == 75
    assert "--max-restarts 0" in one.err
    assert {row["worker"]: row["code"] for row in one.events("worker_exited")} == {
        "w0": -9,
        "w1": 75,
    }


def test_a_newcomer_that_does_not_fit_or_waits_in_vain_does_not_end_the_run(run):
    newcomers = WORKER + (
        "from shoal.errors import ResumableStop, UsageError\n"
        "if link.name == 'w1':\n    raise UsageError('another model')\n"
        "if link.name == 'w2':\n    raise ResumableStop('nobody let it in')\n"
        "train()\n"
    )
    one = run(newcomers, "--workers", "1")
    one.until_at_work("w0")
    one.control("resize", workers=2)
    (note,) = one.until_events("note", 1)
    assert note["text"] == "w1 is not replaced: shoal: another model"
    assert one.control("status")["workers"] == 1
    one.control("resize", workers=2)
    one.until_at_work("w0", "w3")
    one.finish()
    assert one.wait() == 0
    summary = json.loads((one.run_dir / "summary.json").read_text())
    assert summary["workers"] == {"w0": 0, "w1": 2, "w2": 75, "w3": 0}
    assert summary["restarts_of_survivors"] == 0


def test_every_worker_has_a_place_of_its_own_on_the_machine(run):
    placed = WORKER + ("link.event({'kind': 'note', 'place': os.environ['LOCAL_RANK']})\ntrain()\n")
    one = run(placed, "--workers", "3", environment={"LOCAL_RANK": "7"})
    one.until_at_work("w0", "w1", "w2")
    stop(one.pids()["w1"])
    one.until_at_work("w3")
    one.finish()
    assert one.wait() == 0
    assert {row["worker"]: row["place"] for row in one.events("note")} == {
        "w0": "0",
        "w1": "1",
        "w2": "2",
        "w3": "1",
    }


def test_a_users_mistake_is_one_line_and_leaves_nothing(run):
    mistake = PRELUDE + (
        "from shoal.errors import UsageError\nraise UsageError('batch_size = 3; not this one')\n"
    )
    one = run(mistake, "--workers", "2")
    assert one.wait() == 2
    assert one.err == "shoal: batch_size = 3; not this one\n"
    assert not one.run_dir.exists()


def test_a_mistake_at_resume_leaves_the_run_as_it_was(run, tmp_path):
    one = run(TRAIN)
    one.until_at_work("w0")
    one.finish()
    assert one.wait() == 0
    before = {path: path.read_bytes() for path in one.run_dir.rglob("*") if path.is_file()}
    mistake = PRELUDE + "from shoal.errors import UsageError\nraise UsageError('other seed')\n"
    again = run(mistake, "--resume")
    assert again.wait() == 2
    after = {path: path.read_bytes() for path in one.run_dir.rglob("*") if path.is_file()}
    assert after == before


def test_a_diverged_run_stops_all_workers_with_one_line(run):
    diverged = WORKER + (
        "from shoal.errors import DivergedError\n"
        "def leave(): pass\n"
        "def work(step):\n"
        "    report(step)\n"
        "    if step == 5:\n"
        "        time.sleep(0.5 * (link.name == 'w1'))\n"
        "        link.close()\n"
        "        raise DivergedError('the loss is nan at step 5; try a smaller lr')\n"
        "train()\n"
    )
    one = run(diverged, "--workers", "2")
    assert one.wait() == 1
    assert one.err == "shoal: the loss is nan at step 5; try a smaller lr\n"
    assert len(one.events("worker_started")) == 2
    ends = {row["worker"]: row["reason"] for row in one.events("worker_exited")}
    assert ends == {"w0": "diverged", "w1": "diverged"}


def test_a_line_that_looks_like_ours_does_not_make_a_failure_a_divergence(run):
    looks = WORKER + "print('shoal: all is well', flush=True)\nsys.exit(1)\n"
    one = run(looks, "--workers", "1", "--max-restarts", "0")
    assert one.wait() == 1
    assert [row["reason"] for row in one.events("worker_exited")] == ["crash"]


def test_a_failure_after_the_end_of_training_is_a_failure(run):
    after = TRAIN + "if link.name == 'w1':\n    raise OSError('cannot save')\n"
    one = run(after, "--workers", "2")
    one.until_at_work("w0", "w1")
    one.finish()
    assert one.wait() == 1
    assert one.err.splitlines()[-1] == "OSError: cannot save"
    assert one.events("respawn") == []


def test_resuming_goes_on_under_new_names(run, tmp_path):
    seen = WORKER + (
        "link.event({'kind': 'note', 'resume': os.environ.get('SHOAL_RESUME')})\ntrain()\n"
    )
    one = run(seen, "--workers", "2")
    one.until_at_work("w0", "w1")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 75
    refused = run(seen)
    assert refused.wait() == 2
    assert "holds a run already" in refused.err
    again = run(seen, "--workers", "1", "--resume")
    again.until_at_work("w2")
    again.finish()
    assert again.wait() == 0
    assert [row["resume"] for row in again.events("note")] == [None, None, "1"]
    summary = json.loads((again.run_dir / "summary.json").read_text())
    assert summary["workers"] == {"w0": 75, "w1": 75, "w2": 0}


def test_a_worker_of_other_versions_is_refused(run):
    other = WORKER.replace(
        "link = connect()",
        "import shoal.world.elastic.link as module\n"
        "module.versions = lambda: {'shoal': '0.1.0', 'torch': '2.13.0', 'torchft': '0.3.0'}\n"
        "link = connect()",
    )
    one = run(other, "--workers", "2")
    assert one.wait() == 2
    assert one.err.startswith("shoal: worker w")
    assert len(one.err.splitlines()) == 1
    assert "torchft 0.3.0 on the worker" in one.err
    assert not one.run_dir.exists()


def test_a_worker_with_another_token_is_refused(run):
    other = WORKER.replace("link = connect()", "os.environ['SHOAL_TOKEN'] = 'x'\nlink = connect()")
    one = run(other)
    assert one.wait() == 2
    assert "the token is not this run's" in one.err


def test_what_is_in_use_is_refused_and_nothing_is_written(run, tmp_path):
    from shoal.fleet.supervisor.loop import Supervisor

    one = run(TRAIN)
    one.until_at_work("w0")
    free = tmp_path / "other"
    with pytest.raises(UsageError, match="another supervisor runs in this directory"):
        Supervisor(Settings(train_script=tmp_path / "train.py", run_dir=one.run_dir), io.StringIO())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("port", "coordinator_port"):
            with pytest.raises(UsageError, match=f"port {port}: cannot listen there"):
                Supervisor(
                    Settings(train_script=tmp_path / "train.py", run_dir=free, **{option: port}),
                    io.StringIO(),
                )
            assert not free.exists()
    # The refused ones disturbed nobody.
    assert one.control("status")["workers"] == 1
    with pytest.raises(Refused, match="no verb 'destroy'"):
        one.control("destroy")
