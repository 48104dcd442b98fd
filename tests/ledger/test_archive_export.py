"""A study that goes out in the released layout, or as plain CSV, and comes back is the same study."""

import csv
import json
import math

import pytest
from small_study import ERROR, KEY, OTHER, write_study, write_trial

from shoal.errors import UsageError
from shoal.ledger.archive import import_archive
from shoal.ledger.archive_export import export
from shoal.ledger.plain_csv import export_csv, import_csv
from shoal.ledger.study_rows import StudyWriter
from shoal.study.archived import read_archive
from shoal.study.records import Goal, Outcome, SearchKey
from shoal.study.tables import read_study

SPEC = {
    "format": 1,
    "name": "small study",
    "workload": "digits_mlp",
    "curves": {
        "sgd": {
            "optimizer": "sgd",
            "space": {
                "lr": {"scale": "log", "min": 0.01, "max": 1.0},
                "momentum": {"scale": "reverse_log", "min": 0.5, "max": 0.99},
            },
            "space_at": {"16": {"lr": {"scale": "linear", "min": 0.0, "max": 1.0}}},
        },
        "nesterov": {
            "optimizer": "nesterov",
            "space": {
                "lr": {"scale": "discrete", "values": [0.1, 0.2]},
                "decay_steps": {"scale": "integer", "min": 5, "max": 9, "log": True},
            },
        },
    },
    "budget": {"trials": 2, "max_steps": 7, "full": False},
}


@pytest.fixture
def study(tmp_path):
    write_study(tmp_path / "study")
    (tmp_path / "study" / "study.json").write_text(json.dumps(SPEC))
    return read_study(tmp_path / "study")


def same(before, after):
    """All searches are equal, NaN included."""
    assert list(after.searches) == list(before.searches)
    for key in before.searches:
        assert repr(after[key]) == repr(before[key])


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_round_trip_changes_nothing(study, tmp_path):
    assert export(study, tmp_path / "out") == 4
    report = import_archive(tmp_path / "out", tmp_path / "again")
    assert report.problems == []
    again = read_archive(tmp_path / "again")
    same(study, again)
    assert export(again, tmp_path / "twice", dataset="digits_mlp", model="small_study") == 4
    import_archive(tmp_path / "twice", tmp_path / "thrice")
    same(study, read_archive(tmp_path / "thrice"))


def test_the_layout_is_the_released_one(study, tmp_path):
    export(study, tmp_path / "out")
    paths = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")
    )
    first = "repeat_0/digits_mlp/small_study/sgd/8"
    second = "repeat_1/digits_mlp/small_study/nesterov_momentum/16"
    assert paths == [
        f"{first}/0/bounds.csv",
        f"{first}/0/measurements.csv",
        f"{first}/0/metadata.json",
        f"{first}/1/measurements.csv",
        f"{first}/1/metadata.json",
        f"{first}/2/measurements.csv",
        f"{first}/2/metadata.json",
        f"{first}/study.json",
        f"{second}/0/measurements.csv",
        f"{second}/0/metadata.json",
        f"{second}/study.json",
    ]
    facts = json.loads((tmp_path / "out" / first / "study.json").read_text())
    del facts["_shoal"]
    assert facts == {
        "batch_size": 8,
        "dataset": "digits_mlp",
        "model": "small_study",
        "optimizer": "sgd",
        "early_stopping": True,
        "train_steps": 3,
        "parameter_configs": {
            "learning_rate": {
                "type": "DOUBLE",
                "scale": "LOG_SCALE",
                "min_value": 0.01,
                "max_value": 1.0,
            },
            "momentum": {
                "type": "DOUBLE",
                "scale": "REVERSE_LOG_SCALE",
                "min_value": 0.5,
                "max_value": 0.99,
            },
        },
    }
    facts = json.loads((tmp_path / "out" / second / "study.json").read_text())
    assert facts["train_steps"] == 7  # the budget: this search has not ended
    assert facts["parameter_configs"] == {
        "learning_rate": {"type": "DISCRETE", "feasible_points": [0.1, 0.2]},
        "learning_rate_decay_steps": {
            "type": "INTEGER",
            "scale": "LOG_SCALE",
            "min_value": 5,
            "max_value": 9,
        },
    }
    metadata = [
        json.loads((tmp_path / "out" / first / str(i) / "metadata.json").read_text())
        for i in range(3)
    ]
    assert [m["status"] for m in metadata] == ["COMPLETE", "INCOMPLETE", "INFEASIBLE"]
    assert [m["steps"] for m in metadata] == [3, 1, 1]
    assert metadata[1]["trial_id"] == 1
    assert metadata[1]["parameters"] == {"learning_rate": 0.2, "momentum": 0.9}
    # A bound is no measurement.
    measured = rows_of(tmp_path / "out" / first / "0" / "measurements.csv")
    assert measured[0] == ["step", ERROR, "val/cross_entropy_error"]
    assert measured[1] == ["0", "0.9", "1.8"]
    assert measured[-1] == ["3", "", ""]
    assert rows_of(tmp_path / "out" / first / "0" / "bounds.csv") == [
        ["step", "metric", "value", "bound"],
        ["3", ERROR, "0.4", ">="],
    ]


def test_released_readers_find_the_same_crossings(study, tmp_path):
    """Read with nothing but json and csv: the first strict crossing of every trial."""
    export(study, tmp_path / "out")
    for data in study:
        optimizer = {"sgd": "sgd", "nesterov": "nesterov_momentum"}[data.key.curve]
        place = (
            tmp_path
            / "out"
            / f"repeat_{data.key.repeat}"
            / "digits_mlp"
            / "small_study"
            / optimizer
            / str(data.key.global_batch)
        )
        for goal in (0.31, 0.3, 0.5, 0.55, 0.95):
            found = []
            for trial in data.trials:
                head, *lines = rows_of(place / str(trial.id) / "measurements.csv")
                at = head.index(ERROR)
                steps = [int(line[0]) for line in lines if line[at] and float(line[at]) < goal]
                found.append(min(steps, default=None))
            assert found == data.crossings(Goal(metric=ERROR, value=goal))


def test_a_released_archive_needs_a_goal_for_outcomes(tmp_path):
    place = tmp_path / "a" / "mnist" / "cnn" / "sgd" / "4" / "1"
    place.mkdir(parents=True)
    (place.parent / "study.json").write_text(
        json.dumps({"batch_size": 4, "train_steps": 0, "parameter_configs": {"x": {}}})
    )
    (place / "metadata.json").write_text('{"status": "COMPLETE", "parameters": {"x": 1}}')
    (place / "measurements.csv").write_text(f"step,{ERROR}\n0,0.5\n10,0.25\n")
    report = import_archive(tmp_path / "a", tmp_path / "out")
    assert report.problems == []
    key = SearchKey(curve="sgd", global_batch=4, repeat=0)
    for goal, outcome in (
        (None, None),
        (Goal(metric=ERROR, value=0.25), Outcome.NOT_REACHED),
        (Goal(metric=ERROR, value=0.26), Outcome.REACHED),
    ):
        assert read_archive(tmp_path / "out", goal=goal)[key].outcomes == [outcome]


def test_two_curves_of_one_optimizer_keep_their_names(tmp_path):
    with StudyWriter(tmp_path / "rows" / "r.jsonl") as writer:
        for curve in ("constant", "decayed"):
            key = SearchKey(curve=curve, global_batch=8, repeat=0)
            write_trial(writer, key, 0, [0.5], "aa")
    curves = {name: {"optimizer": "sgd", "space": {}} for name in ("constant", "decayed")}
    (tmp_path / "study.json").write_text(json.dumps({"curves": curves}))
    study = read_study(tmp_path)
    export(study, tmp_path / "out", dataset="d", model="m")
    assert sorted(path.name for path in (tmp_path / "out" / "d" / "m").iterdir()) == [
        "constant",
        "decayed",
    ]
    import_archive(tmp_path / "out", tmp_path / "again")
    same(study, read_archive(tmp_path / "again"))


def test_export_refuses_what_it_cannot_do(study, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        export(study, tmp_path / "full")
    with pytest.raises(UsageError, match="model = 'a/b'"):
        export(study, tmp_path / "out", model="a/b")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="nothing to export"):
        export(read_study(tmp_path / "none"), tmp_path / "out")


def test_plain_csv_round_trip(study, tmp_path):
    export_csv(tmp_path / "study", tmp_path / "csv")
    rows = rows_of(tmp_path / "csv" / "evaluations.csv")
    assert rows[0] == [
        "study", "curve", "global_batch", "repeat", "trial", "step", "diverged", "metric", "value",
        "kind",
    ]  # fmt: skip
    assert ["study", "sgd", "8", "0", "0", "3", "false", ERROR, "0.4", ">="] in rows
    assert ["study", "sgd", "8", "0", "2", "1", "false", ERROR, "", "nan"] in rows
    report = import_csv(tmp_path / "csv", tmp_path / "again")
    assert (report.searches, report.trials) == (2, 4)
    assert report.values == len(rows) - 1
    again = read_archive(tmp_path / "again", "study")
    assert list(again.searches) == [OTHER, KEY]
    same(study, again)
    with pytest.raises(UsageError, match="it has a evaluations"):
        export_csv(tmp_path / "study", tmp_path / "csv")


def test_plain_csv_with_a_column_per_metric(tmp_path):
    (tmp_path / "evaluations.csv").write_text(
        "step,global_batch,trial,val/error,note\n5,8,2,nan,x\n0,8,2,0.5,\n0,8,10,0.25,\n0,16,1,,\n"
    )
    report = import_csv(tmp_path, tmp_path / "out")
    assert (report.searches, report.trials, report.evaluations, report.values) == (2, 3, 4, 3)
    tables = read_archive(tmp_path / "out")
    assert [str(key) for key in tables.searches] == ["imported-b8-r0", "imported-b16-r0"]
    trials, steps, values, exact = tables.metric(tables.searches[0], "val/error")
    assert (trials.tolist(), steps.tolist()) == ([2, 2, 10], [0, 5, 0])
    assert values[[0, 2]].tolist() == [0.5, 0.25]
    assert math.isnan(values[1])
    assert exact.all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("step,trial,val/x\n0,1,1\n", "no column 'global_batch'"),
        ("step,trial,global_batch\n0,1,1\n", "no metric"),
        ("step,trial,global_batch,val/x\n0,1,8,high\n", "evaluations.csv: .*high"),
        ("step,trial,global_batch,val/x\n,1,8,1\n", "1 rows without a trial or a step"),
        ("step,trial,global_batch,val/x\n0,1,8,1,2,3\n", "evaluations.csv"),
    ],
)
def test_broken_csv_is_named(tmp_path, content, said):
    (tmp_path / "evaluations.csv").write_text(content)
    with pytest.raises(UsageError, match=said):
        import_csv(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "tables").exists()


def test_broken_trials_csv_is_named(tmp_path):
    (tmp_path / "evaluations.csv").write_text("step,trial,global_batch,val/x\n0,1,8,1\n")
    (tmp_path / "trials.csv").write_text("trial,global_batch,p_lr\n1,8,0.1\n2,8,high\n")
    with pytest.raises(UsageError, match=r"trials\.csv, line 3: .*high"):
        import_csv(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match=r"evaluations\.csv; there is no such file"):
        import_csv(tmp_path / "none", tmp_path / "out")
