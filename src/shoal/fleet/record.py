"""What a worker writes down while it trains: metrics rows, membership events, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.fleet.batch_policy import idle_remedy, idle_workers
from shoal.fleet.plan import StepPlan
from shoal.fleet.state import Progress
from shoal.fleet.step import Committed
from shoal.ledger.journal import Journal
from shoal.scaling import Rule, check_range
from shoal.world.contract import Change, World


class Recorder:
    """Writes this worker's metrics file and hands events to the supervisor.

    Args:
        world: takes events and progress.
        name: this worker's name; its metrics go to ``metrics/NAME.jsonl``.
        run_dir: the run's directory, or None to write nothing.
        owns_events: no supervisor prints events and writes ``events.jsonl``, so this worker does.
    """

    def __init__(self, world: World, *, name: str, run_dir: Path | None, owns_events: bool) -> None:
        self._world = world
        self._name = name
        self._run_dir = run_dir
        self._owns_events = owns_events
        # Opened by the first row, so that a mistake found before it leaves nothing behind.
        self._metrics: Journal | None = None
        self._events: Journal | None = None
        self._ended: set[str] = set()
        self._known_batches: set[int] = set()
        self._known_idle: set[int] = set()
        self._standing: dict[str, float | int | str] = {}
        self._pending: list[Change] = []
        self._last_commit = time.time()
        self._gap_from: float | None = None

    def changes(self, changes: list[Change]) -> None:
        """Keep membership changes until the first commit after them, which ends their gap."""
        if changes and not self._pending:
            self._gap_from = self._last_commit
        self._pending.extend(changes)

    def standing(
        self,
        progress: Progress,
        *,
        workers: int,
        total_samples: int | None,
        plan: StepPlan | None,
        last: Committed | None,
    ) -> None:
        """Renew what the supervisor is told with every phase."""
        now: dict[str, float | int | str] = {
            "step": progress.step,
            "samples": progress.cursor,
            "commits": progress.commits,
            "epoch": progress.epoch,
            "workers": workers,
        }
        if total_samples is not None:
            now["total_samples"] = total_samples
        if plan is not None:
            now["global_batch"] = plan.nominal
        if last is not None:
            now |= {"lr": last.lr, "lr_target": last.lr_target, "loss": last.loss}
        self._standing = now

    def check_range(self, rule: Rule[Any], global_batch: int) -> None:
        """Warn, once for each global batch, outside of what the scaling rule was tested at."""
        if global_batch in self._known_batches:
            return
        self._known_batches.add(global_batch)
        text = check_range(rule, global_batch)
        if text is not None:
            print(f"shoal: {text}", file=sys.stderr, flush=True)

    def check_idle(self, plan: StepPlan, micro_batch: int) -> None:
        """Say, once for each number of workers, that a full step leaves some of them without samples."""
        workers = plan.membership.workers
        full = plan.stop - plan.start == plan.nominal
        if not plan.someone_idle or not full or workers in self._known_idle:
            return
        self._known_idle.add(workers)
        if 0 not in plan.membership.ranks:
            return
        idle = idle_workers(plan.nominal, micro_batch, workers)
        pieces = workers - idle
        print(
            f"shoal: {idle} of {workers} workers {'has' if idle == 1 else 'have'} no share of a step; a "
            f"global batch of {plan.nominal} samples is {pieces} micro-batch{'es' * (pieces != 1)} of at "
            f"most {micro_batch}; {idle_remedy(plan.nominal, workers)}",
            file=sys.stderr,
            flush=True,
        )

    def phase(self, phase: str) -> None:
        """Tell the supervisor what this worker is doing: the watchdog judges by it who hangs."""
        self._world.report({**self._standing, "phase": phase})

    def committed(self, done: Committed, progress: Progress) -> list[dict[str, object]]:
        """Write one committed step; returns the membership events it brought to an end."""
        now = time.time()
        self._store(done, progress, now)
        pending, self._pending = self._pending, []
        joined = {name for change in pending if change.kind == "join" for name in change.names}
        since = self._gap_from if self._gap_from is not None else now
        rows = [
            _membership_event(change, done, progress, now, now - since)
            for change in pending
            if _speaks(done, joined)
        ]
        for row in rows:
            self.event(row)
            if self._owns_events:
                print(event_line(row), file=sys.stderr, flush=True)
        self._last_commit, self._gap_from = now, None
        return rows

    def _store(self, done: Committed, progress: Progress, now: float) -> None:
        """Write one metrics row; a full disk costs the metrics, not the training."""
        if self._run_dir is None or "metrics" in self._ended:
            return
        row = {
            "step": progress.step,
            "commits": progress.commits,
            "row": progress.row,
            "parent_row": done.parent_row,
            "lineage": progress.lineage,
            "epoch": (progress.cursor - 1) // progress.samples if progress.samples else 0,
            "from": done.plan.start,
            "to": done.plan.stop,
            "workers": done.plan.membership.workers,
            "rank": done.plan.membership.ranks[0],
            "global_batch": done.plan.nominal,
            "samples": progress.cursor,
            "lr": done.lr,
            "multiplier": done.multiplier,
            "lr_target": done.lr_target,
            "loss": done.loss,
            "time": now,
        }
        try:
            self._metrics = self._metrics or _open(
                self._run_dir / "metrics" / f"{self._name}.jsonl"
            )
            self._metrics.append(row)
        except OSError as error:
            self._end("metrics", error)

    def _end(self, what: str, error: OSError) -> None:
        """Write no more of these; said once."""
        self._ended.add(what)
        print(
            f"shoal: {what} of {self._name} end here ({error}); training goes on",
            file=sys.stderr,
            flush=True,
        )

    def event(self, row: Mapping[str, object]) -> None:
        """Store an event through whoever owns ``events.jsonl``."""
        row = {"time": time.time(), **row}
        if self._owns_events and self._run_dir is not None and "events" not in self._ended:
            try:
                self._events = self._events or _open(self._run_dir / "events.jsonl")
                self._events.append(dict(row))
            except OSError as error:
                self._end("events", error)
        self._world.event(row)

    def close(self) -> None:
        """Close the files."""
        for journal in (self._metrics, self._events):
            if journal is not None:
                journal.close()


def _open(path: Path) -> Journal:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Journal(path)


def _speaks(done: Committed, joined: set[str]) -> bool:
    """One worker reports the changes: the first in rank that was there before them."""
    membership = done.plan.membership
    old = [rank for rank, name in enumerate(membership.names) if name not in joined]
    return bool(old) and old[0] in membership.ranks


def _membership_event(
    change: Change, done: Committed, progress: Progress, now: float, gap: float
) -> dict[str, object]:
    return {
        "kind": change.kind,
        "time": now,
        "step": progress.step - 1,
        "samples": done.plan.start,
        "workers_before": change.workers_before,
        "workers_after": change.workers_after,
        "names": list(change.names),
        "global_batch": done.plan.nominal,
        "lr": done.lr,
        "lr_target": done.lr_target,
        "ramp_end_step": done.ramp_end,
        "seconds_without_progress": round(gap, 4),
    }


def event_line(row: Mapping[str, object]) -> str:
    """One printed line for a membership event: step, samples, workers, batch, learning rate, ramp."""
    ramp = row.get("ramp_end_step")
    tail = f", ramp ends at step {ramp}" if ramp is not None else ""
    return (
        f"{row['kind']:<5} step {row['step']:>6}  samples {row['samples']:>9,}  "
        f"workers {row['workers_before']} -> {row['workers_after']}  "
        f"global batch {row['global_batch']}  lr {row['lr']:.6g} -> {row['lr_target']:.6g}{tail}  "
        f"({row['seconds_without_progress']:.2f} s without progress)"
    )
