"""Archives of the released layout: what was planted is found, what is broken is named, the rest imported."""

import json
import math
import shutil
import subprocess
import sys
import textwrap

import duckdb
import numpy as np
import pytest

from shoal.errors import ShoalError, UsageError
from shoal.ledger import archive_part, queries
from shoal.ledger.archive import import_archive
from shoal.study.archived import archived_studies, read_archive
from shoal.study.records import Goal, Outcome, SearchKey
from shoal.workloads.synthetic_archive import (
    RELEASED_SEARCHES,
    RELEASED_VALUES,
    released_archive,
    small_archive,
)

ERROR = "val/classification_error"
CNN = "mnist/simple_cnn_base"


@pytest.fixture(scope="module")
def archive():
    return small_archive(trials=20, rows=30)


@pytest.fixture(scope="module")
def directory(archive, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "batch_science"
    archive.write(path)
    return path


@pytest.fixture(scope="module")
def imported(archive, directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported")
    report = import_archive(directory, out)
    assert report.problems == []
    return out, report


def goals(archive):
    found = {}
    for workload in archive.workloads:
        study, _, optimizer = workload.path.rpartition("/")
        found[study, optimizer] = Goal(
            metric=f"val/{workload.metric}",
            value=workload.goal,
            larger_is_better=workload.larger_is_better,
        )
    return found


def truth(archive, first_n_complete=None):
    return {search.path: search.result(first_n_complete) for search in archive.searches()}


def answers(rows):
    return {
        f"{row.search.study}/{row.search.curve}/{row.search.global_batch}": None
        if row.steps is None
        else (row.steps, row.trial)
        for row in rows
    }


def test_all_is_imported(archive, imported):
    _, report = imported
    searches = list(archive.searches())
    assert report.searches == len(searches) == len(archive) == 64
    assert report.trials == sum(search.ids.size for search in searches)
    assert report.evaluations == sum(search.step.size for search in searches)
    assert report.values == sum(search.step.size * len(search.values) for search in searches)


@pytest.mark.parametrize("first_n_complete", [None, 5])
def test_steps_to_result_are_the_planted_ones(archive, imported, first_n_complete):
    """Strict crossings, ties to the lowest id, only COMPLETE trials, in the order of numbers."""
    columns = queries.load_columns(imported[0])
    found = queries.steps_to_result(columns, goals(archive), first_n_complete=first_n_complete)
    expected = truth(archive, first_n_complete)
    assert answers(found) == expected
    assert sum(answer is None for answer in expected.values()) in range(1, 20)
    if first_n_complete is not None:
        assert {row.trials for row in found} == {first_n_complete}


def test_the_planted_archive_is_not_easy(archive):
    """Whoever takes other trials, other orders or ties with the goal gets other answers."""
    searches = list(archive.searches())
    wrong_trials = wrong_order = ties_in_step = equal_to_goal = 0
    for search in searches:
        expected = search.result()
        crossed = [(s, i) for s, i in zip(search.crossing, search.ids, strict=True) if s >= 0]
        wrong_trials += expected != min(crossed, default=None)
        complete = search.ids[search.status == "COMPLETE"]
        as_text = sorted(complete.tolist(), key=str)[:5]
        wrong_order += as_text != complete.tolist()[:5]
        if expected:
            best = [i for s, i in crossed if s == expected[0] and i in complete]
            ties_in_step += len(best) > 1
        equal_to_goal += bool(
            (search.values[f"val/{search.workload.metric}"] == search.workload.goal).any()
        )
    assert wrong_trials > 10
    assert wrong_order > 10
    assert ties_in_step >= 2
    assert equal_to_goal > 10


def test_the_views_answer_the_same_without_shoal(archive, imported):
    code = textwrap.dedent("""
        import json, sys
        import duckdb
        connection = duckdb.connect()
        connection.execute(open("views.sql").read())
        found = []
        for metric, goal in json.loads(sys.argv[1]):
            found += connection.execute(
                "SELECT study, curve, global_batch, steps, trial "
                "FROM steps_to_result(?, ?, first_complete := 5)", [metric, goal]
            ).fetchall()
        evaluations = connection.execute(
            "SELECT count(*), count(value), count(DISTINCT kind) FROM evaluations"
        ).fetchone()
        print(json.dumps([found, evaluations, "shoal" in sys.modules]))
    """)
    wanted = sorted(
        {(g.metric, g.value) for g in goals(archive).values() if not g.larger_is_better}
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(wanted)],
        cwd=imported[0] / "tables",
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found, (count, finite, kinds), has_shoal = json.loads(ran.stdout)
    assert not has_shoal
    assert count == imported[1].values
    infeasible = sum(
        int((s.status == "INFEASIBLE").sum()) * len(s.values) for s in archive.searches()
    )
    assert finite == count - infeasible
    assert kinds == 3
    got = {}
    by_goal = {key: (goal.metric, goal.value) for key, goal in goals(archive).items()}
    for study, curve, batch, steps, trial in found:
        got.setdefault((study, curve, batch), set()).add((steps, trial))
    for path, expected in truth(archive, 5).items():
        study, curve, batch = path.rsplit("/", 2)
        if "open_images" not in study and expected is not None:
            assert expected in got[study, curve, int(batch)], by_goal[study, curve]


def test_best_errors_are_those_of_brute_force(archive, imported):
    columns = queries.load_columns(imported[0], ["val/cross_entropy_error"])
    assert list(columns.metrics) == ["val/cross_entropy_error"]
    step_budgets, sample_budgets = (0, 700, 10**5), (10**4, 10**6, 10**8)
    by_steps = queries.best_error(
        columns, "val/cross_entropy_error", step_budgets=step_budgets, first_n_complete=9
    )
    by_samples = queries.best_error(
        columns, "val/cross_entropy_error", sample_budgets=sample_budgets
    )
    expected = []
    for budgets, in_samples, first in ((step_budgets, False, 9), (sample_budgets, True, None)):
        for search in archive.searches():
            values = search.values["val/cross_entropy_error"]
            trial = np.repeat(search.ids, search.rows)
            taken = np.isin(trial, search.ids[search.status == "COMPLETE"][:first])
            cost = search.step * (search.global_batch if in_samples else 1)
            for budget in budgets:
                rows = [
                    (values[i], trial[i], search.step[i])
                    for i in np.flatnonzero(taken & (cost <= budget))
                ]
                expected.append((search.path, budget, *min(rows)))
    got = [
        (
            f"{row.search.study}/{row.search.curve}/{row.search.global_batch}",
            row.budget,
            row.value,
            row.trial,
            row.step,
        )
        for row in by_steps + by_samples
    ]
    assert sorted(got) == sorted(expected)


def test_a_budget_before_anything_was_measured_has_no_value(imported):
    columns = queries.load_columns(imported[0], ["val/average_precision"])
    rows = queries.best_error(columns, "val/average_precision", step_budgets={(CNN, "sgd"): [100]})
    assert len(rows) == 8
    assert all(math.isnan(row.value) and row.trial is None and row.step is None for row in rows)
    with pytest.raises(UsageError, match="both or none"):
        queries.best_error(columns, "val/average_precision")
    with pytest.raises(UsageError, match="the archive has test/"):
        queries.load_columns(imported[0], ["val/accuracy"])


def test_label_smoothing_slices(archive, imported):
    """The first N COMPLETE trials, and of those the ones with the asked value."""
    columns = queries.load_columns(imported[0], [ERROR])
    key = ("imagenet/resnet_50", "nesterov_momentum")
    goal = {key: goals(archive)[key]}
    seen = set()
    for smoothing in (0.0, 0.01, 0.1):
        found = queries.steps_to_result(
            columns, goal, first_n_complete=10, where={"label_smoothing": smoothing}
        )
        for row, search in zip(
            found,
            (s for s in archive.searches() if s.path.startswith("imagenet/")),
            strict=True,
        ):
            complete = np.flatnonzero(search.status == "COMPLETE")[:10]
            slice_ = [i for i in complete if search.parameters["label_smoothing"][i] == smoothing]
            crossed = [
                (int(search.crossing[i]), int(search.ids[i]))
                for i in slice_
                if search.crossing[i] >= 0
            ]
            expected = min(crossed, default=(None, None))
            assert (row.steps, row.trial) == expected
            assert row.trials == len(slice_)
            seen.add(row.steps)
    assert len(seen) > 10


def test_an_archived_study_is_a_study(archive, imported):
    names = archived_studies(imported[0])
    assert names == sorted({w.path.rpartition("/")[0] for w in archive.workloads})
    goal = goals(archive)[CNN, "momentum"]
    tables = read_archive(imported[0], CNN, goal=goal)
    assert tables.curves() == ["momentum", "nesterov_momentum", "sgd"]
    planted = {search.path: search for search in archive.searches()}
    for data in tables.repeats("momentum", 512):
        search = planted[f"{CNN}/momentum/512"]
        assert [trial.id for trial in data.trials] == search.ids.tolist()
        assert data.end == search.train_steps
        assert data.draws == 20
        offset = 0
        for i, (trial, curve, outcome) in enumerate(
            zip(data.trials, data.curves, data.outcomes, strict=True)
        ):
            rows = slice(offset, offset + int(search.rows[i]))
            offset = rows.stop
            assert [e.step for e in curve.evaluations] == search.step[rows].tolist()
            np.testing.assert_array_equal(
                [e.metrics["test/cross_entropy_error"].value for e in curve.evaluations],
                search.values["test/cross_entropy_error"][rows],
            )
            assert trial.parameters["lr"] == search.parameters["learning_rate"][i]
            assert trial.parameters["momentum"] == search.parameters["momentum"][i]
            rate, momentum = trial.unit
            assert 1e-4 * 1e5**rate == pytest.approx(trial.parameters["lr"])
            assert 0.1 * 1e-3**momentum == pytest.approx(1 - trial.parameters["momentum"])
            expected = {
                "COMPLETE": Outcome.REACHED if search.crossing[i] >= 0 else Outcome.NOT_REACHED,
                "INFEASIBLE": Outcome.DIVERGED,
                "INCOMPLETE": Outcome.PREEMPTED,
            }[search.status[i]]
            assert outcome is expected
            assert (curve.diverged_at is not None) == (expected is Outcome.DIVERGED)
    column = tables.metric(SearchKey(curve="momentum", global_batch=512, repeat=0), ERROR)
    np.testing.assert_array_equal(column.value, search.values[ERROR])
    first = read_archive(imported[0], CNN, first_n_complete=5)
    key = SearchKey(curve="momentum", global_batch=512, repeat=0)
    complete = search.ids[search.status == "COMPLETE"]
    assert [trial.id for trial in first[key].trials] == complete[:5].tolist()
    assert first[key].outcomes == [None] * 5
    with pytest.raises(UsageError, match="the archive has imagenet"):
        read_archive(imported[0])


def copy_of(directory, target, *parts):
    for part in parts:
        shutil.copytree(directory / part, target / part)
    return target


METADATA = {
    "missing": None,
    "cut off": '{"trial_id": 3, "sta',
    "a list": "[]",
    "status unknown": '{"status": "DONE"}',
    "no number": '{"status": "COMPLETE", "parameters": {"learning_rate": "high"}}',
}
MEASUREMENTS = {
    "missing": None,
    "empty": "",
    "no step": "time,val/x\n1,2\n",
    "binary": "\udcff\udcfe\x00step,\n1,2\n",
    "line cut off": "step,val/x,val/y\n0,0.5,0.5\n1,0.4",
    "a word": "step,val/x\n0,0.5\n1,half\n",
    "half a step": "step,val/x\n0,0.5\n1.5,0.5\n",
    "step missing": "step,val/x\n0,0.5\n,0.5\n",
    "step negative": "step,val/x\n0,0.5\n-1,0.5\n",
    "too many columns": "step,val/x\n0,0.5,1\n",
    "column twice": "step,val/x,val/x\n0,1,1\n",
    "underscore": "step,val/x\n0,1_0\n",
}


def damage(path, content):
    if content is None:
        path.unlink()
    else:
        path.write_text(content, errors="surrogateescape")


def test_broken_trials_are_named_and_the_rest_imported(directory, tmp_path):
    source = copy_of(directory, tmp_path / "a", f"{CNN}/sgd/8", f"{CNN}/sgd/32")
    broken = [("metadata.json", content) for content in METADATA.values()]
    broken += [("measurements.csv", content) for content in MEASUREMENTS.values()]
    for trial, (name, content) in enumerate(broken, start=1):
        damage(source / CNN / "sgd" / "8" / str(trial) / name, content)
    report = import_archive(source, tmp_path / "out", processes=1)
    named = {problem.path.removeprefix(f"{source}/{CNN}/sgd/8/") for problem in report.problems}
    expected = {f"{trial}/{name}" for trial, (name, _) in enumerate(broken, start=1)}
    assert named == expected
    left_out = [p.path for p in report.problems if p.reason.endswith("trial left out")]
    assert len(left_out) == len(set(left_out)) == len(broken)
    assert report.trials == 40 - len(broken)
    stored = json.loads((tmp_path / "out" / "tables" / "import.json").read_text())
    assert len(stored["problems"]) == len(report.problems)
    data = read_archive(tmp_path / "out")[SearchKey(curve="sgd", global_batch=8, repeat=0)]
    assert [trial.id for trial in data.trials] == list(range(len(broken) + 1, 21))
    assert all(len(curve.evaluations) > 2 for curve in data.curves)


def test_what_is_only_odd_is_named_and_imported(directory, tmp_path):
    source = copy_of(directory, tmp_path / "a", f"{CNN}/sgd/8")
    search = source / CNN / "sgd" / "8"
    (search / "1" / "measurements.csv").write_bytes(
        b"step,val/classification_error,comment\r\n"
        b"0,0.5,start\r\n\r\n2,,\r\n1.0,inf,\r\n3,nan,\r\n4,-Infinity,end"
    )
    (search / "2" / "measurements.csv").write_bytes(b"step,test/new_metric\n")
    (search / "3" / "metadata.json").write_text('{"status": "COMPLETE", "trial_id": 99}')
    (search / "notes.txt").write_text("seen")
    (search / "007").mkdir()
    (source / CNN / "sgd" / "last").mkdir()
    (source / CNN / "sgd" / "last" / "study.json").write_text("{}")
    (search / "study.json").write_text("{")
    report = import_archive(source, tmp_path / "out")
    named = sorted(problem.path.removeprefix(f"{source}/{CNN}/") for problem in report.problems)
    assert named == [
        "sgd/8/007",
        "sgd/8/1/measurements.csv",
        "sgd/8/3/metadata.json",
        "sgd/8/notes.txt",
        "sgd/8/study.json",
        "sgd/last",
    ]
    assert report.trials == 20
    data = read_archive(tmp_path / "out")[SearchKey(curve="sgd", global_batch=8, repeat=0)]
    assert [e.step for e in data.curves[0].evaluations] == [0, 1, 2, 3, 4]
    values = [e.metrics[ERROR].value for e in data.curves[0].evaluations if e.metrics]
    np.testing.assert_array_equal(values, [0.5, math.inf, math.nan, -math.inf])
    assert data.curves[1].evaluations == []
    assert data.end is None


def test_a_search_without_study_json_has_the_names_of_its_path(archive, directory, tmp_path):
    path = "mnist_subsets/mnist_6875/fc_1024/sgd/8"
    source = copy_of(directory, tmp_path / "a", path)
    (source / path / "study.json").unlink()
    report = import_archive(source, tmp_path / "out")
    assert [problem.path for problem in report.problems] == [f"{source / path}/study.json"]
    assert archived_studies(tmp_path / "out") == ["mnist_subsets/mnist_6875/fc_1024"]
    found = queries.steps_to_result(queries.load_columns(tmp_path / "out"), goals(archive))
    assert answers(found) == {path: truth(archive)[path]}


def test_nothing_to_import(tmp_path, imported, directory):
    with pytest.raises(UsageError, match="no such directory"):
        import_archive(tmp_path / "none", tmp_path / "out")
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match=r"study\.json"):
        import_archive(tmp_path / "a", tmp_path / "out")
    with pytest.raises(UsageError, match="it exists"):
        import_archive(directory, imported[0])
    assert not (tmp_path / "out").exists()
    (tmp_path / "half" / "tables.partial").mkdir(parents=True)
    with pytest.raises(UsageError, match="cut off"):
        import_archive(directory, tmp_path / "half")
    with pytest.raises(UsageError, match="import one there"):
        queries.load_columns(tmp_path)


def test_an_import_that_fails_leaves_nothing(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ShoalError, match="import process failed"):
        import_archive(directory, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_batches_are_cut_anywhere(directory, tmp_path, monkeypatch):
    """Small batches: many parts, trials of one search in several of them, each with its own columns."""
    import_archive(copy_of(directory, tmp_path / "a", CNN), tmp_path / "out", processes=1)
    monkeypatch.setattr(archive_part, "BATCH_BYTES", 5000)
    with duckdb.connect() as connection:
        expected = all_rows(connection, tmp_path / "out" / "tables" / "evaluations-*.parquet")
        share = archive_part.Share(tmp_path, tmp_path)
        place = 0
        for optimizer in ("momentum", "nesterov_momentum", "sgd"):
            for batch in sorted(2**i for i in range(1, 16, 2)):
                path = tmp_path / "a" / CNN / optimizer / str(batch)
                share.search(0, path, list(range(1, 21)), place)
                place += 20
        share.close()
        parts = list(tmp_path.glob("evaluations-*.parquet"))
        assert len(parts) > 50
        assert all_rows(connection, tmp_path / "evaluations-*.parquet") == expected


def all_rows(connection, pattern):
    columns = (
        '"val/classification_error", "train/cross_entropy_error", "val/cross_entropy_error kind"'
    )
    query = f"SELECT place, step, {columns} FROM read_parquet(?, union_by_name = true) ORDER BY ALL"
    return repr(connection.execute(query, [str(pattern)]).fetchall())


def test_the_released_counts():
    """Section 4.4 of the notes: searches, trials by status, values."""
    archive = released_archive()
    assert len(archive) == RELEASED_SEARCHES
    plan = archive._plan
    statuses = np.concatenate([status for _, _, status, _ in plan])
    names, counts = np.unique(statuses, return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "COMPLETE": 108_194,
        "INCOMPLETE": 43_508,
        "INFEASIBLE": 42_697,
    }
    values = sum(int(rows.sum()) * len(workload.columns) for workload, _, _, rows in plan)
    assert values == RELEASED_VALUES
    assert len({workload.path for workload in archive.workloads}) == 35
