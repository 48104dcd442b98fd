"""``shoal simulate RECIPE``: virtual workers on a virtual clock, and a page of what they did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.world.virtual.record import SimulatedRun


def simulate(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's TOML file.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where results go; simulations/NAME by default."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; logs go to stderr.")
    ] = False,
) -> None:
    """Simulate a fleet and its sync rules on a virtual clock, and draw what came of it."""
    from shoal.errors import ShoalError

    try:
        document, lines = _run(recipe, out)
    except (ShoalError, OSError) as error:
        typer.echo(f"shoal simulate: {error}", err=True)
        raise typer.Exit(error.exit_code if isinstance(error, ShoalError) else 1) from None
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
        return
    for line in lines:
        typer.echo(line)
    typer.echo(f"report: {document['report']}")


def _run(path: Path, out: Path | None) -> tuple[dict[str, object], list[str]]:
    """Simulate and write: one document, and a sentence for each run."""
    import torch

    from shoal.fleet.supervisor.rundir import check_writable
    from shoal.report.simulation_page import summary_lines, write_simulation
    from shoal.report.templates import require_packages
    from shoal.world.virtual.recipe import read_recipe
    from shoal.world.virtual.simulate import simulate as simulated

    recipe = read_recipe(path)
    directory = out if out is not None else Path("simulations") / recipe.name
    check_writable(directory, "--out")
    require_packages()  # before minutes of work that could not be drawn
    found: dict[str, SimulatedRun] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: more threads only wait for each other
    try:
        for name, setup in recipe.setups.items():
            typer.echo(f"simulating {name} ...", err=True)
            sys.stderr.flush()
            found[name] = simulated(setup)
            found[name].settings = dict(recipe.settings[name])
    finally:
        torch.set_num_threads(threads)
    report = write_simulation(recipe.name, found, directory)
    document = {
        "name": recipe.name,
        "simulated": True,
        "report": str(report),
        "runs": {name: record.to_dict() for name, record in found.items()},
    }
    return document, summary_lines(found)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    app.command("simulate")(simulate)
