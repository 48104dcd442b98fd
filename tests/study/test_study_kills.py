"""A study that is killed again and again says what an undisturbed one says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.study import (
    Budget,
    CurveSpec,
    Goal,
    Grid,
    Log,
    ReverseLog,
    Space,
    StudySpec,
)
from shoal.study.claims import Claims
from shoal.study.directory import StudyDirectory
from shoal.study.records import CONFIRM, SearchKey
from shoal.study.run import begin
from shoal.study.tables import StudyTables, read_study

KILLS = 20
LOSS = "val/cross_entropy_error"


def spec() -> StudySpec:
    lr = Log(min=0.01, max=4.0)
    return StudySpec(
        name="killed",
        workload="digits_mlp",
        curves={
            "sgd": CurveSpec(optimizer="sgd", space=Space({"lr": lr})),
            "heavy_ball": CurveSpec(
                optimizer="heavy_ball",
                space=Space({"lr": lr, "momentum": ReverseLog(min=0.0, max=0.95)}),
            ),
        },
        global_batches=(16, 64),
        goals=(Goal(metric=LOSS, value=0.6), Goal(metric=LOSS, value=0.4)),
        budget=Budget(feasible=5, draws=20, steps=600, kappa=1.5),
        repeats=2,
        grid=Grid(ratio=1.15),
    )


class Server:
    """Forks runners."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("runner_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, directory: StudyDirectory, name: str) -> int:
        """A runner's pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{directory.path} {name}\n")
        self._process.stdin.flush()
        return int(self._line())

    def ended(self) -> int:
        """Wait for the last one's end."""
        return int(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server ended"
        return line


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def ends(directory: StudyDirectory) -> dict[SearchKey, Any]:
    """What finished searches and confirmations say; not how long it took."""
    keys = spec().searches()
    keys += [
        SearchKey(curve=curve, global_batch=batch, repeat=CONFIRM)
        for curve, batch in dict.fromkeys((key.curve, key.global_batch) for key in keys)
    ]
    found: dict[SearchKey, Any] = {}
    for key in keys:
        end = directory.end_of(key)
        if end is not None:
            found[key] = {k: v for k, v in end.items() if k not in ("seconds", "trial_steps")}
    return found


def measured(tables: StudyTables) -> dict[Any, Any]:
    """Every evaluation and outcome that counts, by search and trial."""
    return {
        (str(data.key), trial.id): (trial.parameters, curve.evaluations, outcome)
        for data in tables
        for trial, curve, outcome in zip(data.trials, data.curves, data.outcomes, strict=True)
    }


def begun(path: Path) -> StudyDirectory:
    directory = StudyDirectory(path)
    begin(directory, spec(), confirm_seeds=3)
    return directory


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(300)
def test_killed_twenty_times_it_says_the_same(tmp_path: Path, server: Server) -> None:
    whole, killed = begun(tmp_path / "whole"), begun(tmp_path / "killed")
    began = time.monotonic()
    server.start(whole, "whole")
    assert server.ended() == 0
    seconds = time.monotonic() - began
    chosen = sorted((whole.path / "engines").glob("*")) if whole.engines.is_dir() else []
    for path in chosen:
        # Which engine is the fastest is decided by the clock; its results are compared here.
        killed.engines.mkdir(exist_ok=True)
        (killed.engines / path.name).write_bytes(path.read_bytes())
    draw = random.Random(7)
    kills = in_trials = 0
    ended: int | None = None
    for life in range(10 * KILLS):
        pid = server.start(killed, f"life{life}")
        if kills == KILLS:
            break
        # Of what is left, so that kills are spread over the whole.
        time.sleep(draw.uniform(0.5, 1.5) * seconds / KILLS)
        os.kill(pid, signal.SIGKILL)
        ended = server.ended()
        if ended == 0:
            break
        ended = None
        kills += 1
        open_keys = [key for key in spec().searches() if killed.end_of(key) is None]
        claims = Claims(killed.claims, runner="test")
        in_trials += any(held_by(claims.holder(str(key)).owner, pid) for key in open_keys)
    assert (server.ended() if ended is None else ended) == 0
    assert kills == KILLS, f"finished after {kills} kills; make the study longer"
    assert in_trials >= 15
    assert ends(killed) == ends(whole)
    assert measured(read_study(killed.path)) == measured(read_study(whole.path))


def held_by(owner: dict[str, object], pid: int) -> bool:
    """Whether the newest claim is the killed runner's."""
    return owner.get("pid") == pid
