"""The command line's surface: what may not change without anyone noticing."""

import json
import subprocess
import sys

import pytest

from shoal.cli import application, main

SURFACE = """
doctor: [RUN] --json
report: RUN --json
reproduce batch-size: --quick --long --out --json --strict --long-searches
reproduce dynamic: --quick --long --out --json --strict --seed-base --long-cells
resize: RUN N --json
run: TRAIN.PY [ARGS]... --workers --run-dir --resume --script --checkpoint-every --join
  --token-file --bind --advertise --port --coordinator-port --max-restarts --hang-seconds
  --gather-seconds --drain-seconds --patience --join-timeout --notice-file
  --report/--no-report --json
simulate: RECIPE --out --json
study compare: STUDY... --out --json
study curve: STUDY --goal --study --trials --split-by --out --noise-scale --json
study export: STUDY DIR --csv --json
study import: ARCHIVE DIR --processes --json
study plan: STUDY --processes --full --json
study recenter: STUDY --out --widen --name --json
study run: STUDY --out --processes --full --confirm --json
study status: STUDY --json
"""


def surface():
    import typer

    def walk(command, path):
        below = getattr(command, "commands", None)
        if below:
            return [line for name in sorted(below) for line in walk(below[name], [*path, name])]
        names = [
            "/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else p.metavar
            for p in command.params
        ]
        return [f"{' '.join(path)}: {' '.join(names)}"]

    return walk(typer.main.get_command(application()), [])


def test_the_verbs_and_their_options_are_these():
    listed = SURFACE.strip().replace("\n  ", " ").splitlines()
    assert surface() == listed


def test_importing_the_command_line_imports_nothing_heavy():
    heavy = "{'typer', 'rich', 'torchft', 'matplotlib', 'scipy', 'sklearn'}"
    code = f"import sys, shoal.cli; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing argument 'TRAIN.PY'"),
        (["run", "--bogus", "train.py"], "No such option: --bogus"),
        (["run", "none.py"], "none.py: no such file"),
        (["run", "--workers", "4:1", "none.py"], "did you mean --workers 1:4?"),
        (["run", "--workers", "0", "none.py"], "at least 1 worker"),
        (["run", "--port", "x", "none.py"], "Invalid value for '--port'"),
        (["run", "--resume", "none.py"], "no run of none.py"),
        (["run", "--script", "none.toml", "none.py"], "--script none.toml: cannot be read"),
        (["resize", "none", "2"], "RUN = none; no such run directory"),
        (["resize", "none", "two"], "Invalid value for 'N'"),
        (["swim"], "No such command 'swim'"),
    ],
)
def test_a_mistake_is_one_line_status_2_and_nothing_written(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_options_that_cannot_work_are_refused(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    run_dir = tmp_path / "run"
    for option, value, message in (
        ("--hang-seconds", "1", "--hang-seconds 1; workers are heard of"),
        ("--drain-seconds", "0", "--drain-seconds 0; it is a time in seconds above 0"),
        ("--patience", "nan", "--patience nan; it is a time"),
        ("--port", "99999", "--port 99999; a port is 1 to 65535"),
        ("--max-restarts", "-1", "--max-restarts -1"),
        ("--bind", "0.0.0.0", "--advertise ADDRESS"),
        ("--bind", "192.0.2.1", "cannot listen there"),
    ):
        given = ["run", "--run-dir", str(run_dir), option, value, str(tmp_path / "train.py")]
        assert main(given) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert not run_dir.exists()


def test_help_is_no_failure(capsys):
    assert main(["--help"]) == 0
    assert "reproduce" in capsys.readouterr().out
    assert main(["run", "--help"]) == 0
    assert "MIN:MAX" in capsys.readouterr().out


@pytest.mark.processes
def test_json_is_one_document_and_lines_go_elsewhere(tmp_path):
    train = tmp_path / "train.py"
    train.write_text("import sys\nprint('arguments', sys.argv[1:], __name__, __file__)\n")
    command = [sys.executable, "-m", "shoal", "run", "--json", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--no-report", str(train), "--json", "--lr", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (document["exit_code"], document["workers"]) == (0, {"w0": 0})
    # What follows the script is the script's, and it runs as if by `python train.py`.
    assert f"arguments ['--json', '--lr', '0.1'] __main__ {train}" in done.stderr
    assert "[worker_exited] worker w0" in done.stderr
