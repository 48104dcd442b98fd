"""What counts as trained: the chain behind the newest state, and what it covers."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.fleet.supervisor.lineage import committed, coverage
from shoal.fleet.supervisor.summary import build, write_json
from shoal.ledger.journal import Journal


def row(name, parent, commits, first, last, time=0.0):
    return {
        "row": name,
        "parent_row": parent,
        "commits": commits,
        "epoch": 0,
        "from": first,
        "to": last,
        "time": time,
    }


def ids(rows, **options):
    return [r["row"] for r in committed(rows, **options)]


def test_rows_of_several_workers_count_once():
    rows = [row("a", None, 1, 0, 8), row("b", "a", 2, 8, 16)]
    assert ids([*rows, *rows, *rows]) == ["a", "b"]
    assert coverage(committed(rows + rows), 16) == (16, 0, 0)


def test_a_branch_that_was_overwritten_does_not_count():
    rows = [
        row("a", None, 1, 0, 8),
        row("lost", "a", 2, 8, 16, time=5.0),
        row("b", "a", 2, 8, 12, time=6.0),  # the survivors' own way from a on
        row("c", "b", 3, 12, 16, time=7.0),
    ]
    assert ids(rows) == ["a", "b", "c"]


def test_of_equally_long_branches_the_latest_counts():
    rows = [row("a", None, 1, 0, 8), row("x", "a", 2, 8, 16, 1.0), row("y", "a", 2, 8, 16, 2.0)]
    assert ids(rows) == ["a", "y"]
    assert ids(reversed(rows)) == ["a", "y"]


def test_commits_without_a_row_do_not_break_the_chain():
    assert ids([row("a", None, 1, 0, 8), row("b", "a", 5, 8, 16)]) == ["a", "b"]


def test_steps_that_no_checkpoint_held_are_forgotten_after_a_new_start():
    rows = [
        row("a", None, 1, 0, 8, 1.0),
        row("b", "a", 2, 8, 16, 2.0),
        row("c", "b", 3, 16, 24, 3.0),
    ]
    again = [*rows, row("d", "a", 2, 8, 16, 10.0)]  # resumed from a checkpoint after a
    assert ids(again) == ["a", "b", "c"]
    assert ids(again, since=9.0) == ["a", "d"]
    assert ids(rows, since=9.0) == ["a", "b", "c"]  # nothing trained since: all as it was


def test_no_rows_are_no_history():
    assert committed([]) == []
    assert coverage([], None) == (0, 0, 0)
    assert coverage([], 10) == (0, 0, 10)


def test_a_cycle_ends():
    assert ids([row("a", "b", 1, 0, 8), row("b", "a", 2, 8, 16)]) == ["a", "b"]


def test_gaps_and_repeats_are_counted():
    chain = [row("a", None, 1, 0, 8), row("b", "a", 2, 6, 12), row("c", "b", 3, 20, 24)]
    assert coverage(chain, 30) == (16, 2, 14)
    assert coverage(chain, None) == (16, 2, 8)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12))
def test_coverage_agrees_with_counting_each_position(spans):
    chain = [row(i, None, i, a, a + n) for i, (a, n) in enumerate(spans)]
    counts = [0] * 100
    for a, n in spans:
        for position in range(a, a + n):
            counts[position] += 1
    used = sum(c > 0 for c in counts)
    assert coverage(chain, 100) == (used, sum(counts) - used, 100 - used)


def test_a_summary_is_made_of_the_files_alone(tmp_path):
    run = tmp_path / "r1"
    with Journal(run / "events.jsonl") as events:
        events.append({"kind": "start", "time": 100.0})
        events.append({"kind": "worker_started", "time": 100.0, "worker": "w0"})
        events.append({"kind": "join", "time": 101.0, "step": 1, "worker": "w0", "names": ["w1"]})
        events.append({"kind": "respawn", "time": 102.0, "worker": "w1"})
        lost = {"kind": "worker_exited", "time": 103.0, "worker": "w2", "code": 1}
        events.append({**lost, "survivor": True})
        events.append({"kind": "evaluate", "time": 104.0, "worker": "w0", "scores": {"acc": 0.5}})
        events.append({"kind": "worker_exited", "time": 105.0, "worker": "w0", "code": 0})
        events.append({"kind": "end", "time": 106.5, "total_samples": 20})
        events.append({"kind": "start", "time": 500.0})  # resumed much later, for a second
        events.append({"kind": "end", "time": 501.0, "total_samples": 20})
    for name in ("w0", "w1"):
        with Journal(run / "metrics" / f"{name}.jsonl") as metrics:
            metrics.append({**row("a", None, 1, 0, 8, 101.0), "loss": 2.0})
            metrics.append({**row("b", "a", 2, 8, 16, 102.0), "loss": float("nan")})
    summary = build(run, 75)
    write_json(run / "summary.json", summary)
    assert "NaN" not in (run / "summary.json").read_text()
    assert summary["seconds"] == 7.5
    assert (summary["steps"], summary["samples_expected"], summary["samples_used"]) == (2, 20, 16)
    assert (summary["samples_repeated"], summary["samples_missed"]) == (0, 4)
    assert (summary["restarts_of_survivors"], summary["respawns"]) == (1, 1)
    assert summary["events"] == [{"kind": "join", "time": 101.0, "step": 1, "names": ["w1"]}]
    assert summary["workers"] == {"w0": 0, "w2": 1}
    assert len(summary["evaluations"]) == 1
    assert (summary["resumable"], summary["exit_code"]) == (True, 75)


def test_a_run_without_any_files_has_a_summary_too(tmp_path):
    summary = build(tmp_path, 1)
    assert (summary["steps"], summary["samples_expected"], summary["events"]) == (0, None, [])
