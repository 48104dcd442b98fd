"""``shoal study ...``: steps to a goal against batch size, every batch size tuned on its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.study.spec import StudySpec

NOT_TO_BE_USED = 3
INTERRUPTED = 75

study = typer.Typer(
    name="study",
    help="Measure steps to a goal against batch size, every batch size tuned on its own.",
    no_args_is_help=True,
)

StudyArgument = Annotated[
    Path,
    typer.Argument(metavar="STUDY", help="A study's TOML file, or the directory of one."),
]
DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="The directory of a study.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The study's directory; studies/NAME by default."),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Train every trial to the budget, whatever was reached.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; logs go to stderr.")
]


@study.callback()
def _study() -> None:
    """Measure steps to a goal against batch size, every batch size tuned on its own."""


@study.command("plan")
def plan(
    study: StudyArgument,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Runner processes; one per core by default.")
    ] = None,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a study would train and how long it would take, before anything runs."""
    with one_line("plan"):
        from shoal.study.plan import plan as planned
        from shoal.study.plan import render

        spec, there = _spec(study, full=full)
        known = {} if there is None else _known_steps(there)
        found = planned(spec, steps=known, runners=cores() if processes is None else processes)
        if as_json:
            typer.echo(json.dumps(found.to_dict()))
        else:
            typer.echo("\n".join(render(found)))


@study.command("run")
def run(
    study: StudyArgument,
    out: OutOption = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", help="Runner processes on this machine; one per core by default."
        ),
    ] = None,
    full: FullOption = False,
    confirm: Annotated[
        int,
        typer.Option("--confirm", metavar="SEEDS", help="Fresh seeds of each winner; 0: none."),
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """Run a study, or go on with it: after Ctrl-C or a kill the same command continues."""
    with one_line("run"):
        from shoal.study.conclude import conclude
        from shoal.study.run import Running, run_study
        from shoal.study.screen import Onlooker

        spec, there = _spec(study, full=full)
        directory = out or there or Path("studies") / spec.name
        processes = cores() if processes is None else processes
        with Onlooker() as onlooker:
            done = run_study(
                spec, directory, processes=processes, confirm_seeds=confirm, look=onlooker.look
            )
            onlooker.look(Running(directory=done, spec=spec, processes=processes), at_once=True)
        concluded = conclude(done)
        _print(concluded.to_dict(), concluded.lines(), as_json=as_json)
        if concluded.not_to_be_used:
            raise typer.Exit(NOT_TO_BE_USED)


@study.command("status")
def status(study: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Say how far a study is, without disturbing who works on it."""
    with one_line("status"):
        from shoal.study.run import open_study
        from shoal.study.screen import lines, title
        from shoal.study.status import seconds_left, status_of

        directory, spec = open_study(study)
        rows = status_of(directory, spec.searches())
        busy = sum(row.running for row in rows)
        if busy > 1:
            rows = status_of(directory, spec.searches(), processes=busy)
        document: dict[str, object] = {
            "study": spec.name,
            "searches": sum(row.searches for row in rows),
            "done": sum(row.done for row in rows),
            "seconds_left": seconds_left(rows),
            "batches": [row.to_dict() for row in rows],
        }
        _print(document, [title(rows, spec.name), *lines(rows)], as_json=as_json)


@study.command("curve")
def curve(
    study: DirectoryArgument,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            "--goal",
            metavar="METRIC<VALUE",
            help="Another goal within what was measured; repeatable.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--study", metavar="NAME", help="Which one of an archive.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Of an archive's searches.")
    ] = None,
    split_by: Annotated[
        str | None,
        typer.Option("--split-by", metavar="PARAMETER", help="One curve per value, in an archive."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where an archive's page goes.")
    ] = None,
    noise_scale: Annotated[
        bool,
        typer.Option("--noise-scale", help="Replay a winner of plain SGD; needs the workload."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Analyse what a study has measured so far, and write its page, figures and tables."""
    with one_line("curve"):
        from shoal.errors import UsageError
        from shoal.study.conclude import conclude, conclude_archive, is_archive, parse_goal
        from shoal.study.run import open_study

        if is_archive(study):
            concluded = conclude_archive(
                study,
                goals=[parse_goal(text) for text in goal or ()],
                study=name,
                trials=trials,
                split_by=split_by,
                out=out,
            )
        elif name or trials or split_by or out:
            raise UsageError(
                f"study = {study}; --study, --trials, --split-by and --out are for imported archives; leave "
                "them out"
            )
        else:
            goals = [parse_goal(text) for text in goal or ()]
            concluded = conclude(open_study(study)[0], goals=goals, noise_scale=noise_scale)
        _print(concluded.to_dict(), concluded.lines(), as_json=as_json)
        if concluded.not_to_be_used:
            raise typer.Exit(NOT_TO_BE_USED)


def _spec(path: Path, *, full: bool) -> tuple[StudySpec, Path | None]:
    """The study's spec, and its directory if that was given."""
    from dataclasses import replace

    from shoal.study.run import open_study
    from shoal.study.spec_file import load_spec

    if path.is_dir():
        directory, spec = open_study(path)
        there: Path | None = directory.path
    else:
        spec, there = load_spec(path), None
    if full:
        spec = replace(spec, budget=replace(spec.budget, full=True))
    return spec, there


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _known_steps(directory: Path) -> dict[tuple[str, int], int]:
    """S of the points that a study has measured already."""
    from shoal.study.run import open_study
    from shoal.study.status import status_of

    there, spec = open_study(directory)
    rows = status_of(there, spec.searches())
    return {(row.curve, row.global_batch): round(row.steps) for row in rows if row.steps}


def _print(document: dict[str, object], lines: list[str], *, as_json: bool) -> None:
    typer.echo(json.dumps(document) if as_json else "\n".join(lines))


@contextlib.contextmanager
def one_line(verb: str) -> Iterator[None]:
    """A user's mistake, a stop or a full disk ends as one line and its exit status."""
    from shoal.errors import ShoalError

    try:
        yield
    except ShoalError as error:
        print(f"shoal study {verb}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print(
            f"shoal study {verb}: interrupted; nothing is lost, the same command goes on where it was",
            file=sys.stderr,
            flush=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        print(
            f"shoal study {verb}: {error}; everything measured so far is kept",
            file=sys.stderr,
            flush=True,
        )
        raise typer.Exit(1) from None
    except Exception as error:
        # DuckDB has errors of its own for files that it cannot read or write.
        duckdb = sys.modules.get("duckdb")
        if duckdb is None or not isinstance(
            error, duckdb.IOException | duckdb.InvalidInputException
        ):
            raise
        said = str(error).partition("\n")[0]
        print(
            f"shoal study {verb}: {said}; what is in rows/ is as it was; if a file of tables/ is damaged, "
            "remove the folder tables/ of the study, and the same command makes it again from rows/",
            file=sys.stderr,
            flush=True,
        )
        raise typer.Exit(1) from None


def register(app: typer.Typer) -> None:
    """Add the verb to the command line's application."""
    import shoal.cli.study_data  # noqa: F401  (adds its commands)

    app.add_typer(study)
