"""One search carried out: the same rows and the same end, however often it is put aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.ledger.journal import read
from shoal.ledger.study_rows import StudyWriter, unpacked
from shoal.study.claims import ClaimLost, Claims
from shoal.study.directory import StudyDirectory
from shoal.study.engines.contract import SavedTrial
from shoal.study.evaluation import SampleOutcomes
from shoal.study.records import Budget, Evaluation, Goal, Measured, SearchKey, Trial
from shoal.study.search import Search
from shoal.study.search_run import SearchRun, Tools

ERROR = "val/classification_error"
KEY = SearchKey(curve="sgd", global_batch=8, repeat=0)
GOALS = [Goal(metric=ERROR, value=0.5), Goal(metric=ERROR, value=0.2)]
GRID = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def trial(number: int) -> Trial:
    return Trial(
        search=KEY,
        id=number,
        unit=(0.5,),
        parameters={"lr": 1.0 + number},
        seed=number,
        address=str(number),
    )


class Halving:
    """Trial i multiplies its one weight by a factor of its own every step; trial 1 grows instead."""

    name = "halving"

    def __init__(self, portion: int = 2) -> None:
        self.portion = portion
        self.states: dict[int, tuple[int, Tensor]] = {}
        self.trained = 0

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        assert trial.id not in self.states
        state = (0, torch.ones(1, dtype=torch.float64))
        if saved is not None:
            state = (saved.step, saved.tensors["p/w"].clone())
        self.states[trial.id] = state

    def advance(self, targets: Mapping[int, int]) -> None:
        for number, target in targets.items():
            step, weight = self.states[number]
            for _ in range(step, target):
                weight = weight * (4.0 if number == 1 else 1 - 0.3 / (number + 1))
                self.trained += 1
            self.states[number] = (target, weight)

    def step(self, trial: int) -> int:
        return self.states[trial][0]

    def losses(self, trial: int) -> tuple[float, float]:
        return 1.0, float(self.states[trial][1])

    def weights(self, trial: int) -> Mapping[str, Tensor]:
        return {"w": self.states[trial][1]}

    def save(self, trial: int) -> SavedTrial:
        step, weight = self.states[trial]
        return SavedTrial(
            step=step, tensors={"p/w": weight.clone()}, first_loss=1.0, recent_loss=1.0
        )

    def release(self, trial: int) -> None:
        del self.states[trial]

    def portions(self, trials: Sequence[int]) -> Sequence[Sequence[int]]:
        return [trials[i : i + self.portion] for i in range(0, len(trials), self.portion)]


class Reading:
    """The weight is the error; it counts its calls, to show that memory is taken up."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def evaluate(
        self, trial: int, step: int, weights: Mapping[str, Tensor], losses: tuple[float, float]
    ) -> Evaluation:
        self.calls[trial] = self.calls.get(trial, 0) + 1
        value = float(weights["w"])
        metrics = {ERROR: Measured(value), "val/calls": Measured(float(self.calls[trial]))}
        return Evaluation(step=step, metrics=metrics, diverged=value > 10)

    def evaluate_portion(self, engine: Any, steps: Mapping[int, int]) -> dict[int, Evaluation]:
        return {
            number: self.evaluate(number, step, engine.weights(number), engine.losses(number))
            for number, step in steps.items()
        }

    def measure(self, weights: Mapping[str, Tensor], split: str) -> dict[str, Measured]:
        assert split == "val"
        return {ERROR: Measured(float(weights["w"]))}

    def outcomes(self, trial: int) -> list[SampleOutcomes]:
        if self.calls[trial] % 2:
            return []
        values = np.array([1.0, 0.0, float(trial == 0)], dtype=np.float32)
        return [SampleOutcomes(metric=ERROR, values=values)]

    def forget(self, trial: int) -> None:
        del self.calls[trial]

    def state_dict(self) -> dict[str, Any]:
        return {str(k): v for k, v in self.calls.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = {int(k): v for k, v in state.items()}


def search(goals: Sequence[Goal] = GOALS) -> Search:
    return Search(goals, Budget(feasible=4, draws=9, steps=32, kappa=2.0), GRID)


class Bench:
    """A study directory and the runs on it, one after another as after kills or stops."""

    def __init__(self, path: Path) -> None:
        self.directory = StudyDirectory(path)
        self.claims = Claims(self.directory.claims, runner="r")
        self.trained = 0

    def run(
        self, *, rounds: int | None = None, portion: int = 2, goals: Sequence[Goal] = GOALS
    ) -> bool:
        claim = self.claims.take(str(KEY))
        assert claim is not None
        left = iter(range(rounds if rounds is not None else 10**9))
        engine = Halving(portion)
        with StudyWriter(self.directory.rows(f"r{claim.number}")) as rows:
            tools = Tools(
                trials=trial, wanting=search(goals), engine=engine, measuring=Reading(), rows=rows,
                directory=self.directory,
            )  # fmt: skip
            run = SearchRun(KEY, tools, claim=claim, stopped=lambda: next(left, None) is None)
            finished = run.go()
        self.trained += engine.trained
        claim.release()
        return finished

    def rows(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in sorted((self.directory.path / "rows").iterdir()):
            found += [row for row in read(path) if row["kind"] == kind]
        return found

    def curves(self) -> dict[int, list[tuple[Any, ...]]]:
        curves: dict[int, list[tuple[Any, ...]]] = {}
        for row in self.rows("eval"):
            point = (
                row["step"],
                row["metrics"][ERROR],
                row["metrics"]["val/calls"],
                row["diverged"],
            )
            curves.setdefault(row["trial"], []).append(point)
        return {number: sorted(points) for number, points in curves.items()}


def comparable(end: dict[str, object] | None) -> dict[str, object]:
    assert end is not None
    return {name: value for name, value in end.items() if name != "seconds"}


def test_a_search_ends_with_its_result_and_all_rows(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run()
    end = bench.directory.end_of(KEY)
    assert end is not None and end["state"] == "done" and end["engine"] == "halving"
    goals: Any = end["goals"]
    # Trial 0 multiplies by 0.7: below 0.5 after 2 steps, below 0.2 after 5, seen at 6.
    assert [goal["steps"] for goal in goals] == [2, 6]
    assert [goal["winner"] for goal in goals] == [0, 0]
    outcomes = {row["trial"]: row["outcome"] for row in bench.rows("outcome")}
    assert outcomes[0] == "reached" and outcomes[1] == "diverged"
    assert sum(outcome != "diverged" for outcome in outcomes.values()) == 4
    assert bench.rows("search")[-1]["state"] == "done"
    kept = [row for row in bench.rows("samples") if row["trial"] == 0]
    assert kept and all(unpacked(row["bits"], row["count"]).tolist() == [1, 0, 1] for row in kept)
    assert not list(bench.directory.search(KEY).glob("*.safetensors"))


def test_a_goal_nothing_reaches_says_how_far_the_best_came(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run(goals=[Goal(metric=ERROR, value=1e-9)])
    end: Any = bench.directory.end_of(KEY)
    assert end["goals"][0]["steps"] is None
    assert end["closest"]["trial"] == 0 and end["closest"]["step"] == 32
    assert end["closest"]["value"] == pytest.approx(0.7**32)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_put_aside_and_taken_up_it_says_the_same(tmp_path: Path, rounds: int) -> None:
    whole, broken = Bench(tmp_path / "whole"), Bench(tmp_path / "broken")
    assert whole.run()
    runs = 0
    while not broken.run(rounds=rounds):
        runs += 1
        assert runs < 200
    assert runs > 2
    assert broken.curves() == whole.curves()
    assert comparable(broken.directory.end_of(KEY)) == comparable(whole.directory.end_of(KEY))
    assert broken.trained == whole.trained, "nothing was trained twice"
    attempts = {(row["trial"], row["attempt"]) for row in broken.rows("eval")}
    assert len(attempts) == len(whole.curves()), "one attempt for each trial"


def test_the_engines_portions_do_not_matter(tmp_path: Path) -> None:
    one, many = Bench(tmp_path / "one"), Bench(tmp_path / "many")
    assert one.run(portion=1) and many.run(portion=100)
    assert one.curves() == many.curves()


def test_a_killed_search_begins_again_where_it_was_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after the last time count again, under a larger segment and the same attempt."""
    monkeypatch.setattr("shoal.study.search_run.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("shoal.study.search_run.PAUSE_SHARE", 1e9)
    bench, whole = Bench(tmp_path / "killed"), Bench(tmp_path / "whole")

    class Killed(BaseException):
        pass

    evaluate = Reading.evaluate
    for survived in (3, 9, 14):
        left = iter(range(survived))

        def dies(self: Reading, *arguments: Any, left: Any = left) -> Evaluation:
            if next(left, None) is None:
                raise Killed
            return evaluate(self, *arguments)

        monkeypatch.setattr(Reading, "evaluate", dies)
        with pytest.raises(Killed):
            bench.run()
        # The dead owner's claim is given up by hand, as the kernel's word about it would.
        newest = max((tmp_path / "killed/claims").glob("*[0-9]"), key=lambda p: int(p.suffix[1:]))
        newest.rename(newest.with_name(newest.name + ".released"))
    monkeypatch.setattr(Reading, "evaluate", evaluate)
    assert bench.run() and whole.run()
    newest_rows: dict[tuple[int, int], tuple[int, Any]] = {}
    for row in bench.rows("eval"):
        place = (row["trial"], row["step"])
        entry = (row["segment"], row["metrics"])
        newest_rows[place] = max(newest_rows.get(place, entry), entry, key=lambda e: e[0])
    wanted = {(row["trial"], row["step"]): row["metrics"] for row in whole.rows("eval")}
    assert {place: metrics for place, (_, metrics) in newest_rows.items()} == wanted
    ours, theirs = bench.directory.end_of(KEY), whole.directory.end_of(KEY)
    assert ours is not None and theirs is not None and ours["goals"] == theirs["goals"]


def test_a_replaced_owner_writes_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    claim = bench.claims.take(str(KEY))
    assert claim is not None
    (bench.directory.claims / f"{KEY}.1").write_text("{}")
    with StudyWriter(bench.directory.rows("r")) as rows:
        tools = Tools(
            trials=trial, wanting=search(), engine=Halving(), measuring=Reading(), rows=rows,
            directory=bench.directory,
        )  # fmt: skip
        with pytest.raises(ClaimLost):
            SearchRun(KEY, tools, claim=claim, stopped=lambda: False).go()
    assert not bench.rows("eval")
