"""``shoal run``: start a fleet on this machine, or add workers to one elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.fleet.supervisor.settings import Settings


def run(
    train_script: Annotated[Path, typer.Argument(metavar="TRAIN.PY", help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed on to the script.")
    ] = None,
    workers: Annotated[
        str,
        typer.Option(metavar="N|MIN:MAX", help="Workers: N of them; or MAX, going on with MIN."),
    ] = "1",
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run directory; default runs/TRAIN-1, -2, ..."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run directory's checkpoints.")
    ] = False,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML script of joins, leaves and kills.")
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often a checkpoint is written.")
    ] = 60.0,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Add workers to the fleet whose endpoint this is."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --join: the token, or the run's control.json."),
    ] = None,
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    advertise: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address under which others reach this machine.")
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the control endpoint; 0: any free one.")] = 0,
    coordinator_port: Annotated[
        int, typer.Option(help="Port of the coordinator; 0: any free one.")
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(help="Deaths without progress that are replaced, in 5 minutes.")
    ] = 10,
    hang_seconds: Annotated[
        float, typer.Option(help="A worker without progress of its own for so long is killed.")
    ] = 60.0,
    gather_seconds: Annotated[
        float, typer.Option(help="How long the start waits for all workers.")
    ] = 120.0,
    drain_seconds: Annotated[
        float, typer.Option(help="How long workers have to leave in order.")
    ] = 60.0,
    patience: Annotated[
        float, typer.Option(help="Seconds below MIN workers before the run stops, resumable.")
    ] = 300.0,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds the coordinator waits for workers alive but busy.")
    ] = 30.0,
    notice_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SHOAL_NOTICE_FILE",
            help="A file whose appearance announces the end of this machine.",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html at the end.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; lines go to stderr.")
    ] = False,
) -> None:
    """Start a coordinator and workers on this machine, and keep them: train.py on a fleet."""
    from shoal.fleet.supervisor import rundir
    from shoal.fleet.supervisor import script as scripts
    from shoal.fleet.supervisor.settings import Settings, parse_workers

    start, minimum, maximum = parse_workers(workers)
    events = scripts.load(script) if script is not None else ()
    if run_dir is None:
        find = rundir.latest_dir if resume else rundir.default_dir
        run_dir = find(train_script)
    settings = Settings(
        train_script=train_script,
        arguments=tuple(arguments or ()),
        run_dir=run_dir,
        start=start,
        minimum=minimum,
        maximum=maximum,
        resume=resume,
        events=events,
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
    code = _join(settings, join, token_file) if join is not None else _supervise(settings, as_json)
    raise typer.Exit(code)


def _supervise(settings: Settings, as_json: bool) -> int:
    from shoal.fleet.supervisor.loop import supervise

    code = supervise(settings, sys.stderr if as_json else sys.stdout)
    document = settings.run_dir / "summary.json"
    if as_json and document.exists():
        typer.echo(document.read_text().rstrip())
    elif document.exists():
        typer.echo(f"summary: {document}")
    return code


def _join(settings: Settings, address: str, token_file: Path | None) -> int:
    from shoal.fleet.supervisor.joiner import Joiner, read_token

    return Joiner(settings, address, read_token(token_file), sys.stdout).run()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    # What follows the script's name belongs to the script.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)
