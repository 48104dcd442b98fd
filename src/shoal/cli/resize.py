"""``shoal resize RUN N``: change the number of workers of a running fleet."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def resize(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, or its name in runs/.")
    ],
    workers: Annotated[int, typer.Argument(metavar="N", help="How many workers it shall have.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Change the number of workers of a running fleet: joins, or orderly leaves of the newest."""
    from shoal.errors import UsageError
    from shoal.fleet.supervisor.rundir import find_control
    from shoal.world.elastic.endpoint import ControlClient, Refused

    address, token = find_control(run)
    client = ControlClient(address, token)
    try:
        reply = client.call("resize", {"workers": workers})
    except Refused as error:
        raise UsageError(f"{run}: {error}") from None
    except OSError as error:
        raise UsageError(f"{run}: not running any more ({error}); see its summary.json") from None
    finally:
        client.close()
    if as_json:
        typer.echo(json.dumps(reply))
    else:
        typer.echo(f"{run}: workers {reply['workers_before']} → {reply['workers_after']}")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    app.command("resize")(resize)
