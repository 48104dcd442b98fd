"""``shoal report RUN``: the page of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory or a name under runs/.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write RUN/report.html, one self-contained page, and print its path."""
    from shoal.errors import UsageError
    from shoal.report.page import write
    from shoal.report.run import find_run, load_run
    from shoal.report.wording import headline

    try:
        run = find_run(run)
        loaded = load_run(run)
        path = write(run, loaded)
    except UsageError as error:
        typer.echo(f"shoal report: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        typer.echo(f"shoal report: {error}; nothing was written", err=True)
        raise typer.Exit(1) from None
    if as_json:
        document = {"report": str(path), "headline": headline(loaded), "notes": list(loaded.notes)}
        typer.echo(json.dumps(document))
    else:
        typer.echo(str(path))


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    app.command("report")(report)
