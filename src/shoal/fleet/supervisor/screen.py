"""What a person sees of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from shoal.fleet.supervisor.member import Member, number

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.25
RATE_SECONDS = 10.0
Row = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class View:
    """The run at one moment. None where nobody has said it."""

    members: tuple[Member, ...]  # all that live
    workers: int  # members of the last committed step
    starting: int  # those that have never taken part and are not asked to leave
    step: float
    samples: float
    total_samples: float | None
    epoch: float | None
    global_batch: float | None
    lr: float | None
    lr_target: float | None
    loss: float | None
    rate: float | None  # samples per second

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the present rate."""
        if not self.rate or self.total_samples is None:
            return None
        return max(0.0, self.total_samples - self.samples) / self.rate


class Progress:
    """Makes views of the members' reports; measures samples per second over the last seconds."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, float]] = deque()

    def view(self, members: Sequence[Member], now: float) -> View:
        """The view at ``now``, of the report that has come furthest."""
        row: Row = max((m.row for m in members), key=lambda r: number(r, "samples", -1), default={})
        samples = number(row, "samples", 0)
        if samples > 0 and (not self._history or samples != self._history[-1][1]):
            self._history.append((now, samples))
        while len(self._history) > 2 and now - self._history[1][0] > RATE_SECONDS:
            self._history.popleft()
        rate = None
        if len(self._history) > 1:
            (first, before), (_, after) = self._history[0], self._history[-1]
            rate = (after - before) / (now - first) if after > before and now > first else None
        return View(
            members=tuple(members),
            workers=int(number(row, "workers", 0)) if number(row, "commits", 0) > 0 else 0,
            starting=sum(m.commits <= 0 and m.leave is None for m in members),
            step=number(row, "step", 0),
            samples=samples,
            total_samples=_maybe(row, "total_samples"),
            epoch=_maybe(row, "epoch"),
            global_batch=_maybe(row, "global_batch"),
            lr=_maybe(row, "lr"),
            lr_target=_maybe(row, "lr_target"),
            loss=_maybe(row, "loss"),
            rate=rate,
        )


class Screen(Protocol):
    """Where the supervisor shows things; called from its loop alone."""

    def line(self, text: str) -> None:
        """One line, at once."""
        ...

    def show(self, view: View) -> None:
        """The present state; shown as often as is pleasant."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainScreen:
    """One line per event, and one of progress every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = time.monotonic()
        self._last = ""

    def line(self, text: str) -> None:
        """Print the line; where nobody can read it, the run goes on all the same."""
        with contextlib.suppress(OSError):
            print(text, file=self._stream, flush=True)

    def show(self, view: View) -> None:
        """Print a line of progress if it is time and anything has moved."""
        now = time.monotonic()
        if now - self._shown >= PLAIN_SECONDS and view.step > 0:
            self._shown = now
            text = progress_line(view)
            if text != self._last:
                self.line(text)
            self._last = text

    def close(self) -> None:
        """Nothing to restore."""


class LiveScreen:
    """A table that stays at the bottom of the terminal, lines above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._shown = 0.0

    def line(self, text: str) -> None:
        """Print the line above the table; without a terminal the run goes on all the same."""
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, view: View) -> None:
        """Draw the table anew, a few times a second."""
        now = time.monotonic()
        if now - self._shown >= LIVE_SECONDS:
            self._shown = now
            with contextlib.suppress(OSError):
                self._live.update(live_table(view, self._title), refresh=True)

    def close(self) -> None:
        """Leave the last table standing."""
        with contextlib.suppress(OSError):
            self._live.stop()


def open_screen(stream: TextIO, title: str) -> Screen:
    """The live table when the stream is a terminal, else plain lines."""
    return LiveScreen(stream, title) if stream.isatty() else PlainScreen(stream)


def live_table(view: View, title: str) -> Table:
    """The table of workers with the run's numbers below."""
    from rich.table import Table

    table = Table(title=title, caption=progress_line(view), caption_justify="left", expand=False)
    for column in ("worker", "host", "pid", "phase", "step"):
        table.add_column(column, justify="right" if column in ("pid", "step") else "left")
    for member in view.members:
        step = number(member.row, "step", -1)
        table.add_row(
            member.name,
            member.host or "local",
            str(member.pid or ""),
            phase_text(member),
            f"{step:.0f}" if step >= 0 else "",
        )
    return table


def phase_text(member: Member) -> str:
    """What a worker is doing, in a word."""
    if member.leave is not None:
        return "leaving"
    if member.row:
        return str(member.row.get("phase", ""))
    if member.at_barrier:
        return "ready"
    return "starting" if member.hello is None else "setting up"


def progress_line(view: View) -> str:
    """The run's numbers in one line."""
    parts = [f"step {view.step:.0f}", f"samples {view.samples:,.0f}"]
    if view.total_samples:
        parts[-1] += f" of {view.total_samples:,.0f}"
    if view.epoch is not None:
        parts.append(f"epoch {view.epoch:.0f}")
    parts.append(f"workers {view.workers}")
    if view.starting:
        parts[-1] += f" +{view.starting} starting"
    if view.global_batch is not None:
        parts.append(f"global batch {view.global_batch:.0f}")
    if view.lr is not None:
        parts.append(lr_text(view.lr, view.lr_target))
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    if view.rate is not None:
        parts.append(f"{view.rate:,.0f} samples/s")
    if view.eta_seconds is not None:
        parts.append(f"{duration(view.eta_seconds)} left")
    return " · ".join(parts)


def lr_text(lr: float, target: float | None) -> str:
    """The learning rate, and where it is heading if it is on its way."""
    return f"lr {lr:.4g}" if target is None or target == lr else f"lr {lr:.4g} → {target:.4g}"


def duration(seconds: float) -> str:
    """Seconds as ``12s``, ``3m05s`` or ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def event_line(row: Row) -> str:
    """One line for one event row."""
    kind = str(row.get("kind"))
    if kind in ("join", "leave", "kill"):
        return _membership_line(kind, row)
    if kind == "script_changed":
        hashes = (str(row.get(key) or "none") for key in ("sha256_at_start", "sha256"))
        return f"[{kind}] {row.get('text')} (sha256 {' → '.join(hashes)})"
    hidden = ("kind", "time", "config", "survivor", "script_sha256")
    shown = {k: v for k, v in row.items() if k not in hidden and v is not None and v != []}
    return " ".join([f"[{kind}]", " · ".join(f"{k} {_short(v)}" for k, v in shown.items())]).strip()


def _membership_line(kind: str, row: Row) -> str:
    names = row.get("names")
    who = ", ".join(map(str, names)) if isinstance(names, list) else ""
    parts = [
        f"[{kind}] step {_short(row.get('step'))}",
        f"samples {_short(row.get('samples'))}",
        f"workers {_short(row.get('workers_before'))} → {_short(row.get('workers_after'))}"
        + (f" ({who})" if who else ""),
        f"global batch {_short(row.get('global_batch'))}",
    ]
    lr = _maybe(row, "lr")
    if lr is not None:
        parts.append(lr_text(lr, _maybe(row, "lr_target")))
    if row.get("ramp_end_step") is not None:
        parts.append(f"ramp ends at step {_short(row['ramp_end_step'])}")
    lost = _maybe(row, "seconds_without_progress")
    if lost is not None:
        parts.append(f"{lost:.2f} s without progress")
    return " · ".join(parts)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_short(item) for item in value)
    return str(value)


def _maybe(row: Row, key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
