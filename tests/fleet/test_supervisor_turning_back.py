"""``shoal run``: who is on its way and not needed any more is turned back before it begins."""

import json
import signal

import pytest
from supervised import WORKER, Run, until

from shoal.fleet.supervisor.rundir import find_control

pytestmark = pytest.mark.processes

# Said hello, let in by nobody: asks for its place until it is told to leave.
AT_THE_DOOR = WORKER + (
    "if link.name == 'w1':\n"
    "    (here / 'waits').touch()\n"
    "    while not link.leave_requested(): time.sleep(0.01)\n"
    "    (here / 'turned-back').touch()\n"
    "    leave()\n"
    "train()\n"
)


# Each worker waits before its hello, and says when it stands at the barrier.
STEPWISE = WORKER.replace(
    "link = connect()",
    "name = os.environ['SHOAL_WORKER']\n"
    "(here / f'{name}-started').touch()\n"
    "while not (here / f'{name}-hello').exists(): time.sleep(0.01)\n"
    "link = connect()",
)


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(script, *options, **more):
        runs.append(Run(tmp_path, script, *options, **more))
        return runs[-1]

    yield start
    for one in reversed(runs):
        one.close()


def ends(one):
    return {row["worker"]: (row["code"], row["reason"]) for row in one.events("worker_exited")}


def at_barrier(one, name):
    """Whether the worker has come so far that the supervisor knows it, by its own process."""
    return any(m["name"] == name and m.get("at_barrier") for m in one.control("status")["members"])


def test_workers_that_are_not_needed_any_more_end_before_they_begin(run, tmp_path):
    one = run(STEPWISE + "\ntrain()\n", "--workers", "3")
    for name in ("w0", "w1", "w2"):
        until((tmp_path / f"{name}-started").exists, f"start of {name}")
    # w2 has not said hello: it is ended, not waited for.
    one.control("resize", workers=2)
    until(lambda: ends(one) == {"w2": (-signal.SIGTERM, "left")}, "the end of w2")
    # w1 stands at the barrier.
    (tmp_path / "w1-hello").touch()
    until(lambda: at_barrier(one, "w1"), "w1 at the barrier")
    one.control("resize", workers=1)
    until(lambda: ends(one).get("w1") == (0, "left"), "the end of w1")
    (tmp_path / "w0-hello").touch()
    one.until_at_work("w0")
    assert {row["worker"] for row in one.events("through")} == {"w0"}
    one.finish()
    assert one.wait() == 0
    assert set(one.pids()) == {"w0", "w1", "w2"}, "nobody is started in their places"
    assert one.err == ""


def test_who_gives_up_waiting_because_it_is_not_needed_ends_well(run, tmp_path):
    waits = WORKER + (
        "from shoal.errors import ResumableStop\n"
        "if link.name != 'w0':\n"
        "    (here / 'waits').touch()\n"
        "    while not link.leave_requested(): time.sleep(0.01)\n"
        "    raise ResumableStop('asked to leave while waiting for other workers')\n"
        "train()\n"
    )
    one = run(waits, "--workers", "1")
    one.until_at_work("w0")
    one.control("resize", workers=2)
    until((tmp_path / "waits").exists, "w1 on its way")
    one.control("resize", workers=1)
    until(lambda: ends(one) == {"w1": (0, "left")}, "the end of w1")
    # When the whole run stops, it may be wanted again.
    (tmp_path / "waits").unlink()
    one.control("resize", workers=2)
    until((tmp_path / "waits").exists, "w2 on its way")
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 75
    assert ends(one)["w2"] == (75, "stopped")


def test_a_worker_elsewhere_that_is_not_needed_any_more_ends_before_it_begins(run, tmp_path):
    one = run(STEPWISE + "\ntrain()\n", "--workers", "1")
    (tmp_path / "w0-hello").touch()
    one.until_at_work("w0")
    far = run(
        *(STEPWISE + "\ntrain()\n", "--join", find_control(str(one.run_dir))[0]),
        *("--token-file", str(one.run_dir / "control.json")),
        run_dir=tmp_path / "far",
    )
    until((tmp_path / "x1-started").exists, "start of x1")
    one.control("resize", workers=1)
    until(lambda: ends(one) == {"x1": (-signal.SIGTERM, "elsewhere")}, "the end of x1")
    assert far.wait() == 0
    one.finish()
    assert one.wait() == 0


def test_the_end_of_a_run_turns_newcomers_back(tmp_path):
    one = Run(tmp_path, AT_THE_DOOR, "--workers", "1")
    try:
        one.until_at_work("w0")
        one.control("resize", workers=2)
        until((tmp_path / "waits").exists, "w1 on its way")
        one.finish()
        assert one.wait() == 0, one.out + one.err
        assert (tmp_path / "turned-back").exists()
        exits = {row["worker"]: row for row in one.events("worker_exited")}
        assert exits["w0"]["code"] == 0 and exits["w0"]["reason"] == "finished"
        assert exits["w1"]["code"] == 0
        assert set(one.pids()) == {"w0", "w1"}, "nobody is started in its place"
        summary = json.loads((one.run_dir / "summary.json").read_text())
        assert (summary["exit_code"], summary["restarts_of_survivors"]) == (0, 0)
        assert one.err == ""
    finally:
        one.close()
