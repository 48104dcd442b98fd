"""``shoal doctor [RUN]``: what would go wrong here, and the way out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.fleet.doctor import Check, Outlook

TRAP_EXIT = 2
_LABELS = {"ok": ("ok", None), "warn": ("warn", "yellow"), "trap": ("TRAP", "red")}


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory or a name under runs/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Look for traps on this machine and in a run; exits 2 on one.

    Prints versions, threads, ports, batches, BatchNorm's risk, and the learning rate now and with
    one worker more and fewer.
    """
    from shoal.errors import UsageError
    from shoal.fleet.doctor import examine, outlook, read_run, worst
    from shoal.report.run import find_run

    run = find_run(run) if run is not None else None
    rates: list[Outlook] = []
    try:
        checks = examine(run)
        config = read_run(run)[0] if run is not None else {}
    except UsageError as error:
        typer.echo(f"shoal doctor: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if config:
        with contextlib.suppress(UsageError):  # the checks name what is missing in it
            rates = outlook(config)
    level = worst(checks)
    if as_json:
        document = {
            "level": level,
            "checks": [dataclasses.asdict(check) for check in checks],
            "learning_rate": [dataclasses.asdict(entry) for entry in rates],
        }
        typer.echo(json.dumps(document))
    else:
        _print_checks(checks)
        _print_rates(rates, config.get("workers"))
    if level == "trap":
        raise typer.Exit(TRAP_EXIT)


def _print_checks(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        label, colour = _LABELS[check.level]
        mark = typer.style(f"{label:<4}", fg=colour, bold=check.level == "trap")
        typer.echo(f"{mark}  {check.name:<{width}}  {check.line()}")


def _print_rates(rates: Sequence[Outlook], now: object) -> None:
    if not rates:
        return
    typer.echo("\nworkers  global batch  lr of the next step  lr target  ramp ends at step")
    for entry in rates:
        mark = "  <- now" if entry.workers == now else ""
        end = "-" if entry.ramp_end_step is None else f"{entry.ramp_end_step:,}"
        typer.echo(
            f"{entry.workers:>7}  {entry.global_batch:>12,}  {entry.lr:>19.6g}  "
            f"{entry.lr_target:>9.6g}  {end:>17}{mark}"
        )


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    app.command("doctor")(doctor)
