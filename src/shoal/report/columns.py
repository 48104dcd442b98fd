"""From the rows that workers wrote to columns of steps, spells of workers and counts of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, object]
Floats = NDArray[np.float64]

COLUMNS = (
    "step",
    "epoch",
    "samples",
    "seconds",
    "workers",
    "global_batch",
    "lr",
    "lr_target",
    "multiplier",
    "loss",
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The committed steps in order, one entry each; NaN where a row did not say.

    Args:
        step: optimizer steps committed, this one included.
        epoch: epoch the step's samples belong to.
        samples: samples committed, this step included.
        seconds: time of the commit since the run began, non-decreasing.
        workers: number of workers that took part.
        global_batch: nominal global batch, in samples.
        lr: learning rate of the step.
        lr_target: learning rate the scaling rule is heading for.
        multiplier: what the scaling rule multiplied by.
        loss: mean training loss over the step's samples (uneven shares are weighted).
    """

    step: Floats
    epoch: Floats
    samples: Floats
    seconds: Floats
    workers: Floats
    global_batch: Floats
    lr: Floats
    lr_target: Floats
    multiplier: Floats
    loss: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class Spell:
    """One worker's uninterrupted presence, from its first to its last committed step."""

    first_step: int
    last_step: int
    first_samples: float
    last_samples: float


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What one worker did: its committed steps, samples and how it came and went."""

    name: str
    steps: int
    samples: int
    spells: tuple[Spell, ...]
    came: str
    went: str


def number(value: object) -> float:
    """``value`` as a float; NaN when it is no number (texts such as ``"nan"`` are read)."""
    if isinstance(value, bool) or value is None:
        return math.nan
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    return math.nan


def _by_step(lineage: Iterable[Row]) -> list[list[Row]]:
    """The lineage's rows grouped by committed step, in order."""
    groups: dict[float, list[Row]] = {}
    for row in lineage:
        key = number(row.get("commits"))
        groups.setdefault(key if not math.isnan(key) else number(row.get("step")), []).append(row)
    return [groups[key] for key in sorted(groups)]


def _share(row: Row) -> float:
    """How many samples a row's worker contributed; NaN when the row does not say."""
    return number(row.get("to")) - number(row.get("from"))


def _mean_loss(group: Sequence[Row]) -> float:
    """The step's mean loss, each worker weighted by its share; non-finite if any worker's was."""
    pairs = [(number(row.get("loss")), _share(row)) for row in group]
    pairs = [(loss, share) for loss, share in pairs if share != 0]
    if not pairs:
        return math.nan
    if any(math.isnan(share) for _, share in pairs):
        pairs = [(loss, 1.0) for loss, _ in pairs]
    return sum(loss * share for loss, share in pairs) / sum(share for _, share in pairs)


def columns_of(lineage: Sequence[Row], start: float) -> Steps:
    """One entry per committed step out of the rows of all its workers."""
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for group in _by_step(lineage):
        first = group[0]
        times = sorted(number(row.get("time")) - start for row in group)
        columns["seconds"].append(times[len(times) // 2])
        columns["loss"].append(_mean_loss(group))
        for name in COLUMNS:
            if name not in ("seconds", "loss"):
                columns[name].append(number(first.get(name)))
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
    if len(arrays["seconds"]):
        # Clocks of different workers may disagree by a little; order is given by the commits.
        filled = np.nan_to_num(arrays["seconds"], nan=-np.inf)
        ordered = np.maximum.accumulate(filled)
        arrays["seconds"] = np.where(np.isfinite(ordered), ordered, 0.0)
    return Steps(**arrays)


def place_events(events: Sequence[Row], steps: Steps, start: float) -> list[Row]:
    """Events with ``at`` (samples) and ``seconds`` (since the start) added, in order of time."""
    placed: list[Row] = []
    for row in events:
        seconds = number(row.get("time")) - start
        at = number(row.get("samples"))
        if math.isnan(at) and len(steps):
            step = number(row.get("step"))
            if not math.isnan(step):
                at = float(np.interp(step, steps.step, steps.samples))
            elif not math.isnan(seconds):
                at = float(np.interp(seconds, steps.seconds, steps.samples))
        placed.append({**row, "at": at, "seconds": seconds})
    return placed


def workers_of(lineage: Sequence[Row], events: Sequence[Row]) -> tuple[Worker, ...]:
    """What each worker did, in order of appearance."""
    rows: dict[str, list[Row]] = {}
    for row in lineage:
        rows.setdefault(str(row.get("worker", f"rank {row.get('rank', '?')}")), []).append(row)
    came: dict[str, str] = {}
    went: dict[str, str] = {}
    for event in events:
        names = event.get("names")
        for name in map(str, names) if isinstance(names, (list, tuple)) else ():
            where = f"step {event.get('step', '?')}"
            if event["kind"] == "join":
                came.setdefault(name, f"joined at {where}")
                went.pop(name, None)
            elif event["kind"] in ("leave", "kill"):
                went[name] = f"{'left' if event['kind'] == 'leave' else 'killed'} at {where}"
    return tuple(
        Worker(
            name=name,
            steps=len(own),
            samples=int(sum(share for row in own if not math.isnan(share := _share(row)))),
            spells=_spells(own),
            came=came.get(name, "from the start" if number(own[0].get("step")) <= 1 else "joined"),
            went=went.get(name, "present at the end"),
        )
        for name, own in rows.items()
    )


def _spells(rows: Sequence[Row]) -> tuple[Spell, ...]:
    """The uninterrupted stretches of committed steps in one worker's rows."""
    spells: list[Spell] = []
    run: list[Row] = []
    for row in rows:
        if run and number(row.get("commits")) > number(run[-1].get("commits")) + 1:
            spells.append(_spell(run))
            run = []
        run.append(row)
    return (*spells, _spell(run)) if run else ()


def _spell(rows: Sequence[Row]) -> Spell:
    first, last = rows[0], rows[-1]
    begin = number(first.get("samples")) - number(first.get("global_batch"))
    return Spell(
        first_step=int(np.nan_to_num(number(first.get("step")))),
        last_step=int(np.nan_to_num(number(last.get("step")))),
        first_samples=max(0.0, begin) if not math.isnan(begin) else 0.0,
        last_samples=float(np.nan_to_num(number(last.get("samples")))),
    )


def count_samples(lineage: Sequence[Row]) -> dict[str, int]:
    """Samples used, used again and passed over, counted from the positions in the committed rows.

    A step's rows hold positions ``[from, to)`` of the epoch's order. A row that repeats another one
    of the same step (all workers wrote the step's range, not their own share) counts once.

    Returns:
        ``used``, ``repeated`` and ``missed`` (below the furthest position of each epoch); empty
        when a row holds no positions.
    """
    spans: dict[float, list[tuple[int, int]]] = {}
    for group in _by_step(lineage):
        for span in {
            (number(row.get("from")), number(row.get("to")), number(row.get("epoch")))
            for row in group
        }:
            if any(math.isnan(value) for value in span):
                return {}
            spans.setdefault(span[2], []).append((int(span[0]), int(span[1])))
    if not spans:
        return {}
    used = repeated = missed = 0
    for ranges in spans.values():
        reach = 0
        for begin, end in sorted(ranges):
            used += end - begin
            missed += max(0, begin - reach)
            repeated += max(0, min(reach, end) - begin)
            reach = max(reach, end)
    return {"used": used, "repeated": repeated, "missed": missed}
