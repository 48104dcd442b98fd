"""``shoal simulate``: recipes, their mistakes, and what is written."""

import json
import tomllib
from pathlib import Path

import pytest
import typer

from shoal.cli import simulate
from shoal.errors import UsageError
from shoal.world.virtual.recipe import read_recipe, recipe_from

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = """
name = "small"
workload = "digits_tiny"
workers = 3
local_batch = 4
samples = 1200
models = ["leader", "mean"]
rule = { name = "leader", sync_every = 8 }
optimizer = { name = "sgd", lr = 0.1 }
slowdowns = { 2 = 3.0 }

[target]
metric = "classification_error"
value = 0.9

[[events]]
kind = "join"
at_samples = 300

[[faults]]
worker = 1
kind = "flip"

[[runs]]
name = "fixed"

[[runs]]
name = "averaged"
rule = { name = "local_sgd", sync_every = 8 }
trigger = "total-count"
"""


def invoke(arguments):
    """The verb as the command line registers it; (exit status, stdout, stderr)."""
    from typer.testing import CliRunner

    app = typer.Typer()
    simulate.register(app)
    app.callback()(lambda: None)
    found = CliRunner().invoke(app, ["simulate", *arguments])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_it_runs_says_so_and_writes_a_page_that_needs_nothing_else(recipe, tmp_path):
    out = tmp_path / "out"
    status, said, log = invoke([str(recipe), "--out", str(out)])
    assert status == 0
    assert "simulating fixed" in log
    lines = said.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["fixed", "averaged", "report"]
    assert all("(simulated)" in line for line in lines[:2])
    page = (out / "report.html").read_text()
    assert page.count("simulated") > 5
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")
    for figure in ("error", "idle", "membership"):
        assert f'id="figure-{figure}"' in page
        drawn = (out / "figures" / f"{figure}.svg").read_text()
        assert drawn.startswith("<svg") and "xmlns" in drawn[:400]
        assert len((out / "figures" / f"{figure}.csv").read_text().splitlines()) > 3
    assert "classification error ≤ 0.9" in page


def test_json_is_one_document_that_says_it_is_simulated(recipe, tmp_path):
    status, said, _ = invoke([str(recipe), "--out", str(tmp_path / "out"), "--json"])
    assert status == 0
    document = json.loads(said)
    assert document["simulated"] is True
    assert list(document["runs"]) == ["fixed", "averaged"]
    fixed = document["runs"]["fixed"]
    assert "simulated" in fixed["simulated"]
    assert fixed["drawn"] == fixed["used"] + fixed["discarded"] + fixed["pending"]
    assert fixed["settings"]["rule"] == {"name": "leader", "sync_every": 8}
    assert len(fixed["workers"]) == 4
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["runs"] == document["runs"]


def test_the_default_directory_is_named_after_the_recipe(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke([str(recipe)])[0] == 0
    assert (tmp_path / "simulations" / "small" / "report.html").is_file()


def test_a_single_run_is_drawn_with_all_its_models(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(SMALL[: SMALL.index("[[runs]]")])
    status, said, _ = invoke([str(path), "--out", str(tmp_path / "out")])
    assert status == 0
    assert said.startswith("leader:")
    table = (tmp_path / "out" / "figures" / "error.csv").read_text()
    assert "leader" in table and "mean" in table


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("simulate_*.toml")), ids=lambda p: p.stem)
def test_examples_are_recipes(example):
    found = read_recipe(example)
    assert len(found.setups) >= 3


BAD = [
    ({"workers": 4}, "workload = None"),
    ({"workload": "digits_tiny"}, "rule = missing"),
    ({"workload": "digits_tiny", "rule": {"name": "independent"}}, "samples = missing"),
    ({"workers": "four"}, "workers = 'four'; it is a whole number"),
    ({"worker": 4}, "did you mean workers?"),
    ({"rule": {"name": "lead"}}, "there is no such rule"),
    ({"rule": {"name": "leader", "sync": 4}}, "no such setting"),
    ({"rule": {"name": "leader", "pull": 1.5}}, "pull = 1.5"),
    ({"rule": "leader"}, "it is a table"),
    ({"optimizer": {"name": "lars"}}, "kind = 'lars'"),
    ({"optimizer": {"rate": 0.1}}, "unknown key of optimizer"),
    ({"schedule": {"name": "cosine", "floor": 3}}, "floor"),
    ({"network": {"inter": {"latency_seconds": -1.0, "bytes_per_second": 1.0}}}, "latency_seconds"),
    ({"slowdowns": {"x": 2.0}}, "slowdowns of worker 'x'"),
    ({"slowdowns": {"9": 2.0}}, "slowdowns of worker 9"),
    ({"faults": [{"kind": "flip"}]}, "give its worker"),
    ({"faults": [{"worker": 0, "kind": "sleep"}]}, "kind = 'sleep'"),
    ({"events": {"kind": "join"}}, "it is a list"),
    ({"target": {"metric": "accuracy", "value": 0.1}}, "target metric = 'accuracy'"),
    ({"target": {"metric": "accuracy"}}, "it has a metric and a value"),
    ({"runs": []}, "runs = []"),
    ({"runs": [{"name": "a"}, {"name": "a"}]}, "two of the name"),
    ({"groups": 2}, "groups = 2 with 3 workers"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_a_mistake_in_a_recipe_is_one_clear_line(changes, message):
    if "workload" in changes or "missing" in message or "workload" in message:
        table = changes
    else:
        common = {"workload": "digits_tiny", "workers": 3, "samples": 100}
        table = common | {"rule": {"name": "independent"}} | changes
    with pytest.raises(UsageError) as caught:
        recipe_from(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["workers = ", None])
def test_a_file_that_is_no_recipe_ends_with_status_2_and_nothing_written(text, tmp_path):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    status, said, log = invoke([str(path), "--out", str(tmp_path / "out")])
    assert status == 2
    assert said == ""
    assert len(log.strip().splitlines()) == 1 and "bad.toml" in log
    assert not (tmp_path / "out").exists()


def test_a_recipe_names_workers_in_lists_and_its_links():
    table = tomllib.loads(
        SMALL
        + """
[network]
workers_per_node = 2
inter = { latency_seconds = 1e-3, bytes_per_second = 1e6 }
"""
    )
    table["faults"] = [{"workers": [0, 2], "kind": "frozen"}]
    found = recipe_from(table).setups["fixed"]
    assert sorted(found.faults) == [0, 2]
    assert found.resolved_network.inter.latency_seconds == 1e-3
    assert found.resolved_network.node(2) == 1
