"""``shoal study export | import | recenter | compare``: a study's data, its next version, several together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.study import DirectoryArgument, JsonOption, one_line, study


@study.command("export")
def export(
    study: DirectoryArgument,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or new directory.")],
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Three plain CSV files instead of the released layout.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a study's measurements in the layout of the paper's released archive, or as plain CSV."""
    with one_line("export"):
        from shoal.ledger.archive_export import export as export_archive
        from shoal.ledger.plain_csv import export_csv
        from shoal.study.run import open_study
        from shoal.study.tables import read_study

        directory, _ = open_study(study)
        if as_csv:
            export_csv(directory.path, out)
            typer.echo(json.dumps({"directory": str(out)}) if as_json else str(out))
            return
        trials = export_archive(read_study(directory.path), out)
        if as_json:
            typer.echo(json.dumps({"directory": str(out), "trials": trials}))
        else:
            typer.echo(f"{out}: {trials:,} trials")


@study.command("import")
def import_(
    archive: Annotated[
        Path,
        typer.Argument(metavar="ARCHIVE", help="A directory in the released layout, or of CSV."),
    ],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where its tables are made.")],
    processes: Annotated[int, typer.Option("--processes", help="That read side by side.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Read an archive into columns; broken files are named and the rest is imported."""
    with one_line("import"):
        from shoal.ledger.archive import import_archive
        from shoal.ledger.plain_csv import import_csv

        if (archive / "evaluations.csv").is_file():
            report = import_csv(archive, out)
        else:
            report = import_archive(archive, out, processes=processes)
        problems = [{"path": p.path, "reason": p.reason} for p in report.problems]
        if as_json:
            counts = {
                "searches": report.searches,
                "trials": report.trials,
                "evaluations": report.evaluations,
                "values": report.values,
            }
            typer.echo(json.dumps({"directory": str(out), **counts, "problems": problems}))
            return
        for problem in problems:
            typer.echo(f"{problem['path']}: {problem['reason']}")
        typer.echo(
            f"{out}: {report.searches:,} searches, {report.trials:,} trials, {report.values:,} values"
        )


@study.command("recenter")
def recenter(
    study: DirectoryArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The next version's TOML file; printed without."
        ),
    ] = None,
    widen: Annotated[
        bool, typer.Option("--widen", help="A decade more on the flagged side, instead of moving.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the next version; NAME-recentred by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Propose the next version of a study whose optima lay at the boundary of their ranges."""
    with one_line("recenter"):
        from shoal.errors import UsageError
        from shoal.study.conclude import analysed
        from shoal.study.recentred import as_toml, proposals, recentred

        directory, spec, analysis = analysed(study)
        found = proposals(spec, analysis, how="widen" if widen else "move")
        said = [
            f"{p.curve} at batch {p.global_batch:,}: {line}"
            for p in found
            for line in (*p.changes, *(f"kept: {reason}" for reason in p.kept))
        ]
        fresh = recentred(spec, found, name=name or f"{spec.name}-recentred")
        text = as_toml(fresh)
        if out is not None:
            if out.exists():
                raise UsageError(f"out = {out}; it exists; give another file")
            out.write_text(text)
        if as_json:
            typer.echo(json.dumps({"study": str(directory.path), "changes": said, "toml": text}))
            return
        for line in said:
            typer.echo(line, err=True)
        typer.echo(str(out) if out is not None else text)


@study.command("compare")
def compare(
    studies: Annotated[
        list[Path], typer.Argument(metavar="STUDY...", help="Directories of two or more studies.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the page goes.")] = Path(
        "study-comparison"
    ),
    as_json: JsonOption = False,
) -> None:
    """Lay the curves of several workloads side by side, each normalised by its own least samples."""
    with one_line("compare"):
        from shoal.errors import UsageError
        from shoal.report.study_page import write_comparison
        from shoal.study.conclude import analysed

        found = {}
        for path in studies:
            _, spec, analysis = analysed(path)
            if spec.name in found:
                raise UsageError(
                    f"study = {spec.name!r} twice; studies of one name cannot be told apart; leave one out"
                )
            found[spec.name] = analysis
        page = write_comparison(found, out)
        typer.echo(json.dumps({"report": str(page)}) if as_json else str(page))
