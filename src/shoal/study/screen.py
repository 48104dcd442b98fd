"""How a study's progress looks: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from shoal.study.run import Running
from shoal.study.status import BatchStatus, seconds_left, status_of

if TYPE_CHECKING:
    from rich.table import Table

_LOOK_SECONDS = 1.0
_LINE_SECONDS = 10.0
COLUMNS = (
    "curve",
    "batch",
    "searches",
    "S",
    "S_conf",
    "reached",
    "diverged",
    "engine",
    "now",
    "left",
)


def cells(row: BatchStatus) -> tuple[str, ...]:
    """One curve and batch as the words of :data:`COLUMNS`."""
    searches = f"{row.done}/{row.searches}"
    if row.running:
        searches += f" +{row.running}"
    reached = "-" if not row.done else f"{row.reached}/{row.done}"
    if row.short:
        reached += f", {row.short} short"
    return (
        row.curve,
        f"{row.global_batch:,}",
        searches,
        "-" if row.steps is None else f"{row.steps:,.0f}",
        "-" if row.confirmed is None else f"{row.confirmed:,.0f}",
        reached,
        f"{row.diverged}/{row.trials}",
        row.engine or "-",
        f"step {row.step:,}" if row.running and row.step else "",
        _time(row.seconds_left) if row.done < row.searches else "",
    )


def table(rows: Sequence[BatchStatus], title: str) -> Table:
    """The same as a table for a terminal."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("curve", "engine") else "right")
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def title(rows: Sequence[BatchStatus], name: str) -> str:
    """One line about the whole study."""
    done, searches = sum(r.done for r in rows), sum(r.searches for r in rows)
    left = seconds_left(rows)
    rest = "" if done == searches or left is None else f", about {_time(left)} left"
    return f"{name}: {done} of {searches} searches done{rest}"


def lines(rows: Sequence[BatchStatus]) -> list[str]:
    """The table as plain lines."""
    content = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in content) for i in range(len(COLUMNS))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in content
    ]


class Onlooker:
    """Shows a running study, as a context; give :meth:`look` to ``run_study``.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._next = 0.0
        self._last = ""
        self._close: Callable[[], None] | None = None
        self._show: Callable[[list[BatchStatus], str], None] = self._line
        self._pause = _LINE_SECONDS

    def __enter__(self) -> Onlooker:
        if self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            live = Live(console=Console(file=self._out), auto_refresh=False, transient=False)
            live.start()
            self._close = live.stop
            self._pause = _LOOK_SECONDS
            self._show = lambda rows, line: live.update(table(rows, line), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._close is not None:
            self._close()

    def look(self, running: Running, *, at_once: bool = False) -> None:
        """Read how far the study is and show it, now and then."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return
        self._next = now + self._pause
        rows = status_of(running.directory, running.spec.searches(), processes=running.processes)
        self._show(rows, title(rows, running.spec.name))

    def _line(self, rows: list[BatchStatus], line: str) -> None:
        busy = [r for r in rows if r.running]
        at = "; ".join(f"{r.curve} at batch {r.global_batch:,}: step {r.step:,}" for r in busy)
        text = f"{line}{' · ' + at if at else ''}"
        if text != self._last:
            self._last = text
            print(text, file=self._out, flush=True)


def _time(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
