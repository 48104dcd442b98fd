"""``shoal run``: start a fleet on this machine, or add workers to one elsewhere."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.fleet.supervisor.settings import Settings


def _option(text: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, **more)


TrainScript = Annotated[Path, typer.Argument(metavar="TRAIN.PY", help="The training script.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on to the script.")
]
Workers = Annotated[str, _option("Workers: N of them; or MAX, going on with MIN.", "N|MIN:MAX")]
RunDir = Annotated[Path | None, _option("Run directory; default runs/TRAIN-1, -2, ...", "DIR")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the run directory's checkpoints.")
]
Script = Annotated[Path | None, _option("TOML script of joins, leaves and kills.", "FILE")]
CheckpointEvery = Annotated[float, _option("How often a checkpoint is written.", "SECONDS")]
Join = Annotated[
    str | None, _option("Add workers to the fleet whose endpoint this is.", "HOST:PORT")
]
TokenFile = Annotated[
    Path | None, _option("With --join: the token, or the run's control.json.", "FILE")
]
Bind = Annotated[str, _option("Address to listen on.", "ADDRESS")]
Advertise = Annotated[str, _option("Address under which others reach this machine.", "ADDRESS")]
Port = Annotated[int, _option("Port of the control endpoint; 0: any free one.")]
CoordinatorPort = Annotated[int, _option("Port of the coordinator; 0: any free one.")]
MaxRestarts = Annotated[int, _option("Deaths without progress that are replaced, in 5 minutes.")]
HangSeconds = Annotated[
    float, _option("A worker without progress of its own for so long is killed.")
]
GatherSeconds = Annotated[float, _option("How long the start waits for all workers.")]
DrainSeconds = Annotated[float, _option("How long workers have to leave in order.")]
Patience = Annotated[float, _option("Seconds below MIN workers before the run stops, resumable.")]
JoinTimeout = Annotated[float, _option("Seconds the coordinator waits for workers alive but busy.")]
NoticeFile = Annotated[
    Path | None,
    _option(
        "A file whose appearance announces the end of this machine.",
        "FILE",
        envvar="SHOAL_NOTICE_FILE",
    ),
]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON; lines go to stderr.")
]


def run(
    train_script: TrainScript,
    arguments: Arguments = None,
    workers: Workers = "1",
    run_dir: RunDir = None,
    resume: Resume = False,
    script: Script = None,
    checkpoint_every: CheckpointEvery = 60.0,
    join: Join = None,
    token_file: TokenFile = None,
    bind: Bind = "127.0.0.1",
    advertise: Advertise = "",
    port: Port = 0,
    coordinator_port: CoordinatorPort = 0,
    max_restarts: MaxRestarts = 10,
    hang_seconds: HangSeconds = 60.0,
    gather_seconds: GatherSeconds = 120.0,
    drain_seconds: DrainSeconds = 60.0,
    patience: Patience = 300.0,
    join_timeout: JoinTimeout = 30.0,
    notice_file: NoticeFile = None,
    report: Report = True,
    as_json: AsJson = False,
) -> None:
    """Start a coordinator and workers on this machine, and keep them: train.py on a fleet.

    Ctrl-C or SIGTERM lets the workers leave in order, and exits 75. A second Ctrl-C kills them: 130.
    """
    settings = _settings(
        workers,
        script,
        train_script=train_script,
        arguments=tuple(arguments or ()),
        run_dir=run_dir,
        resume=resume,
        bind=bind,
        advertise=advertise,
        port=port,
        coordinator_port=coordinator_port,
        join_timeout_seconds=join_timeout,
        gather_seconds=gather_seconds,
        patience_seconds=patience,
        hang_seconds=hang_seconds,
        drain_seconds=drain_seconds,
        max_restarts=max_restarts,
        checkpoint_seconds=checkpoint_every,
        notice_file=notice_file,
        report=report,
    )
    raise typer.Exit(_start(settings, as_json, join, token_file))


def _start(settings: Settings, as_json: bool, join: str | None, token_file: Path | None) -> int:
    return _supervise(settings, as_json) if join is None else _join(settings, join, token_file)


def _settings(workers: str, script: Path | None, **fields: Any) -> Settings:
    """The settings of a run; what the command line writes otherwise is read here."""
    from shoal.fleet.supervisor import rundir
    from shoal.fleet.supervisor import script as scripts
    from shoal.fleet.supervisor.settings import Settings, parse_workers

    start, minimum, maximum = parse_workers(workers)
    fields["events"] = scripts.load(script) if script is not None else ()
    if fields["run_dir"] is None:
        find = rundir.latest_dir if fields["resume"] else rundir.default_dir
        fields["run_dir"] = find(fields["train_script"])
    return Settings(start=start, minimum=minimum, maximum=maximum, **fields)


def _supervise(settings: Settings, as_json: bool) -> int:
    from shoal.fleet.supervisor.loop import Supervisor
    from shoal.fleet.supervisor.summary import as_text

    supervisor = Supervisor(settings, sys.stderr if as_json else sys.stdout)
    code = supervisor.run()
    path, document = supervisor.summary
    # Whether or not anybody reads it, the run ended as it did.
    with contextlib.suppress(OSError):
        if as_json and document is not None:
            typer.echo(as_text(document))
        elif path is not None:
            typer.echo(f"summary: {path}")
    return code


def _join(settings: Settings, address: str, token_file: Path | None) -> int:
    from shoal.fleet.supervisor.joiner import Joiner, read_token

    return Joiner(settings, address, read_token(token_file), sys.stdout).run()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    # What follows the script's name belongs to the script.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)
