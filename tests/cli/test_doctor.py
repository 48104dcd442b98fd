"""The doctor: every trap and warning, its line, and the exit status."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import doctor as doctor_verb
from shoal.errors import UsageError
from shoal.fleet.doctor import Check, Machine, examine, outlook, worst
from shoal.fleet.machine import answers, bind_error, look
from shoal.scaling import At, Dynamic

SOUND: dict[str, Any] = {
    "model": {"name": "SmallCNN", "parameters": 351_210, "batch_norm_layers": 2},
    "optimizer": {"kind": "heavy_ball", "lr": [0.02], "momentum": 0.9, "weight_decay": 5e-4},
    "scaling": {
        "name": "dynamic",
        "reference_batch": 64,
        "ramp_steps": "8r",
        "down": "at_once",
        "state": None,
    },
    "batch_policy": {"name": "proportional", "samples": None},
    "local_batch": 64,
    "micro_batch": 64,
    "global_batch": 128,
    "workers": 2,
    "samples": 55_000,
    "seed": 0,
    "precision": "fp32",
    "device": "cpu",
    "batch_norm": "worker",
    "deterministic": False,
    "versions": {"python": "3.11.7", "shoal": "0.1.0", "torch": "2.13.0+cpu", "torchft": "0.2.0"},
    "step": 100,
    "samples_seen": 12_800,
    "lr": 0.04,
    "lr_target": 0.04,
    "multiplier": 2.0,
    "schedule": "constant()",
}
MACHINE = Machine(
    python="3.11.7",
    system="linux",
    versions={"shoal": "0.1.0", "torch": "2.13.0", "torchft": "0.2.0"},
    cores=4,
    threads=1,
    free_bytes=10**11,
    now=1_800_000_000.0,
    newest=1_799_999_990.0,
)


def changed(**values: Any) -> dict[str, Any]:
    """The sound configuration with some entries replaced; objects are merged."""
    config = copy.deepcopy(SOUND)
    for key, value in values.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps(SOUND))
    return tmp_path


def examined(run_dir: Path, config: dict[str, Any], **facts: Any) -> list[Check]:
    (run_dir / "run.json").write_text(json.dumps(config))
    return examine(run_dir, machine=dataclasses.replace(MACHINE, **facts))


def found(checks: list[Check], name: str) -> Check:
    (check,) = [check for check in checks if check.name == name]
    return check


def test_a_sound_run_on_a_sound_machine_has_nothing_against_it(run_dir: Path) -> None:
    checks = examined(run_dir, SOUND)
    assert {check.level for check in checks} == {"ok"}
    assert worst(checks) == "ok"
    assert found(checks, "local batch").value == "64"
    assert found(checks, "global batch").value == "128 with 2 workers"
    assert found(checks, "torchft").value == "0.2.0, importable"


TRAPS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("torch of the run", {"versions": {"torch": "2.12.0"}}, {}, "2.12.0 in the run", "torch==2.12"),
    ("torchft of the run", {"versions": {"torchft": "0.1.9"}}, {}, "0.1.9", "torchft==0.1.9"),
    ("shoal of the run", {"versions": {"shoal": "9.0"}}, {}, "9.0 in the run, 0.1.0", "shoal==9.0"),
    (
        "torchft",
        {},
        {"versions": {**MACHINE.versions, "torchft": None}},
        "not installed",
        "pip install 'torchft",
    ),
    (
        "torchft",
        {"versions": {"torchft": "0.3.1"}},
        {"versions": {**MACHINE.versions, "torchft": "0.3.1"}},
        "0.3.1",
        "pip install 'torchft",
    ),
    ("torchft", {}, {"torchft_error": "ImportError: no lib"}, "no lib", "reinstall"),
    ("torch", {}, {"versions": {**MACHINE.versions, "torch": None}}, "not installed", "pip"),
    ("loopback port", {}, {"bind_error": "Permission denied"}, "Permission denied", "allow"),
    ("run directory", {}, {"writable": False}, "not writable", "permissions"),
    ("disk", {}, {"free_bytes": 1_000_000}, "1 MB free", "free some space"),
    (
        "control port",
        {},
        {"pid_alive": True, "reachable": {"control": False}},
        "not reachable",
        "firewall",
    ),
    ("micro batch", {"micro_batch": 128}, {}, "128, local batch = 64", "micro_batch=64"),
    ("batch norm", {"micro_batch": 1}, {}, "1 samples at a time", "GroupNorm"),
    (
        "batch norm",
        {"micro_batch": 1, "workers": 1, "batch_norm": "sync"},
        {},
        "sync, 2 layers, 1 samples",
        "larger micro_batch",
    ),
    ("scaling rule", {"optimizer": {"kind": "adamw"}}, {}, "dynamic for adamw", "SquareRoot"),
    ("scaling rule", {"optimizer": {"kind": "lion"}}, {}, "dynamic for lion", "Unscaled"),
    ("configuration", {"scaling": {"name": "magic"}}, {}, "'magic'", "choose one of"),
    ("configuration", {"local_batch": None}, {}, "local_batch = None", "another version"),
    ("configuration", {"batch_policy": {"name": "constant"}}, {}, "batch_policy", "version"),
    ("configuration", {"optimizer": {"lr": []}}, {}, "optimizer.lr", "missing"),
    ("lr", {"lr": float("nan")}, {}, "nan", "schedule"),
]


@pytest.mark.parametrize(("name", "config", "facts", "value", "fix"), TRAPS)
def test_every_trap_names_value_rule_and_fix(
    run_dir: Path,
    name: str,
    config: dict[str, Any],
    facts: dict[str, Any],
    value: str,
    fix: str,
) -> None:
    checks = examined(run_dir, changed(**config), **facts)
    check = found(checks, name)
    assert check.level == "trap" == worst(checks)
    assert value in check.value
    assert fix in check.line()
    assert "\n" not in check.line()
    assert [other.name for other in checks if other.level == "trap"] == [name]


WARNINGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("python of the run", {"versions": {"python": "3.12.1"}}, {}, "3.12.1 in the run"),
    ("threads", {}, {"threads": 4}, "OMP_NUM_THREADS=2"),
    ("disk", {}, {"free_bytes": 9_000_000}, "a checkpoint takes about 2.81 MB"),
    ("clock", {}, {"newest": MACHINE.now + 60}, "60 s behind"),
    ("clock", {}, {"now": 1_000.0, "newest": None}, "before 2025"),
    ("supervisor", {}, {"pid_alive": False}, "--resume"),
    (
        "coordinator port",
        {},
        {"pid_alive": True, "reachable": {"control": True, "coordinator": False}},
        "not reachable",
    ),
    ("batch norm", {"micro_batch": 4}, {}, "4 samples at a time"),
    ("batch norm", {"batch_norm": "ghost:4"}, {}, "ghost:4, 2 layers, 4 samples"),
    ("ghost size", {"batch_norm": "ghost:24"}, {}, 'batch_norm="ghost:16"'),
    ("ghost size", {"batch_norm": "ghost:100"}, {}, "100 in a micro-batch of 64"),
    (
        "unequal shares",
        {"batch_policy": {"name": "constant", "samples": 64}, "micro_batch": 16, "workers": 3},
        {},
        "16 to 32 samples",
    ),
    (
        "samples per worker",
        {
            "batch_policy": {"name": "constant", "samples": 64},
            "workers": 3,
            "micro_batch": 32,
            "batch_norm": "sync",
        },
        {},
        "1 of 3 workers",
    ),
    ("steps per epoch", {"samples": 100}, {}, "the training set has 100"),
    ("range, 2 workers", {"scaling": {"reference_batch": 7}}, {}, "tested only up to"),
    ("range, 3 workers", {"scaling": {"reference_batch": 11}}, {}, "reference_batch = 11"),
    ("reference batch", {"scaling": {"name": "unscaled"}}, {}, "the learning rate does not"),
]


@pytest.mark.parametrize(("name", "config", "facts", "text"), WARNINGS)
def test_every_warning_says_what_to_know(
    run_dir: Path, name: str, config: dict[str, Any], facts: dict[str, Any], text: str
) -> None:
    checks = examined(run_dir, changed(**config), **facts)
    check = found(checks, name)
    assert check.level == "warn" == worst(checks)
    assert text in check.line()
    assert check.rule
    assert check.fix


def test_an_old_style_missing_reference_is_refused_by_the_rule(run_dir: Path) -> None:
    config = changed()
    del config["scaling"]["reference_batch"]
    check = found(examined(run_dir, config), "configuration")
    assert check.level == "trap"
    assert "reference_batch" in check.line()


def test_without_batch_norm_layers_a_micro_batch_of_one_is_fine(run_dir: Path) -> None:
    checks = examined(run_dir, changed(model={"batch_norm_layers": 0}, micro_batch=1))
    assert found(checks, "batch norm").value == "no layers"
    assert found(checks, "accumulation").value == "64 micro-batches a step"
    assert worst(checks) == "ok"


@pytest.mark.parametrize(("system", "python"), [("darwin", "3.11.7"), ("linux", "3.14.0")])
def test_where_torchft_is_not_made_it_is_not_missed(
    run_dir: Path, system: str, python: str
) -> None:
    versions = {**MACHINE.versions, "torchft": None}
    config = changed(versions={"torchft": None, "python": python})
    facts = {"system": system, "python": python, "versions": versions, "torchft_error": "none"}
    check = found(examined(run_dir, config, **facts), "torchft")
    assert check.level == "ok"
    assert "fixed size" in check.value


def test_the_learning_rate_with_one_worker_more_and_fewer() -> None:
    fewer, now, more = outlook(SOUND)
    assert [entry.workers for entry in (fewer, now, more)] == [1, 2, 3]
    assert [entry.global_batch for entry in (fewer, now, more)] == [64, 128, 192]
    assert now.lr == now.lr_target == pytest.approx(0.04)
    assert now.ramp_end_step is None
    # Down at once; up on a ramp of ceil(8 x 3 / 2) steps that begins at the present rate.
    assert fewer.lr == fewer.lr_target == pytest.approx(0.02)
    assert more.lr == pytest.approx(0.04)
    assert more.lr_target == pytest.approx(0.06)
    assert more.ramp_end_step == 100 + 12


def test_the_learning_rate_in_the_middle_of_a_ramp_and_of_a_schedule() -> None:
    rule = Dynamic(reference_batch=64)

    def at(step: int, global_batch: int) -> At:
        return At(
            step=step, samples=0, global_batch=global_batch, momentum=0.9, epoch_samples=55_000
        )

    state = rule.advance(rule.init(at(0, 64)), at(96, 128))
    middle = rule.multiplier(state, at(100, 128))
    assert middle == 1.25
    config = changed(
        scaling={"state": rule.to_dict(state)}, lr=0.02 * 0.5 * middle, multiplier=middle
    )
    _, now, more = outlook(config)
    assert now.lr == pytest.approx(0.02 * 0.5 * middle)
    assert now.lr_target == pytest.approx(0.02 * 0.5 * 2)
    assert now.ramp_end_step == 96 + 16
    assert more.lr == pytest.approx(0.02 * 0.5 * middle)
    assert more.lr_target == pytest.approx(0.02 * 0.5 * 3)


def test_with_one_worker_there_is_none_fewer_and_a_constant_batch_moves_nothing() -> None:
    config = changed(workers=1, batch_policy={"name": "constant", "samples": 128})
    now, more = outlook(config)
    assert (now.workers, more.workers) == (1, 2)
    assert now.global_batch == more.global_batch == 128
    assert now.lr == more.lr == pytest.approx(0.04)


def test_capped_batches_stop_growing() -> None:
    entries = outlook(changed(batch_policy={"name": "capped", "samples": 128}))
    assert [entry.global_batch for entry in entries] == [64, 128, 128]


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds none of run\.json"):
        examine(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        examine(tmp_path / "nowhere")


def test_a_run_before_its_first_step_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    checks = examine(tmp_path, machine=MACHINE)
    assert found(checks, "run.json").level == "warn"


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_ports_are_really_tried(listening: int) -> None:
    assert answers("127.0.0.1", listening)
    assert answers("0.0.0.0", listening)
    assert bind_error(listening) == os.strerror(errno.EADDRINUSE)
    assert bind_error() == ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not answers("127.0.0.1", free.getsockname()[1])


def test_a_live_supervisor_whose_ports_answer_is_well(run_dir: Path, listening: int) -> None:
    control = {
        "host": "127.0.0.1",
        "port": listening,
        "coordinator": f"http://127.0.0.1:{listening}",
        "pid": os.getpid(),
        "token": "secret",
    }
    (run_dir / "control.json").write_text(json.dumps(control))
    machine = look(run_dir, control)
    assert machine.pid_alive is True
    assert machine.reachable == {"control": True, "coordinator": True}
    checks = examine(run_dir, machine=dataclasses.replace(MACHINE, pid_alive=True))
    assert found(checks, "supervisor").value == "alive"


def test_a_supervisor_that_is_gone_is_noticed(run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert look(run_dir, {"pid": process.pid}).pid_alive is False


def test_this_machine_is_looked_at() -> None:
    machine = look()
    assert machine.system == sys.platform
    assert machine.versions["torch"]
    assert machine.threads >= 1 <= machine.cores
    assert machine.free_bytes > 0
    assert abs(machine.now - time.time()) < 60
    assert machine.pid_alive is None


def verb(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda: None)
    doctor_verb.register(app)
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fleet.doctor.look", lambda *_: MACHINE)


@pytest.mark.usefixtures("this_machine")
def test_the_verb_prints_checks_and_the_learning_rates(run_dir: Path) -> None:
    result = verb(str(run_dir))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert all(line.startswith(("ok", "warn", "TRAP")) for line in lines[: lines.index("")])
    rates = [line.split() for line in lines[lines.index("") + 2 :]]
    assert rates == [
        ["1", "64", "0.02", "0.02", "-"],
        ["2", "128", "0.04", "0.04", "-", "<-", "now"],
        ["3", "192", "0.04", "0.06", "112"],
    ]


@pytest.mark.usefixtures("this_machine")
def test_the_verb_exits_two_on_a_trap_and_zero_on_a_warning(run_dir: Path) -> None:
    (run_dir / "run.json").write_text(json.dumps(changed(micro_batch=1)))
    result = verb(str(run_dir))
    assert result.exit_code == 2
    assert [line for line in result.stdout.splitlines() if line.startswith("TRAP")]
    (run_dir / "run.json").write_text(json.dumps(changed(micro_batch=4)))
    assert verb(str(run_dir)).exit_code == 0


@pytest.mark.usefixtures("this_machine")
def test_the_verb_as_one_document(run_dir: Path) -> None:
    (run_dir / "run.json").write_text(json.dumps(changed(optimizer={"kind": "adamw"})))
    result = verb(str(run_dir), "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert document["level"] == "trap"
    assert {check["level"] for check in document["checks"]} == {"ok", "trap"}
    assert [entry["workers"] for entry in document["learning_rate"]] == [1, 2, 3]


def test_the_verb_refuses_what_is_no_run_in_one_line(tmp_path: Path) -> None:
    result = verb(str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("shoal doctor: RUN = ")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("this_machine")
def test_the_verb_without_a_run_looks_at_the_machine() -> None:
    result = verb("--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert [check["name"] for check in document["checks"]] == [
        "python",
        "shoal",
        "torch",
        "torchft",
        "threads",
        "loopback port",
    ]
    assert document["learning_rate"] == []
