"""What went wrong on the command line once: a traceback, or a study in a place nobody named."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from shoal.cli.study import one_line
from shoal.errors import UsageError
from shoal.study import Budget, CurveSpec, Goal, Log, Space, StudySpec, load_workload, run_study
from shoal.study.conclude import conclude
from shoal.study.run import open_study


def spec(**changes: object) -> StudySpec:
    given = StudySpec(
        name="small",
        workload="digits_tiny",
        curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Log(min=0.1, max=1.0)}))},
        global_batches=(64,),
        goals=(Goal(metric="val/cross_entropy_error", value=1.5),),
        budget=Budget(feasible=2, draws=4, steps=20, kappa=1.0),
        repeats=1,
    )
    return replace(given, **changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", "."])
def test_a_name_that_would_lead_elsewhere(name: str) -> None:
    with pytest.raises(UsageError, match=r"name = .*--out"):
        spec(name=name)


def _no_file_grows() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def _nothing() -> None: ...


def curve(study: Path, limit: Callable[[], None]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "study", "curve", str(study)],
        capture_output=True, text=True, timeout=100, preexec_fn=limit,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_tables_that_cannot_be_written_or_read_are_one_line(tmp_path: Path) -> None:
    study = tmp_path / "study"
    run_study(spec(workload=load_workload("digits_tiny")), study, confirm_seeds=0)
    rows = {path: path.read_bytes() for path in (study / "rows").iterdir()}
    status, said = curve(study, _no_file_grows)
    assert status == 1 and len(said.splitlines()) == 1, said
    assert {path: path.read_bytes() for path in (study / "rows").iterdir()} == rows
    assert curve(study, _nothing)[0] in (0, 3)
    for part in (study / "tables").glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:100])
    status, said = curve(study, _nothing)
    assert status == 1 and len(said.splitlines()) == 1 and "remove the folder tables/" in said, said
    shutil.rmtree(study / "tables")
    assert curve(study, _nothing)[0] in (0, 3)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 1, "spec": []}'])
def test_a_study_json_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(UsageError, match=r"study\.json"):
        open_study(tmp_path)


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"study = .*file; it holds no study\.json"):
        open_study(tmp_path / "file")


@pytest.mark.parametrize("value", [1.5, 9.0])
def test_the_page_of_one_point_is_drawn_without_a_warning(tmp_path: Path, value: float) -> None:
    """One batch, one search; with the easy goal it takes no step at all. Warnings are errors here."""
    pytest.importorskip("matplotlib")
    goals = (Goal(metric="val/cross_entropy_error", value=value),)
    small = spec(workload=load_workload("digits_tiny"), goals=goals)
    directory = run_study(small, tmp_path / "study", confirm_seeds=0)
    assert conclude(directory).report.is_file()


def test_an_end_that_says_nothing_is_none(tmp_path: Path) -> None:
    small = spec(workload=load_workload("digits_tiny"))
    directory = run_study(small, tmp_path / "study", confirm_seeds=0)
    key = small.searches()[0]
    end = directory.end_of(key)
    assert end is not None
    (directory.search(key) / "done.0.json").write_text("{}")
    assert directory.end_of(key) is None
    run_study(small, tmp_path / "study", confirm_seeds=0)
    again = directory.end_of(key)
    assert again is not None and again["goals"] == end["goals"]


def test_ctrl_c_while_no_runner_works(capsys: pytest.CaptureFixture[str]) -> None:
    """While it plans, or writes the page in the end."""
    with pytest.raises(typer.Exit) as stopped, one_line("run"):
        raise KeyboardInterrupt
    assert stopped.value.exit_code == 75
    assert capsys.readouterr().err.count("\n") == 1
