"""Beginning, going on with and letting a study grow; what runners do when they fail."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.study import Budget, CurveSpec, Goal, Grid, Log, Space, StudySpec, load_workload
from shoal.study.claims import Claims
from shoal.study.conclude import analysed, missing_rows
from shoal.study.directory import StudyDirectory
from shoal.study.records import CONFIRM, SearchKey
from shoal.study.run import begin, open_study, run_study
from shoal.study.runner import Runner
from shoal.study.runners import Runners, RunnersFailed, RunnersStopped
from shoal.study.screen import cells, lines, title
from shoal.study.status import seconds_left, status_of

LOSS = "val/cross_entropy_error"


def spec(**changes: Any) -> StudySpec:
    given: dict[str, Any] = {
        "name": "small",
        "workload": "digits_mlp",
        "curves": {"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=0.1, max=1.0)}))},
        "global_batches": (64,),
        "goals": (Goal(metric=LOSS, value=1.5), Goal(metric=LOSS, value=1.0)),
        "budget": Budget(feasible=2, draws=8, steps=200, kappa=1.0),
        "repeats": 1,
        "grid": Grid(ratio=1.3),
    }
    return StudySpec(**{**given, **changes})


def test_another_study_in_the_directory_is_refused_with_the_difference(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    begin(directory, spec(), confirm_seeds=0)
    begin(directory, spec(), confirm_seeds=0)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(UsageError, match=r"seed: 3 here, 0 there.*another directory"):
        begin(directory, spec(seed=3), confirm_seeds=0)
    assert (tmp_path / "study.json").read_bytes() == before


def test_a_study_grows_and_keeps_what_is_finished(tmp_path: Path) -> None:
    run_study(replace(spec(), workload=load_workload("digits_mlp")), tmp_path, confirm_seeds=0)
    directory, there = open_study(tmp_path)
    key = there.searches()[0]
    first = directory.end_of(key)
    assert first is not None and first["goals"][-1]["steps"] > 0
    larger = spec(repeats=2)
    begin(directory, larger, confirm_seeds=0)
    directory, there = open_study(tmp_path)
    assert there.repeats == 2 and directory.end_of(key) == first
    assert Runner(directory, there, name="more").work()
    assert directory.end_of(key) == first
    assert directory.end_of(there.searches()[1]) is not None
    with pytest.raises(UsageError, match="repeats"):
        begin(directory, spec(), confirm_seeds=0)


def test_an_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        begin(StudyDirectory(tmp_path / "file" / "study"), spec(), confirm_seeds=0)


def test_no_study_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no study.json"):
        open_study(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        open_study(tmp_path)
    (tmp_path / "study.json").write_text('{"format": 99}')
    with pytest.raises(UsageError, match="format"):
        open_study(tmp_path)


def test_a_workload_made_here_stays_in_this_process(tmp_path: Path) -> None:
    mine = replace(spec(), workload=load_workload("digits_mlp"))
    with pytest.raises(UsageError, match="processes = 2"):
        run_study(mine, tmp_path, processes=2)


def test_winners_are_confirmed_with_fresh_seeds(tmp_path: Path) -> None:
    mine = replace(spec(), workload=load_workload("digits_mlp"))
    directory = run_study(mine, tmp_path, confirm_seeds=3)
    confirm = SearchKey(curve="sgd", global_batch=64, repeat=CONFIRM)
    end: Any = directory.end_of(confirm)
    search: Any = directory.end_of(SearchKey(curve="sgd", global_batch=64, repeat=0))
    assert end["seeds"] == 3 and len(end["goals"]) == 2
    assert all(goal["steps_confirmed"] for goal in end["goals"])
    assert [g["value"] for g in end["goals"]] == [g["value"] for g in search["goals"]]
    row = status_of(directory, mine.searches())[0]
    assert row.confirmed == end["goals"][-1]["steps_confirmed"]
    assert row.done == row.searches == 1 and row.running == 0 and row.seconds_left == 0
    shown = lines([row])
    assert shown[0].split()[:2] == ["curve", "batch"] and shown[1].split()[:3] == [
        "sgd",
        "64",
        "1/1",
    ]
    assert title([row], "small") == "small: 1 of 1 searches done"


def test_confirmations_follow_the_asked_seeds_and_the_winner(tmp_path: Path) -> None:
    mine = replace(spec(), workload=load_workload("digits_mlp"))
    confirm = SearchKey(curve="sgd", global_batch=64, repeat=CONFIRM)
    directory = run_study(mine, tmp_path, confirm_seeds=0)
    assert directory.end_of(confirm) is None
    run_study(mine, tmp_path, confirm_seeds=2)
    first: Any = directory.end_of(confirm)
    assert first["seeds"] == 2
    run_study(mine, tmp_path, confirm_seeds=3)
    more: Any = directory.end_of(confirm)
    assert more["seeds"] == 3 and more["setting"] == first["setting"]
    # Another winner, as a grown study may have.
    key = mine.searches()[0]
    end: Any = directory.end_of(key)
    end["goals"][-1]["winner"] = 1 - end["goals"][-1]["winner"]
    directory.write_end(key, 99, end)
    run_study(mine, tmp_path, confirm_seeds=3)
    other: Any = directory.end_of(confirm)
    assert other["setting"] != first["setting"]


def test_other_goals_are_answered_from_what_was_measured(tmp_path: Path) -> None:
    mine = replace(spec(), workload=load_workload("digits_mlp"))
    run_study(mine, tmp_path, confirm_seeds=0)
    _, _, between = analysed(tmp_path, goals=[Goal(metric=LOSS, value=1.2)])
    _, _, own = analysed(tmp_path)
    steps = [goal.summaries[0].steps for goal in own.goals]
    found = between.main.summaries[0].steps
    assert found is not None and min(s or 0 for s in steps) <= found <= max(s or 0 for s in steps)
    with pytest.raises(UsageError, match=r"answer goals from 1 to 1\.5"):
        analysed(tmp_path, goals=[Goal(metric=LOSS, value=0.5)])
    with pytest.raises(UsageError, match="was run for"):
        analysed(tmp_path, goals=[Goal(metric="val/classification_error", value=0.5)])


def test_rows_that_were_lost_are_told(tmp_path: Path) -> None:
    mine = replace(spec(), workload=load_workload("digits_mlp"))
    directory = run_study(mine, tmp_path, confirm_seeds=0)
    key = mine.searches()[0]
    end: Any = directory.end_of(key)
    _, _, whole = analysed(tmp_path)
    assert missing_rows({key: end}, whole) == []
    (journal,) = (tmp_path / "rows").glob("*.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: len(lines) // 3]))
    _, _, cut = analysed(tmp_path)
    said = missing_rows({key: end}, cut)
    assert said and all("rows are missing" in line and str(key) in line for line in said)


@pytest.mark.parametrize("processes", [0, -1])
def test_no_runners_is_refused_before_anything_is_written(tmp_path: Path, processes: int) -> None:
    with pytest.raises(UsageError, match="at least 1 runner"):
        run_study(spec(), tmp_path / "out", processes=processes)
    assert not (tmp_path / "out").exists()


def test_status_reads_without_a_study_having_begun_work(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    begin(directory, spec(), confirm_seeds=0)
    row = status_of(directory, spec().searches())[0]
    assert (row.done, row.running, row.steps, row.seconds_left) == (0, 0, None, None)
    assert seconds_left([row]) is None
    assert "-" in cells(row)
    assert not directory.claims.exists(), "looking on leaves nothing behind"


def test_a_stopped_runner_puts_its_work_aside_and_another_goes_on(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    begin(directory, spec(), confirm_seeds=0)
    asked = iter(range(6))
    runner = Runner(directory, spec(), name="first", stopped=lambda: next(asked, None) is None)
    assert not runner.work()
    key = spec().searches()[0]
    assert list(directory.search(key).glob("*.safetensors"))
    assert Runner(directory, spec(), name="second").work()
    end: Any = directory.end_of(key)
    other = StudyDirectory(tmp_path / "other")
    begin(other, spec(), confirm_seeds=0)
    assert Runner(other, spec(), name="whole").work()
    whole: Any = other.end_of(key)
    assert end["goals"] == whole["goals"]


def test_a_runner_waits_for_what_others_hold(tmp_path: Path) -> None:
    directory = StudyDirectory(tmp_path)
    begin(directory, spec(), confirm_seeds=0)
    key = spec().searches()[0]
    held = Claims(directory.claims, runner="other").take(str(key))
    assert held is not None
    done: list[bool] = []
    runner = Runner(directory, spec(), name="waiting")
    thread = threading.Thread(target=lambda: done.append(runner.work()))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    held.release()
    thread.join(60)
    assert done == [True]


class FakePopen:
    """A runner process that has ended already, with a given status."""

    statuses: list[int]
    started: int = 0

    def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
        type(self).started += 1
        self.status = type(self).statuses.pop(0)
        stdout.write(b"Traceback\nshoal study: boom at 7\n")

    def poll(self) -> int:
        return self.status

    def send_signal(self, _number: int) -> None:
        raise ProcessLookupError

    def wait(self, _timeout: float | None = None) -> int:
        return self.status


@pytest.mark.parametrize(
    ("statuses", "error", "started"),
    [
        ([0], None, 1),
        ([-9, -9, -9, -9, 0], None, 5),
        ([-11, -11, -11], RunnersFailed, 3),
        ([1, 1, 1], RunnersFailed, 3),
        ([2], UsageError, 1),
        ([75], RunnersStopped, 1),
    ],
)
def test_killed_runners_are_replaced_and_failing_ones_are_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[int],
    error: type[Exception] | None,
    started: int,
) -> None:
    FakePopen.statuses, FakePopen.started = list(statuses), 0
    monkeypatch.setattr("shoal.study.runners.subprocess.Popen", FakePopen)
    monkeypatch.setattr("shoal.study.runners._POLL_SECONDS", 0.0)
    runners = Runners(tmp_path, processes=1)
    with runners:
        if error is None:
            runners.wait(lambda: None)
        else:
            with pytest.raises(error, match=r"boom at 7|stopped in order"):
                runners.wait(lambda: None)
    assert FakePopen.started == started


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_command_with_75_and_the_same_command_goes_on(tmp_path: Path) -> None:
    import subprocess

    toml = tmp_path / "study.toml"
    toml.write_text(
        'name = "small"\nworkload = "digits_mlp"\nglobal_batches = [8, 64]\nrepeats = 1\n'
        f'goals = [{{metric = "{LOSS}", value = 0.4}}]\n'
        "budget = {trials = 4, max_steps = 4000, kappa = 1.0}\ngrid = {ratio = 1.2}\n"
        "[curves.sgd.space]\nlr = {scale = 'log', min = 0.05, max = 0.5}\n"
    )
    command = [
        sys.executable,
        "-m",
        "shoal",
        "study",
        "run",
        str(toml),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--processes", "1", "--confirm", "2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while not list((tmp_path / "out").glob("rows/*.jsonl")) and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "the same command goes on" in said and "Traceback" not in said
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode in (0, 3), done.stderr
    document = json.loads(done.stdout)
    assert document["done"] == document["searches"] == 2
    assert Path(document["report"]).is_file()
