"""The page: well-formed, self-contained, every panel there, its numbers those of the data."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import report as report_verb
from shoal.errors import UsageError
from shoal.report import write_run_report
from shoal.report.panels import PANELS
from shoal.report.run import load_run
from shoal.report.wording import clock, decimal, duration, headline

VOID = {"meta", "br", "link", "img", "hr", "input"}
ALONE = ((0.0, "", ("w0",), 0.0),)


class Page(HTMLParser):
    """Checks nesting and unique ids, and keeps texts by the id of the nearest element with one."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        if values.get("id"):
            self.ids.append(values["id"])
        self.links += [values[key] or "" for key in ("href", "src", "xlink:href") if key in values]
        if tag not in VOID:
            self.open.append((tag, values.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data


def read_page(directory: Path) -> tuple[str, Page]:
    path = write_run_report(directory)
    assert path == directory / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_is_well_formed_and_self_contained(make_run) -> None:
    text, page = read_page(make_run().directory)
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert not re.search(r"@import|url\((?!#)", text)
    assert all(link.startswith(("#", "data:text/csv;base64,")) for link in page.links)
    inner = {link[1:] for link in page.links if link.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert inner <= set(page.ids)


def test_every_panel_is_there_for_screen_and_phone(make_run) -> None:
    made = make_run()
    _, page = read_page(made.directory)
    for layout in ("wide", "narrow"):
        for panel in PANELS:
            assert f"{layout}-panel-{panel.name}" in page.ids
            assert page.texts[f"{layout}-title-{panel.name}"].strip() == panel.title
            for place in range(len(made.events)):
                assert any(
                    name.startswith(f"{layout}-event-{place}-panel-{panel.name}")
                    for name in page.ids
                )


def test_the_headline_says_what_the_data_says(make_run) -> None:
    made = make_run()
    _, page = read_page(made.directory)
    text = " ".join(page.texts["headline"].split())
    minutes, seconds = divmod(round(made.seconds), 60)
    workers = [len(row["workers"]) for row in made.steps]
    pause = max(event["seconds_without_progress"] for event in made.events)
    accuracy = made.evaluations[-1]["scores"]["accuracy"]
    assert f"Trained {made.steps[-1]['samples']:,} samples" in text
    assert f"on {min(workers)} to {max(workers)} workers" in text
    assert f"in {minutes} min {seconds} s" in text
    assert f"{len(made.events)} changes of membership, one unannounced" in text
    assert "every sample used exactly once per epoch" in text.lower()
    assert f"longest time without progress {pause:.2f} s" in text
    assert f"test accuracy {accuracy:.3g}" in text


def test_the_headline_follows_the_summary_where_samples_went_wrong(make_run) -> None:
    made = make_run(total=2_000, script=ALONE)
    path = made.directory / "summary.json"
    path.write_text(json.dumps(made.summary | {"samples_repeated": 12, "samples_missed": 3}))
    assert "12 samples repeated and 3 missed" in headline(load_run(made.directory))


def test_the_table_of_events_holds_their_numbers(make_run) -> None:
    made = make_run()
    text, page = read_page(made.directory)
    table = page.texts["events"]
    for event in made.events:
        assert f"{event['workers_before']} → {event['workers_after']}" in table
        assert f"{event['samples']:,}" in table
        assert duration(event["seconds_without_progress"]) in table
        assert ", ".join(event["names"]) in table
    assert "0.02 → 0.06" in table
    assert "7 checkpoints" in table
    assert text.count('class="kind join"') == 2
    assert text.count('class="kind kill"') == text.count('class="kind leave"') == 1


def test_comparison_accounts_and_configuration_are_shown(make_run) -> None:
    made = make_run()
    _, page = read_page(made.directory)
    assert "0.884" in page.texts["comparison"]
    assert "0.871" in page.texts["comparison"]
    assert f"{made.steps[-1]['samples']:,}" in page.texts["samples"]
    for word in ("SmallCNN", "351,210", "heavy_ball", "dynamic", "cosine", "2.13.0"):
        assert word in page.texts["configuration"]


def test_the_embedded_table_is_the_committed_steps(make_run) -> None:
    made = make_run()
    _, page = read_page(made.directory)
    (link,) = [link for link in page.links if link.startswith("data:")]
    text = base64.b64decode(link.partition(",")[2]).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["samples"]) for row in rows] == [row["samples"] for row in made.steps]
    assert [int(row["workers"]) for row in rows] == [len(row["workers"]) for row in made.steps]


def test_a_run_under_way_says_so(make_run) -> None:
    made = make_run(total=2_000, script=ALONE, summary=False)
    (made.directory / "control.json").write_text("{}")
    text, page = read_page(made.directory)
    assert "not finished" in text
    assert "The run is still going" in text
    assert page.texts["headline"].startswith("Trained so far: 2,000 samples on one worker")


@pytest.mark.parametrize("broken", [lambda step: math.nan, lambda step: 1.0 if step < 9 else None])
def test_losses_that_are_not_finite_are_drawn_and_said(make_run, broken) -> None:
    made = make_run(losses=broken)
    text, page = read_page(made.directory)
    assert "The training loss is not finite at" in text
    assert "wide-not-finite" in page.ids


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    text, page = read_page(tmp_path)
    assert page.texts["headline"] == "No step has been committed."
    assert "overview" not in page.ids
    assert "The membership did not change." in text


def test_a_single_step_has_a_page(make_run) -> None:
    made = make_run(total=64, script=ALONE, evaluate=False)
    _, page = read_page(made.directory)
    assert "Trained 64 samples on one worker" in page.texts["headline"]
    assert "too few steps to tell a rate" in page.texts["wide-panel-throughput"]
    assert "nothing has been evaluated" in page.texts["wide-panel-scores"]


def test_light_events_and_strange_values_do_not_break_the_page(make_run) -> None:
    made = make_run(total=4_000, script=ALONE)
    with (made.directory / "events.jsonl").open("a") as stream:
        for row in (
            {"kind": "hang", "time": made.steps[5]["time"], "names": ["w<0>"]},
            {"kind": "coordinator_restarted", "step": 12},
            {"kind": "fleet_lost", "step": 14},
            {"kind": "resume"},
            {"kind": "kill", "names": None, "lr": "nan", "workers_before": 2},
            {"kind": "evaluate", "scores": None},
            {"kind": "something else"},
        ):
            stream.write(json.dumps(row) + "\n")
    text, page = read_page(made.directory)
    assert "w&lt;0&gt;" in text
    assert "coordinator restarted" in page.texts["events"]
    assert any(name.startswith("wide-event-") for name in page.ids)


def test_a_long_run_stays_small(make_run) -> None:
    made = make_run(total=42_000, local_batch=2, script=ALONE, evaluate=False)
    assert len(made.steps) == 21_000
    text, _ = read_page(made.directory)
    assert "(every 2 steps)" in text
    assert len(text) < 2_500_000


def test_writing_twice_replaces_the_page_and_leaves_nothing_else(make_run) -> None:
    made = make_run(total=2_000, script=ALONE)
    before = {path.name for path in made.directory.iterdir()} | {"report.html"}
    write_run_report(made.directory)
    write_run_report(made.directory)
    assert {path.name for path in made.directory.iterdir()} == before


def test_a_directory_that_is_no_run_is_refused_and_stays_untouched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run directory"):
        write_run_report(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.344, "0.34 s"),
        (4.16, "4.2 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (171, "2 min 51 s"),
        (3_599.8, "1 h 0 min"),
        (11_100, "3 h 5 min"),
        (200_000, "2 d 8 h"),
        (math.nan, "an unknown time"),
    ],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_in_words() -> None:
    assert [decimal(value) for value in (0.0, 0.05, 1e-5, 1234.5, 1e7, math.nan)] == [
        "0",
        "0.05",
        "1e-05",
        "1,234",
        "10,000,000",
        "–",
    ]
    assert [clock(value) for value in (31, 3727, math.inf)] == ["0:31", "1:02:07", "–"]


def verb(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda: None)
    report_verb.register(app)
    return CliRunner().invoke(app, ["report", *arguments])


def test_the_verb_writes_and_prints_the_path(make_run) -> None:
    made = make_run(total=2_000, script=ALONE)
    result = verb(str(made.directory))
    assert result.exit_code == 0
    assert result.stdout.strip() == str(made.directory / "report.html")
    result = verb(str(made.directory), "--json")
    document = json.loads(result.stdout)
    assert document["report"] == str(made.directory / "report.html")
    assert document["headline"] == headline(load_run(made.directory))


def test_the_verb_refuses_what_is_no_run_in_one_line(tmp_path: Path) -> None:
    result = verb(str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("shoal report: RUN = ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
