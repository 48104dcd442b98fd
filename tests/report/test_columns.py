"""What is read out of a run directory: the committed lineage, presence of workers, counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.report.columns import count_samples, number
from shoal.report.run import load_run
from shoal.report.series import held, ramps, sample_range, smoothed, thin, throughput


def step(begin: int, end: int, epoch: int = 0) -> dict:
    return {"from": begin, "to": end, "epoch": epoch}


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([step(0, 8), step(8, 16)], (16, 0, 0)),
        ([step(0, 8), step(6, 16)], (18, 2, 0)),
        ([step(0, 8), step(10, 16)], (14, 0, 2)),
        # Positions of the whole run, and positions that begin anew in every epoch.
        ([step(0, 8), step(8, 10), step(10, 18, 1), step(18, 20, 1)], (20, 0, 0)),
        ([step(0, 8), step(8, 10), step(0, 8, 1), step(8, 10, 1)], (20, 0, 0)),
        ([step(0, 8), step(8, 10), step(3, 10, 1)], (17, 0, 3)),
        # A run that was resumed: nothing is said about what came before.
        ([step(40, 48), step(48, 56)], (16, 0, 0)),
    ],
)
def test_samples_are_counted_from_positions(
    chain: list[dict], expected: tuple[int, int, int]
) -> None:
    assert tuple(count_samples(chain).values()) == expected


def test_rows_without_positions_say_nothing_about_samples() -> None:
    assert count_samples([{"step": 1}]) == {}
    assert count_samples([]) == {}


def test_numbers_are_read_and_everything_else_is_nan() -> None:
    assert number(3) == 3.0
    assert number("inf") == math.inf
    assert all(math.isnan(number(value)) for value in (None, True, "3", [], "nan"))


def test_only_the_committed_lineage_counts(make_run) -> None:
    made = make_run(total=4_000, script=((0.0, "", ("w0", "w1"), 0.0),))
    path = made.directory / "metrics" / "w1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # A worker that committed a step which nobody else kept, and then adopted its peers' state.
    lost = {**rows[10], "row": "lost", "commits": 11, "loss": 99.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:10], lost, *rows[11:]]))
    run = load_run(made.directory)
    assert len(run.steps) == len(made.steps)
    assert np.nanmax(run.steps.loss) < 99.0
    assert {worker.name: worker.steps for worker in run.workers} == {
        "w0": len(made.steps),
        "w1": len(made.steps) - 1,
    }
    assert [len(worker.spells) for worker in run.workers] == [1, 2]


def test_workers_come_and_go_as_the_events_say(make_run) -> None:
    made = make_run()
    run = load_run(made.directory)
    by_name = {worker.name: worker for worker in run.workers}
    for name, worker in by_name.items():
        assert worker.steps == sum(name in row["workers"] for row in made.steps)
    assert by_name["w0"].came == "from the start"
    assert by_name["w0"].went.startswith("left at step")
    assert by_name["w2"].came == f"joined at step {made.events[0]['step']}"
    assert by_name["w2"].went == f"killed at step {made.events[2]['step']}"
    assert by_name["w3"].went == "present at the end"
    assert sum(worker.samples for worker in run.workers) == made.steps[-1]["samples"]


def test_a_torn_line_is_left_out_and_said(make_run) -> None:
    made = make_run(total=3_000, script=((0.0, "", ("w0",), 0.0),))
    path = made.directory / "metrics" / "w0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = load_run(made.directory)
    assert len(run.steps) == len(made.steps) - 1
    assert any("w0.jsonl" in note and "torn" in note for note in run.notes)


def test_broken_documents_become_notes(make_run) -> None:
    made = make_run(total=1_000, script=((0.0, "", ("w0",), 0.0),))
    (made.directory / "run.json").write_text("{not json")
    (made.directory / "summary.json").write_text("[1]")
    run = load_run(made.directory)
    assert not run.config
    assert not run.summary
    assert any("run.json" in note for note in run.notes)
    assert any("summary.json is not a JSON object" in note for note in run.notes)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds none of events\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        load_run(tmp_path / "nowhere")


def test_held_keeps_the_corners_and_nothing_else(make_run) -> None:
    made = make_run()
    run = load_run(made.directory)
    x, y = held(run, run.steps.workers)
    assert y.tolist() == [1, 1, 3, 3, 4, 4, 3, 3, 2, 2]
    corners = [event["samples"] for event in made.events]
    assert x[0::2].tolist() == [0, *corners]
    assert x[1::2].tolist() == [*corners, made.steps[-1]["samples"]]


def test_ramps_begin_at_joins_and_end_where_the_target_is_reached(make_run) -> None:
    made = make_run()
    run = load_run(made.directory)
    found = ramps(run)
    joins = [event for event in made.events if event["kind"] == "join"]
    assert [begin for begin, _ in found] == [event["samples"] for event in joins]
    for (_, end), event in zip(found, joins, strict=True):
        assert end == made.steps[event["ramp_end_step"] - 1]["samples"]


def test_thin_keeps_spikes_and_ends() -> None:
    x = np.arange(100_000, dtype=float)
    y = np.sin(x / 9_000)
    y[71_234] = 50.0
    y[500:700] = np.nan
    thin_x, thin_y = thin(x, y, 1_000)
    assert len(thin_x) <= 1_100
    assert 50.0 in thin_y
    assert thin_x[0] == 0.0
    assert thin_x[-1] == x[-1]


def test_smoothed_is_a_mean_of_the_finite_values() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, np.inf, np.nan, np.nan, np.nan])
    mean = smoothed(values, 3)
    assert mean[:5].tolist() == [1.5, 1.5, 3.0, 4.0, 4.0]
    assert np.isnan(mean[6])


def test_throughput_is_samples_over_time(make_run) -> None:
    made = make_run(total=6_400, script=((0.0, "", ("w0",), 0.0),), evaluate=False)
    run = load_run(made.directory)
    _, rate = throughput(run)
    assert rate == pytest.approx(64 / 0.13, rel=1e-3)
    low, high = sample_range(run)
    assert (low, high) == (0.0, 6_400.0)
