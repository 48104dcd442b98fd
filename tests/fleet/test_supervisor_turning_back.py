"""``shoal run``: newcomers that are still on their way when the run finishes are turned back."""

import json

import pytest
from supervised import WORKER, Run, until

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
