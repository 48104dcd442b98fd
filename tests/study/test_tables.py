"""What the analysis reads: one attempt per trial, the newest segment per step, values as measured."""

import math

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.ledger.study_rows import StudyWriter
from shoal.study.records import Curve, Evaluation, Goal, Measured, Outcome, SearchKey, Trial
from shoal.study.tables import SearchData, StudyTables, read_study

KEY = SearchKey(curve="sgd", global_batch=8, repeat=0)
ERROR = "val/classification_error"


def trial(number, key=KEY):
    return Trial(
        search=key,
        id=number,
        unit=(0.25, 0.5),
        parameters={"lr": 0.1, "momentum": 0.9},
        seed=2**63 - 1,
        address="ab",
    )


def point(step, value, bound="=", diverged=False):
    return Evaluation(step=step, metrics={ERROR: Measured(value, bound)}, diverged=diverged)


def write(path, *rows, segment=0):
    """Rows as (trial, attempt, evaluation), or (trial, attempt) for the beginning of an attempt."""
    with StudyWriter(path) as writer:
        for number, attempt, *evaluation in rows:
            if evaluation:
                writer.evaluation(KEY, number, evaluation[0], attempt=attempt, segment=segment)
            else:
                writer.trial(trial(number), attempt=attempt, engine="pool", segment=segment)


def values(directory, number=0):
    curve = read_study(directory).curve(KEY, number)
    return [(e.step, e.metrics[ERROR].value) for e in curve.evaluations]


def test_everything_comes_back(tmp_path):
    curve = Curve(
        evaluations=[
            Evaluation(step=0, metrics={ERROR: Measured(0.9), "test/x~/y": Measured(math.inf)}),
            Evaluation(step=2, metrics={ERROR: Measured(0.1 + 0.2, ">=")}),
            Evaluation(step=4, metrics={}, diverged=True),
        ]
    )
    with StudyWriter(tmp_path / "rows" / "r.jsonl") as writer:
        writer.trial(trial(7), attempt="aa", engine="vmap")
        for evaluation in curve.evaluations:
            writer.evaluation(KEY, 7, evaluation, attempt="aa")
        writer.outcome(KEY, 7, Outcome.DIVERGED, 4, attempt="aa")
        writer.search(KEY, "done", end=4, draws=1)
    tables = read_study(tmp_path)
    assert list(tables) == [
        SearchData(
            key=KEY,
            trials=[trial(7)],
            curves=[curve],
            outcomes=[Outcome.DIVERGED],
            engines=["vmap"],
            attempts=["aa"],
            end=4,
            state="done",
            draws=1,
        )
    ]
    assert tables.curves() == ["sgd"]
    assert tables.batches("sgd") == [8]
    assert tables.repeats("sgd", 8) == [tables[KEY]]


def test_two_attempts_are_never_spliced(tmp_path):
    """The given-up attempt went further and crossed the goal; none of it may show."""
    write(
        tmp_path / "rows" / "a.jsonl",
        (0, "old"),
        (0, "old", point(0, 0.9)),
        (0, "old", point(1, 0.2)),
        (0, "old", point(2, 0.001)),
    )
    write(
        tmp_path / "rows" / "b.jsonl",
        (0, "new"),
        (0, "new", point(0, 0.8)),
        (0, "new", point(1, 0.7)),
        segment=1,
    )
    assert values(tmp_path) == [(0, 0.8), (1, 0.7)]
    assert read_study(tmp_path)[KEY].crossings(Goal(metric=ERROR, value=0.1)) == [None]


def test_what_a_replaced_owner_writes_late_does_not_count(tmp_path):
    """Its segment is smaller, though its rows are the newest."""
    write(tmp_path / "rows" / "b.jsonl", (0, "new"), (0, "new", point(0, 0.8)), segment=1)
    write(tmp_path / "rows" / "a.jsonl", (0, "old"), (0, "old", point(0, 0.1)), segment=0)
    assert values(tmp_path) == [(0, 0.8)]


def test_the_largest_segment_counts_at_each_step(tmp_path):
    """Resumed from step 1: steps 1 and 2 were measured twice, step 3 only before the kill."""
    first = [(0, "aa", point(step, 0.5 + step)) for step in range(4)]
    write(tmp_path / "rows" / "a.jsonl", (0, "aa"), *first)
    write(
        tmp_path / "rows" / "b.jsonl",
        (0, "aa", point(2, 0.2)),
        (0, "aa", point(1, 0.1)),
        segment=1,
    )
    assert values(tmp_path) == [(0, 0.5), (1, 0.1), (2, 0.2), (3, 3.5)]


def test_an_attempt_without_rows_yet_has_an_empty_curve(tmp_path):
    write(tmp_path / "rows" / "a.jsonl", (0, "old"), (0, "old", point(0, 0.5)))
    write(tmp_path / "rows" / "b.jsonl", (0, "new"), segment=1)
    data = read_study(tmp_path)[KEY]
    assert data.curves == [Curve()]
    assert data.outcomes == [None]
    assert data.draws == 1


def test_metrics_come_as_columns(tmp_path):
    write(
        tmp_path / "rows" / "a.jsonl",
        (0, "aa"),
        (2, "bb"),
        (2, "bb", point(5, math.nan)),
        (2, "bb", point(0, 0.25, ">=")),
        (0, "aa", point(0, -math.inf)),
        (0, "aa", Evaluation(step=3, metrics={"val/other": Measured(1.0)})),
    )
    tables = read_study(tmp_path)
    trials, steps, numbers, exact = tables.metric(KEY, ERROR)
    assert trials.tolist() == [0, 2, 2]
    assert steps.tolist() == [0, 0, 5]
    np.testing.assert_array_equal(numbers, [-math.inf, 0.25, math.nan])
    assert exact.tolist() == [True, False, True]
    assert tables.metric(KEY, "val/other").step.tolist() == [3]
    assert tables.metric(KEY, "val/none").value.size == 0
    in_memory = StudyTables.of(tables)
    for name in (ERROR, "val/other", "val/none"):
        for a, b in zip(tables.metric(KEY, name), in_memory.metric(KEY, name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_samples_are_those_of_the_attempt_that_counts(tmp_path):
    write(tmp_path / "rows" / "a.jsonl", (0, "new"), segment=1)
    wrong = np.array([True, False, False, True, True, False, True, False, True, True])
    with StudyWriter(tmp_path / "rows" / "b.jsonl") as writer:
        writer.samples(KEY, 0, 3, ERROR, ~wrong, attempt="old")
        writer.samples(KEY, 0, 4, ERROR, ~wrong, attempt="new")
        writer.samples(KEY, 0, 4, ERROR, wrong, attempt="new", segment=1)
    ((number, step, metric, found),) = read_study(tmp_path).samples(KEY)
    assert (number, step, metric) == (0, 4, ERROR)
    np.testing.assert_array_equal(found, wrong)


def test_a_study_without_rows_is_empty(tmp_path):
    (tmp_path / "study.json").write_text('{"format": 1, "a": 2}')
    tables = read_study(tmp_path)
    assert len(tables) == 0
    assert tables.spec == {"format": 1, "a": 2}
    with pytest.raises(KeyError):
        tables[KEY]
    with pytest.raises(UsageError, match="no such directory"):
        read_study(tmp_path / "none")


@pytest.mark.parametrize("damage", ["garbage\n", "[1,2]\n", '{"a":\n', "5\n"])
def test_damage_inside_a_journal_is_named(tmp_path, damage):
    path = tmp_path / "rows" / "a.jsonl"
    write(path, (0, "aa"), (0, "aa", point(0, 0.5)))
    with path.open("a") as file:
        file.write(damage)
    with pytest.raises(UsageError, match=r"a\.jsonl, line 4"):
        read_study(tmp_path)


def test_tables_refuse_what_does_not_fit_together():
    with pytest.raises(UsageError, match="one of each"):
        SearchData(key=KEY, trials=[trial(0)], curves=[], outcomes=[])
    with pytest.raises(UsageError, match="rising"):
        SearchData(
            key=KEY, trials=[trial(1), trial(0)], curves=[Curve(), Curve()], outcomes=[None, None]
        )
