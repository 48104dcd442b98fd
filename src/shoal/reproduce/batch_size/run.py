"""``shoal reproduce batch-size`` from the first number to the last file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from shoal.errors import ResumableStop, UsageError
from shoal.reproduce.batch_size import (
    check,
    criteria,
    digits,
    figures,
    full,
    long,
    paper,
    quadratic,
    studies,
    tables,
)
from shoal.reproduce.batch_size.studies import SGD, Measured
from shoal.reproduce.claims import Claim, Verdict
from shoal.reproduce.page import render
from shoal.reproduce.progress import Progress, duration
from shoal.reproduce.result import Result, Table, environment, write_json, write_text

TITLE = "Effects of data parallelism (Shallue et al. 2019), reproduced in small"
NEEDED = {"scipy": "study", "duckdb": "study", "sklearn": "examples"} | {
    "matplotlib": "report",
    "jinja2": "report",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says.

    Args:
        directory: where everything is written; studies in it are gone on with.
        is_quick: the quadratic and one small study of digits.
        is_long: the Fashion-MNIST studies too.
        long_searches: stop in order after so many new searches of them; None for all.
    """

    directory: Path
    is_quick: bool = False
    is_long: bool = False
    long_searches: int | None = None

    @property
    def command(self) -> str:
        """The command that makes this result, less its directory."""
        words = ["shoal reproduce batch-size"]
        words += ["--quick"] if self.is_quick else []
        words += ["--long"] if self.is_long else []
        return " ".join(words)


def run(
    out: Path,
    quick: bool = False,
    long: bool = False,
    stream: TextIO = sys.stderr,
    *,
    long_searches: int | None = None,
) -> Result:
    """Run what is asked for and write ``result.json``, the figures and ``report.html`` into ``out``.

    Raises:
        UsageError: an option, directory or package that cannot be used; nothing was written.
        ShoalError: it was stopped in order (exit code 75); the same command goes on.
    """
    options = Options(directory=out, is_quick=quick, is_long=long, long_searches=long_searches)
    return run_batch_size(options, stream)


def run_batch_size(options: Options, stream: TextIO) -> Result:
    """As :func:`run`."""
    _check(options)
    found = _Found(options=options)
    progress = Progress(1.0, stream=stream)
    found.quadratic = quadratic.run_quadratic()
    found.seconds["quadratic"] = round(progress.seconds, 1)
    print(f"noisy quadratic, exact: done in {duration(progress.seconds)}", file=stream, flush=True)
    if options.is_quick:
        _run_quick(found, stream)
        return found.write()
    _run_digits(found, stream)
    result = found.write()
    if not options.is_long:
        return result
    found.long = long.run_long(
        options.directory / "long", stream, most_searches=options.long_searches
    )
    result = found.write()
    if not found.long.is_whole:
        done = sum(found.long.finished.values())
        raise ResumableStop(
            f"{done} of {long.SEARCHES} long searches are finished and kept in "
            f"{options.directory / 'long'}; run the same command again to go on"
        )
    return result


def _check(options: Options) -> None:
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(
                f"{module} is not installed; shoal reproduce batch-size needs it; "
                f"pip install 'shoal[{extra}]'"
            )
    if options.directory.exists() and not options.directory.is_dir():
        raise UsageError(
            f"--out = {options.directory}; it must be a directory or not exist yet; "
            "choose another --out"
        )
    if options.is_quick and options.is_long:
        raise UsageError("--quick and --long exclude each other; leave one out")
    count = options.long_searches
    if count is not None and (count < 1 or not options.is_long):
        raise UsageError(
            f"--long-searches = {count}; it bounds the new searches of --long and is at least 1; add "
            "--long, or leave it out"
        )
    if options.is_long:
        long.check_data()


def _run_quick(found: _Found, stream: TextIO) -> None:
    progress = Progress(1.0, stream=stream)
    place = found.options.directory / "studies" / "digits-quick"
    found.quick = studies.carry_out(studies.quick_spec(), place, stream)
    check.check(found.quick, found.differences, {})
    found.seconds["digits-quick"] = round(progress.seconds, 1)


def _run_digits(found: _Found, stream: TextIO) -> None:
    progress = Progress(1.0, stream=stream)
    place = found.options.directory / "studies"
    first = studies.carry_out(studies.digits_spec(), place / "digits", stream)
    again = studies.recentred(first)
    if again is None:
        found.main = first
        check.check(first, found.differences, {})
    else:
        found.moved = sorted((c, b) for c, spec in again.curves.items() for b in spec.spaces)
        other = studies.carry_out(again, place / "digits-recentred", stream)
        found.main = studies.merged(first, other, found.moved)
        check.check(found.main, found.differences, dict.fromkeys(found.moved, other))
    found.seconds["digits"] = round(progress.seconds, 1)
    found.full = studies.carry_out(studies.full_spec(), place / "digits-full", stream)
    check.check(found.full, found.differences, {})
    found.seconds["digits-full"] = round(progress.seconds - found.seconds["digits"], 1)


@dataclass(kw_only=True)
class _Found:
    """What there is so far, and how it is judged and written."""

    options: Options
    quadratic: quadratic.QuadraticStudy | None = None
    quick: Measured | None = None
    main: Measured | None = None
    moved: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    full: Measured | None = None
    long: long.LongResult | None = None
    differences: check.Differences = field(default_factory=check.Differences)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def write(self) -> Result:
        """Judge, draw and write everything."""
        directory = self.options.directory
        claims = self._claims()
        result = Result(
            name="batch-size",
            title=TITLE,
            claims=claims,
            environment=self._environment(),
            tables=self._tables(),
            caveats=(*self._quadratic_caveats(), *tables.CAVEATS),
            choices=tables.CHOICES,
            not_run=self._reasons(claims),
            figures=self._draw(),
            raw=self._raw(),
        )
        write_json(directory / "result.json", result.to_dict())
        write_text(directory / "report.html", render(result, directory))
        return result

    def _claims(self) -> tuple[Claim, ...]:
        assert self.quadratic is not None
        claims = [*quadratic.judge(self.quadratic)]
        if self.main is not None and self.full is not None:
            claims += self._digits_claims(self.main, self.full)
        else:
            claims += [s.not_run() for s in criteria.DIGITS if s is not criteria.P11]
            claims.append(self._rederived())
            claims += [s.not_run() for s in criteria.PAPER]
        if self.quick is not None:
            claims += digits.judge_quick(self.quick.analysis, (self.quick.spec.seed,))
        return tuple(claims)

    def _digits_claims(self, main: Measured, whole: Measured) -> list[Claim]:
        analysis, seeds, full_seeds = main.analysis, (main.spec.seed,), (whole.spec.seed,)
        budgets = full.budget_table(whole)
        p9 = full.judge_budgets(budgets, full.perfect_to(main), full_seeds)
        judged = digits.judge_digits(analysis, seeds, self.moved)
        sgd = analysis.main.fits.get(SGD)
        c2, c8 = long.judge_long(self.long, sgd)
        return [
            *judged[:-1],
            p9,
            judged[-1],
            self._rederived(),
            paper.judge_form(self._fits(main, whole), seeds),
            c2,
            paper.judge_momentum(analysis, seeds),
            paper.judge_rules(analysis, seeds),
            full.judge_test(full.test_errors(whole), full_seeds),
            paper.judge_same_as(p9),
            full.judge_shares(full.good_shares(whole), full_seeds),
            c8,
        ]

    def _rederived(self) -> Claim:
        studies_ = (self.quick, self.main, self.full)
        seeds = tuple(study.spec.seed for study in studies_ if study is not None)
        return check.judge_rederived(self.differences, seeds)

    def _fits(self, main: Measured, whole: Measured) -> list[paper.NamedFit]:
        fits = paper.fits_of("digits", main.analysis)
        fits.append(
            paper.NamedFit(name="digits training cross entropy", fit=full.training_fit(whole))
        )
        if self.long is not None:
            for name, study in self.long.studies.items():
                fits += paper.fits_of(name, study.analysis)
        return fits

    def _quadratic_caveats(self) -> tuple[str, ...]:
        assert self.quadratic is not None
        return quadratic.caveats(self.quadratic)

    def _tables(self) -> tuple[Table, ...]:
        assert self.quadratic is not None
        shown = [quadratic.table(self.quadratic)]
        if self.quick is not None:
            title = "Digits, one small search per point (smoke test)"
            shown.append(tables.steps_table(self.quick.analysis, title))
        if self.main is not None:
            repeats = self.main.spec.repeats
            shown.append(
                tables.steps_table(self.main.analysis, f"Digits, {repeats} searches per point")
            )
        if self.full is not None:
            shown.append(tables.budgets_table(full.budget_table(self.full)))
        if self.long is not None:
            shown.append(long.table(self.long))
        return tuple(shown)

    def _draw(self) -> tuple[tuple[str, str], ...]:
        assert self.quadratic is not None
        directory = self.options.directory
        drawn = [("figures/quadratic.svg", "Noisy quadratic: steps against batch, exact")]
        figures.draw_quadratic(self.quadratic, directory / drawn[0][0])
        study = self.main or self.quick
        if study is not None:
            drawn.append(("figures/steps.svg", "Digits: steps against batch, range of searches"))
            figures.draw_steps(study.analysis, directory / drawn[-1][0])
            drawn.append(("figures/rates.svg", "Digits: best effective learning rate"))
            figures.draw_rates(study.analysis, directory / drawn[-1][0])
        if self.full is not None:
            drawn.append(("figures/budgets.svg", "Digits: best error under budgets"))
            figures.draw_budgets(full.budget_table(self.full), directory / drawn[-1][0])
        for name, study in (self.long.studies if self.long else {}).items():
            drawn.append((f"figures/{name}.svg", f"Fashion-MNIST, {name}: steps against batch"))
            figures.draw_steps(study.analysis, directory / drawn[-1][0])
        return tuple(drawn)

    def _reasons(self, claims: Sequence[Claim]) -> dict[str, str]:
        return {
            claim.id: self._reason(claim.id) for claim in claims if claim.verdict is Verdict.NOT_RUN
        }

    def _reason(self, name: str) -> str:
        if name not in (criteria.C2.id, criteria.C8.id):
            return "needs the whole study of digits, which --quick leaves out"
        if self.long is None:
            return "--long was not given"
        done = sum(self.long.finished.values())
        if not self.long.is_whole:
            return f"{done} of {long.SEARCHES} searches are finished; run the same command again"
        return "too few of the fits may be used: see the table"

    def _environment(self) -> dict[str, object]:
        packages = ("torch", "numpy", "scipy", "duckdb", "scikit-learn")
        return environment(packages) | {
            "command": self.options.command,
            "processes": studies.processes(),
            "dataset": "digits of scikit-learn (1,024 / 386 / 387)"
            + (", Fashion-MNIST" if self.options.is_long else ""),
            "seconds": dict(self.seconds),
        }

    def _raw(self) -> Mapping[str, object]:
        assert self.quadratic is not None
        raw: dict[str, object] = {"quadratic": self.quadratic.to_dict()}
        for study in (self.quick, self.main, self.full):
            if study is not None:
                raw[study.spec.name] = {
                    f"{row.curve}-b{row.global_batch}-r{row.repeat}-{row.goal:g}": row.steps
                    for goal in study.analysis.goals
                    for row in goal.rows
                }
        if self.moved:
            raw["recentred"] = [f"{curve} at {batch}" for curve, batch in self.moved]
        return raw
