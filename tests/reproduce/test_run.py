"""The verb from the command line to its files, at a size that takes seconds."""

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from shoal.cli.reproduce import register
from shoal.reproduce.dynamic import long, run, tier1, tier2
from shoal.reproduce.dynamic.tier2 import DigitsSettings
from shoal.reproduce.progress import Progress
from shoal.workloads.digits_mlp import load_digits_task

TINY = DigitsSettings(seeds=(41, 42), epochs=4, epoch_samples=256, short_epochs=(4,))
runner = CliRunner()


@pytest.fixture(scope="module")
def measured() -> tuple[tier1.Responses, tier2.DigitsRows]:
    """Tier 1 as it is and tier 2 in small, for all tests that look at what comes after."""
    progress = Progress(tier2.total_work(TINY), stream=io.StringIO())
    return tier1.run_tier1(), tier2.run_tier2(load_digits_task(), TINY, progress)


@pytest.fixture
def tiny(
    monkeypatch: pytest.MonkeyPatch, measured: tuple[tier1.Responses, tier2.DigitsRows]
) -> pytest.MonkeyPatch:
    """Few and short trainings, made-up images, and the tiers that were measured once."""
    labels = torch.arange(60) % 10
    pixels = torch.randn(60, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images = long.Images(
        train=pixels[:32], train_labels=labels[:32], test=pixels[32:], test_labels=labels[32:]
    )
    monkeypatch.setattr(run.Options, "digits", lambda self: TINY)
    monkeypatch.setattr(run, "load_images", lambda: images)
    monkeypatch.setattr(run, "LongSettings", lambda: long.LongSettings(epochs=2, block_epochs=1))
    monkeypatch.setattr(tier1, "run_tier1", lambda: measured[0])
    monkeypatch.setattr(tier2, "run_tier2", lambda task, settings, progress: measured[1])
    return monkeypatch


def call(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    register(app)
    result = runner.invoke(app, ["reproduce", "dynamic", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_everything_is_written_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run.Options, "digits", lambda self: TINY)
    code, shown, logs = call("--quick", "--out", str(tmp_path / "d"))
    assert code == 0
    assert "not run" in shown and "report.html" in shown and "Caveats" in shown
    assert "100%" in logs and "100%" not in shown
    names = {str(path.relative_to(tmp_path / "d")) for path in (tmp_path / "d").rglob("*.*")}
    assert names == {
        "result.json",
        "report.html",
        "figures/quadratic.svg",
        "figures/spikes.svg",
        "figures/accuracies.svg",
        "figures/short.svg",
    }
    document = json.loads((tmp_path / "d" / "result.json").read_text())
    verdicts = {claim["id"]: claim["verdict"] for claim in document["claims"]}
    assert [verdicts[f"T{n}"] for n in range(1, 7)] == ["shown"] * 6
    assert [verdicts[f"D{n}"] for n in range(1, 5)] == ["not run"] * 4
    assert [verdicts[f"L{n}"] for n in range(1, 5)] == ["not run"] * 4
    assert "2" in document["not_run"]["D1"] and "--long" in document["not_run"]["L1"]
    assert document["environment"]["command"] == "shoal reproduce dynamic --quick"
    assert len(document["raw"]["digits"]) == 11
    assert all(len(row["accuracy"]) == 2 for row in document["raw"]["digits"].values())
    page = (tmp_path / "d" / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 4 and "http" not in page.split("<body>")[0]


def test_json_is_one_document_on_stdout(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, shown, _ = call("--json", "--out", str(tmp_path))
    assert code == 0
    assert json.loads(shown) == json.loads((tmp_path / "result.json").read_text())


def test_strict_exits_3_exactly_when_a_claim_is_not_shown(
    tiny: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, shown, _ = call("--json", "--strict", "--out", str(tmp_path))
    verdicts = [claim["verdict"] for claim in json.loads(shown)["claims"]]
    assert code == (3 if "not shown" in verdicts else 0)
    real = run.criteria.judge_tier1
    tiny.setattr(run.criteria, "judge_tier1", lambda peaks: real(replace(peaks, linear=1.0)))
    assert call("--json", "--strict", "--out", str(tmp_path))[0] == 3
    assert call("--json", "--out", str(tmp_path))[0] == 0


def test_long_stops_in_order_and_goes_on(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, _, logs = call("--long", "--long-cells", "4", "--out", str(tmp_path))
    assert code == 75
    assert "4 of 15 long runs are finished" in logs
    document = json.loads((tmp_path / "result.json").read_text())
    assert len(document["raw"]["long"]) == 4
    assert "4 of 15" in document["not_run"]["L2"]
    code, shown, logs = call("--long", "--json", "--out", str(tmp_path))
    assert code == 0
    assert logs.count("kept from an earlier call") == 4
    verdicts = {claim["id"]: claim["verdict"] for claim in json.loads(shown)["claims"]}
    assert {verdicts[f"L{n}"] for n in range(1, 5)} <= {"shown", "not shown"}
    assert len(list((tmp_path / "long").iterdir())) == 15


def test_sigterm_in_a_long_run_keeps_what_is_finished(
    tiny: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, started = long.run_cell, []

    def killed_in_the_third(cell: long.LongCell, *rest: object, **more: object) -> object:
        started.append(cell.name)
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(cell, *rest, **more)  # type: ignore[arg-type]

    tiny.setattr(long, "run_cell", killed_in_the_third)
    before = signal.getsignal(signal.SIGTERM)
    code, _, logs = call("--long", "--out", str(tmp_path))
    assert code == 75 and "2 of 15" in logs and "run the same command again" in logs
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(list((tmp_path / "long").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seed-base", "-1"), "--seed-base = -1"),
        (("--long-cells", "2"), "add --long"),
        (("--long", "--long-cells", "0"), "at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, shown, logs = call(*arguments, "--out", str(tmp_path / "d"))
    assert code == 2
    assert said in logs and len(logs.strip().splitlines()) == 1
    assert shown == "" and not (tmp_path / "d").exists()


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("mine")
    code, _, logs = call("--out", str(tmp_path / "d"))
    assert code == 2 and "cannot be written" in logs
    assert (tmp_path / "d").read_text() == "mine"


def test_recorded_and_quick_seeds_are_apart() -> None:
    quick = run.Options(directory=Path("d"), is_quick=True).digits()
    recorded = run.Options(directory=Path("d")).digits()
    other = run.Options(directory=Path("d"), seed_base=5).digits()
    assert len(quick.seeds) == 4 and len(recorded.seeds) == len(other.seeds) == 16
    assert not set(quick.seeds) & set(recorded.seeds)
    assert other.seeds[:2] == (5, 6)
