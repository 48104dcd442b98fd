"""``shoal run`` on a disk that is full or cannot be written: one line, and training goes on."""

import json
import resource
import signal
import subprocess
import sys

import pytest
from supervised import PRELUDE, TRAIN, WORKER, Run, stop, until

from shoal.cli import main
from shoal.errors import UsageError
from shoal.fleet.supervisor import rundir
from shoal.fleet.supervisor.kept import KeptJournal
from shoal.fleet.supervisor.rundir import find_control
from shoal.fleet.supervisor.screen import PlainScreen
from shoal.fleet.supervisor.summary import build, write_json
from shoal.ledger.journal import read


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(script, *options, **more):
        runs.append(Run(tmp_path, script, *options, **more))
        return runs[-1]

    yield start
    for one in reversed(runs):
        one.close()


def fill_the_disk(pid, size=10):
    """From now on no file of this process can grow beyond ``size`` bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_wait_until_there_is_room(tmp_path):
    lines = []
    (tmp_path / "in-the-way").write_text("")
    journal = KeptJournal(tmp_path / "in-the-way" / "events.jsonl", lines.append)
    for number in range(3):
        journal.append({"number": number})
    assert len(lines) == 1
    assert "events.jsonl" in lines[0] and "training goes on" in lines[0]
    assert [row["number"] for row in journal.unwritten] == [0, 1, 2]
    (tmp_path / "in-the-way").unlink()
    journal.append({"number": 3})
    journal.close()
    assert not journal.unwritten
    path = tmp_path / "in-the-way" / "events.jsonl"
    assert [row["number"] for row in read(path)] == [0, 1, 2, 3]
    assert len(lines) == 1


def test_only_so_many_rows_wait(tmp_path):
    (tmp_path / "in-the-way").write_text("")
    lines = []
    journal = KeptJournal(tmp_path / "in-the-way" / "rows.jsonl", lines.append, most=2)
    for number in range(5):
        journal.append({"number": number})
    journal.close()
    assert [row["number"] for row in journal.unwritten] == [0, 1]
    assert "5 rows of rows.jsonl could not be written" in lines[-1]


def test_the_summary_knows_the_events_that_could_not_be_written(tmp_path):
    document = build(tmp_path, 0, [{"kind": "respawn", "worker": "w0", "time": 1.0}])
    assert document["respawns"] == 1


def test_a_document_that_cannot_be_written_leaves_no_part_of_itself(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "summary.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_screen_that_is_gone_is_no_reason_to_end():
    class Gone:
        def write(self, _text):
            raise BrokenPipeError

        flush = write

    PlainScreen(Gone()).line("a line")


# ---- the run directory at the start --------------------------------------------------------------


def in_one_line(capsys, *arguments):
    """The one line that a command ends with."""
    status = main(list(arguments))
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    return status, error


@pytest.mark.parametrize("place", ["train.py", "train.py/run", "events", "x" * 300])
def test_a_run_directory_that_cannot_be_used_is_refused(tmp_path, capsys, place):
    train = tmp_path / "train.py"
    train.write_text("")
    (tmp_path / "events" / "events.jsonl").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    status, error = in_one_line(capsys, "run", "--run-dir", str(tmp_path / place), str(train))
    assert status == 2
    assert place in error and "--run-dir" in error
    assert [p for p in sorted(tmp_path.rglob("*")) if p.name[0] != "."] == before


def test_a_full_disk_at_the_start_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("")
    code = PRELUDE + (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from shoal.cli import main; sys.exit(main())"
    )
    command = ["run", "--run-dir", str(tmp_path / "runs" / "run"), str(tmp_path / "train.py")]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_directory_is_tried_without_a_trace(tmp_path):
    rundir.check_writable(tmp_path / "a" / "b", "--out")
    rundir.check_writable(tmp_path, "--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(UsageError, match=r"--out .*: cannot be written: .* another --out"):
            rundir.check_writable(tmp_path / place, "--out")


def test_other_verbs_end_in_one_line_too(tmp_path, capsys, monkeypatch):
    train = tmp_path / "train.py"
    train.write_text("")
    long = "x" * 300
    assert in_one_line(capsys, "resize", long, "2")[0] == 2
    assert in_one_line(capsys, "run", f"{long}.py")[0] == 2
    status, error = in_one_line(capsys, "reproduce", "dynamic", "--out", str(train / "below"))
    assert status == 2 and "another --out" in error

    def full(*_arguments):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("shoal.fleet.supervisor.loop.Supervisor.__init__", full)
    status, error = in_one_line(capsys, "run", "--run-dir", str(tmp_path / "run"), str(train))
    assert (status, error) == (1, "shoal run: somewhere: No space left on device\n")


# ---- while it runs -------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_disk_that_fills_up_does_not_stop_the_training(run, tmp_path):
    prints = WORKER + (
        "def work(step):\n"
        "    report(step)\n"
        "    print('step', step)\n"
        "    if (here / 'full').exists() and step % 10 == 0:\n"
        "        link.event({'kind': 'note', 'step': step})\n"
        "        (here / f'{link.name}-goes-on').touch()\n"
        "train()\n"
    )
    one = run(prints, "--workers", "2", piped=True)
    one.until_at_work("w0", "w1")
    pids = one.pids()
    for pid in (one.process.pid, *pids.values()):
        fill_the_disk(pid)
    recorded = one.events()
    (tmp_path / "full").touch()
    for name in ("w0", "w1"):
        until((tmp_path / f"{name}-goes-on").exists, f"{name} goes on; {one.out} {one.err}")
    stop(pids["w1"])
    until(lambda: "[worker_started] worker w2" in one.out, "the replacement")
    one.finish()
    assert one.wait() == 0, one.out + one.err
    assert one.events() == recorded
    assert one.out.count("events.jsonl: not recorded any more") == 1
    assert one.out.count("no summary.json: ") == 1
    assert "could not be written" in one.out
    assert "summary: " not in one.out
    assert "Traceback" not in one.out + one.err
    assert not (one.run_dir / "summary.json").exists()


@pytest.mark.processes
def test_a_worker_whose_log_cannot_be_opened_works_without(run, tmp_path):
    one = run(TRAIN, "--workers", "2")
    one.until_at_work("w0", "w1")
    (one.run_dir / "logs").rename(one.run_dir / "logs-of-before")
    (one.run_dir / "logs").write_text("")
    stop(one.pids()["w1"])
    one.until_at_work("w2")
    stop(one.pids()["w2"])
    one.until_at_work("w3")
    one.finish()
    assert one.wait() == 0
    assert one.out.count("w2.log: cannot be written") == 1
    assert one.err == ""


@pytest.mark.processes
def test_a_worker_that_cannot_be_started_is_tried_again_later(run, tmp_path):
    one = run(TRAIN, "--workers", "2")
    one.until_at_work("w0", "w1")
    # No process may be started any more.
    number = resource.RLIMIT_NOFILE
    old = resource.prlimit(one.process.pid, number)
    resource.prlimit(one.process.pid, number, (3, old[1]))
    stop(one.pids()["w1"])
    until(lambda: "w2 could not be started" in one.out, f"the attempt; {one.out} {one.err}")
    resource.prlimit(one.process.pid, number, old)
    until(lambda: len(one.pids()) > 2, "a later attempt")
    one.until_at_work("w0", list(one.pids())[-1])
    one.finish()
    assert one.wait() == 0


@pytest.mark.processes
def test_nobody_reads_what_the_run_prints(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "finish").touch()
    code = PRELUDE + "from shoal.cli import main; sys.exit(main())"
    command = ["run", "--no-report", "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    assert errors == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 0


@pytest.mark.processes
def test_another_machine_whose_directory_cannot_be_used_is_refused(run, tmp_path):
    one = run(TRAIN, "--workers", "1")
    one.until_at_work("w0")
    (tmp_path / "in-the-way").write_text("")
    far = run(
        *(TRAIN, "--join", find_control(str(one.run_dir))[0]),
        *("--token-file", str(one.run_dir / "control.json")),
        run_dir=tmp_path / "in-the-way" / "far",
    )
    assert far.wait() == 2
    assert "--run-dir" in far.err and len(far.err.splitlines()) == 1
    assert one.events("worker_joined") == []
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 75
