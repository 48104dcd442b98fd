"""``shoal reproduce dynamic`` from the first number to the last file."""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from shoal.errors import ResumableStop, UsageError
from shoal.reproduce.claims import Claim, Verdict
from shoal.reproduce.dynamic import criteria, figures, methods, tables, tier1, tier2
from shoal.reproduce.dynamic.long import (
    Images,
    LongSettings,
    cell_store,
    cells,
    judge_long,
    load_images,
    run_long,
)
from shoal.reproduce.dynamic.tier2 import DigitsRows, DigitsSettings
from shoal.reproduce.page import render
from shoal.reproduce.progress import Progress, duration
from shoal.reproduce.result import Result, environment, write_json, write_text

TITLE = "Dynamic Mini-batch SGD (Lin et al. 2019), reproduced in small"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says.

    Args:
        directory: where everything is written.
        is_quick: tier 1 and 4 seeds of tier 2.
        is_long: the Fashion-MNIST runs too.
        seed_base: first seed of tier 2; None for the recorded ones.
        long_cells: stop in order after so many new long runs; None for all of them.
    """

    directory: Path
    is_quick: bool = False
    is_long: bool = False
    seed_base: int | None = None
    long_cells: int | None = None

    @property
    def command(self) -> str:
        """The command that makes this result, less its directory."""
        words = ["shoal reproduce dynamic"]
        words += ["--quick"] if self.is_quick else []
        words += ["--long"] if self.is_long else []
        words += [f"--seed-base {self.seed_base}"] if self.seed_base is not None else []
        return " ".join(words)

    def digits(self) -> DigitsSettings:
        """Tier 2 as asked for."""
        if self.is_quick:
            base, count = tier2.QUICK_SEED_BASE, tier2.QUICK_SEEDS
        else:
            base, count = tier2.RECORDED_SEED_BASE, tier2.RECORDED_SEEDS
        chosen = base if self.seed_base is None else self.seed_base
        return DigitsSettings(seeds=tier2.seeds_from(chosen, count))


def run_dynamic(options: Options, stream: TextIO) -> Result:
    """Run what is asked for and write ``result.json``, the figures and ``report.html``.

    Args:
        options: see :class:`Options`.
        stream: where progress goes.

    Returns:
        What was written. One thread is used, whatever the process is set to.

    Raises:
        UsageError: an option, directory or package that cannot be used; nothing was written.
        ResumableStop: a long experiment was stopped in order; all that was finished is written.
    """
    _check(options)
    settings = LongSettings()
    images = load_images() if options.is_long else None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        writer = _measure(options, stream)
        result = writer.write({})
        if images is None:
            return result
        return _continue_long(options, settings, images, writer, stream)
    finally:
        torch.set_num_threads(threads)


def _check(options: Options) -> None:
    needed = {"sklearn": "examples", "matplotlib": "report", "jinja2": "report"}
    for module, extra in needed.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(
                f"{module} is not installed; shoal reproduce dynamic needs it; "
                f"pip install 'shoal[{extra}]'"
            )
    if options.directory.exists() and not options.directory.is_dir():
        raise UsageError(
            f"--out = {options.directory}; it must be a directory or not exist yet; "
            "choose another --out"
        )
    if options.seed_base is not None and options.seed_base < 0:
        raise UsageError(
            f"--seed-base = {options.seed_base}; seeds are whole numbers from 0 on; "
            "leave it out for the recorded seeds"
        )
    if options.long_cells is not None and (options.long_cells < 1 or not options.is_long):
        raise UsageError(
            f"--long-cells = {options.long_cells}; it bounds the new runs of --long and is at "
            "least 1; add --long, or leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """Tiers 1 and 2, measured and drawn, and how the whole is written beside them."""

    options: Options
    responses: tier1.Responses
    rows: DigitsRows
    seconds: Mapping[str, float]

    def write(self, finished: Mapping[str, Mapping[str, Any]]) -> Result:
        """Judge, draw and write everything, with these long cells."""
        directory, settings = self.options.directory, LongSettings()
        claims = (
            *criteria.judge_tier1(tier1.peaks(self.responses)),
            *criteria.judge_tier2(paired(self.rows)),
            *judge_long(settings, dict(finished)),
        )
        shown = (
            tier1.table(self.responses),
            tables.main_table(self.rows),
            tables.short_table(self.rows),
            tables.seed_table(self.rows),
            *((tables.long_table(settings, finished),) if self.options.is_long else ()),
        )
        result = Result(
            name="dynamic",
            title=TITLE,
            claims=claims,
            environment=self._environment(),
            tables=shown,
            caveats=tables.caveats(self.rows),
            choices=tables.CHOICES,
            not_run=self._reasons(claims, len(finished), len(cells(settings))),
            figures=self._draw(),
            raw={
                "digits": {name: row.to_dict() for name, row in self.rows.main.items()},
                "digits_short": {
                    str(epochs): {name: row.to_dict() for name, row in table.items()}
                    for epochs, table in self.rows.short.items()
                },
                "long": dict(finished),
            },
        )
        write_json(directory / "result.json", result.to_dict())
        write_text(directory / "report.html", render(result, directory))
        return result

    def _environment(self) -> dict[str, object]:
        return environment(("torch", "numpy", "scikit-learn")) | {
            "command": self.options.command,
            "dataset": "digits of scikit-learn (1,437 train, 360 test)"
            + (", Fashion-MNIST" if self.options.is_long else ""),
            "seconds": dict(self.seconds),
        }

    def _reasons(self, claims: tuple[Claim, ...], finished: int, all_cells: int) -> dict[str, str]:
        seeds = len(self.rows.settings.seeds)
        digits = f"needs {criteria.SEEDS_NEEDED} seeds and this run had {seeds}"
        long = (
            f"{finished} of {all_cells} runs are finished; run the same command again"
            if self.options.is_long
            else "--long was not given"
        )
        digits_ids = {statement.id for statement in criteria.TIER2}
        return {
            claim.id: digits if claim.id in digits_ids else long
            for claim in claims
            if claim.verdict is Verdict.NOT_RUN
        }

    def _draw(self) -> tuple[tuple[str, str], ...]:
        directory = self.options.directory / "figures"
        figures.draw_tier1(self.responses, directory / "quadratic.svg")
        figures.draw_spikes(self.rows, directory / "spikes.svg")
        figures.draw_accuracies(self.rows, directory / "accuracies.svg")
        figures.draw_short(self.rows, directory / "short.svg")
        return (
            ("figures/quadratic.svg", "Noisy quadratic: expected loss after a change, exact"),
            ("figures/spikes.svg", "Digits: training loss around a scale-out from 1 to 16 workers"),
            ("figures/accuracies.svg", "Digits: test accuracy, every method and seed"),
            ("figures/short.svg", "Digits: short static runs"),
        )


def paired(rows: DigitsRows) -> criteria.PairedRuns:
    """What the claims of tier 2 are judged by."""
    short = rows.short[4]
    return criteria.PairedRuns(
        seeds=rows.settings.seeds,
        static=rows.main[methods.STATIC].accuracy,
        linear=rows.main[methods.LINEAR].accuracy,
        dynamic=rows.main[methods.DYNAMIC].accuracy,
        linear_spike=rows.main[methods.LINEAR].spike,
        dynamic_spike=rows.main[methods.DYNAMIC].spike,
        short_linear=short[methods.SHORT_LINEAR].accuracy,
        short_none=short[methods.SHORT_NONE].accuracy,
    )


def _measure(options: Options, stream: TextIO) -> _Writer:
    from shoal.workloads.digits_mlp import load_digits_task

    settings = options.digits()
    progress = Progress(tier2.total_work(settings), stream=stream)
    responses = tier1.run_tier1()
    first = progress.seconds
    print(f"noisy quadratic, exact: done in {duration(first)}", file=stream, flush=True)
    progress = Progress(tier2.total_work(settings), stream=stream)
    rows = tier2.run_tier2(load_digits_task(), settings, progress)
    seconds = {"quadratic": round(first, 1), "digits": round(progress.seconds, 1)}
    return _Writer(options=options, responses=responses, rows=rows, seconds=seconds)


def _continue_long(
    options: Options, settings: LongSettings, images: Images, writer: _Writer, stream: TextIO
) -> Result:
    store = cell_store(options.directory / "long", settings, images)
    wanted = cells(settings)
    work = settings.epochs * len(images.train_labels)
    progress = Progress(work * len(wanted), stream=stream)
    with _stop_on_sigterm():
        try:
            finished = run_long(settings, images, store, progress, most_cells=options.long_cells)
        except KeyboardInterrupt:
            finished = {}
            for cell in wanted:
                values = store.read(cell.name)
                if values is not None:
                    finished[cell.name] = values
    result = writer.write(finished)
    if len(finished) < len(wanted):
        raise ResumableStop(
            f"{len(finished)} of {len(wanted)} long runs are finished and kept in "
            f"{store.directory}; run the same command again to go on"
        )
    return result


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C while a long experiment runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
