"""``shoal reproduce NAME``: rerun a paper's claims in small and say which of them were shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.reproduce.result import Result, Table

NOT_SHOWN = 3

OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results are written.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; logs go to stderr.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit 3 if a claim that was run is not shown.")
]

reproduce = typer.Typer(
    name="reproduce",
    help="Rerun a paper's claims in small and say which of them were shown.",
    no_args_is_help=True,
)


@reproduce.callback()
def _reproduce() -> None:
    """Rerun a paper's claims in small and say which of them were shown."""


@reproduce.command("dynamic")
def dynamic(
    quick: Annotated[
        bool, typer.Option("--quick", help="Exact tier and 4 seeds, in about a minute.")
    ] = False,
    long: Annotated[
        bool,
        typer.Option("--long", help="Fashion-MNIST runs too; kept one by one, so resumable."),
    ] = False,
    out: OutOption = Path("reproduce-out/dynamic"),
    as_json: JsonOption = False,
    strict: StrictOption = False,
    seed_base: Annotated[
        int | None,
        typer.Option(
            "--seed-base", metavar="N", help="Other seeds than the recorded ones: N, N+1, ..."
        ),
    ] = None,
    long_cells: Annotated[
        int | None,
        typer.Option(
            "--long-cells", metavar="N", help="With --long: stop in order after N new runs."
        ),
    ] = None,
) -> None:
    """Dynamic Mini-batch SGD (Lin et al. 2019): the learning rate follows the workers on a ramp."""
    from shoal.reproduce.dynamic.run import Options, run_dynamic

    options = Options(
        directory=out,
        is_quick=quick,
        is_long=long,
        seed_base=seed_base,
        long_cells=long_cells,
    )
    result = _run("dynamic", out, lambda: run_dynamic(options, sys.stderr))
    _say(result, out, as_json=as_json, strict=strict)


@reproduce.command("batch-size")
def data_parallelism(
    quick: Annotated[
        bool, typer.Option("--quick", help="A named subset in about 3 minutes.")
    ] = False,
    long: Annotated[
        bool,
        typer.Option("--long", help="Fashion-MNIST studies too; hours, resumable."),
    ] = False,
    out: OutOption = Path("reproduce-out/batch-size"),
    as_json: JsonOption = False,
    strict: StrictOption = False,
    long_searches: Annotated[
        int | None,
        typer.Option(
            "--long-searches", metavar="N", help="With --long: stop in order after N new searches."
        ),
    ] = None,
) -> None:
    """Measuring the Effects of Data Parallelism (Shallue et al. 2019): steps against batch size."""
    from shoal.reproduce.batch_size.run import Options, run_batch_size

    options = Options(directory=out, is_quick=quick, is_long=long, long_searches=long_searches)
    result = _run("batch-size", out, lambda: run_batch_size(options, sys.stderr))
    _say(result, out, as_json=as_json, strict=strict)


def _run(name: str, out: Path, work: Callable[[], Result]) -> Result:
    from shoal.errors import ShoalError
    from shoal.fleet.supervisor.rundir import check_writable

    try:
        check_writable(out, "--out")  # before hours of work that could not be kept
        return work()
    except (ShoalError, OSError) as error:
        typer.echo(f"shoal reproduce {name}: {error}", err=True)
        raise typer.Exit(error.exit_code if isinstance(error, ShoalError) else 1) from None


def _say(result: Result, out: Path, *, as_json: bool, strict: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False))
    else:
        _show(result, out)
    if strict and not result.all_asked_shown:
        raise typer.Exit(NOT_SHOWN)


def _show(result: Result, directory: Path) -> None:
    """Tables on the terminal, the claims last."""
    from rich.console import Console

    console = Console()
    for table in result.tables:
        _print_table(console, table)
    for head, texts in (("Caveats", result.caveats), ("Ours, not the paper's", result.choices)):
        console.print(f"[bold]{head}[/bold]")
        for text in texts:
            console.print(f"- {text}", markup=False, highlight=False)
        console.print()
    _print_claims(console, result)
    console.print(f"report: {directory / 'report.html'}", markup=False, soft_wrap=True)


def _print_table(console: Console, table: Table) -> None:
    from rich.table import Table as Grid

    from shoal.reproduce.page import words

    grid = Grid(title=table.title, title_justify="left", caption=table.note or None)
    for place, head in enumerate(table.columns):
        numeric = all(isinstance(row[place], int | float | None) for row in table.rows)
        grid.add_column(
            head, justify="right" if numeric else "left", no_wrap=place > 0 and not numeric
        )
    for row in table.rows:
        grid.add_row(*(words(cell) for cell in row))
    console.print(grid)
    console.print()


def _print_claims(console: Console, result: Result) -> None:
    from rich.table import Table as Grid

    from shoal.reproduce.claims import Verdict
    from shoal.reproduce.page import words

    colours = {Verdict.SHOWN: "green", Verdict.NOT_SHOWN: "red", Verdict.NOT_RUN: "dim"}
    grid = Grid(title=result.title, title_justify="left", show_lines=True)
    for head in ("id", "criterion", "measured", "verdict"):
        grid.add_column(head, no_wrap=head in ("id", "verdict"))
    for claim in result.claims:
        measured = words(claim.value) or result.not_run.get(claim.id, "")
        verdict = f"[{colours[claim.verdict]}]{claim.verdict}[/]"
        grid.add_row(claim.id, claim.criterion, measured, verdict)
    console.print(grid)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    app.add_typer(reproduce)
