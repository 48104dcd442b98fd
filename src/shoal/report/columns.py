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
        loss: mean training loss over the step's samples, of all workers.
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
    """What one worker did: committed steps, samples (None if untold), how it came and went."""

    name: str
    steps: int
    samples: int | None
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


def columns_of(chain: Sequence[Row], start: float) -> Steps:
    """The committed steps, one row each and oldest first, as columns.

    Args:
        chain: what ``lineage.committed`` returned.
        start: the clock's reading that counts as 0 seconds.
    """
    arrays = {
        name: np.array([number(row.get(name)) for row in chain], dtype=np.float64)
        for name in COLUMNS
        if name != "seconds"
    }
    seconds = np.array([number(row.get("time")) - start for row in chain], dtype=np.float64)
    # Clocks of different machines may disagree by a little; the order is given by the commits.
    ordered = (
        np.maximum.accumulate(np.nan_to_num(seconds, nan=-np.inf)) if len(seconds) else seconds
    )
    return Steps(**arrays, seconds=np.where(np.isfinite(ordered), ordered, 0.0))


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
    # Workers and supervisor write at their own pace; a row without a time stays where it was.
    latest, keyed = -math.inf, []
    for row in placed:
        seconds = number(row["seconds"])
        keyed.append((latest if math.isnan(seconds) else seconds, row))
        latest = keyed[-1][0]
    return [row for _, row in sorted(keyed, key=lambda pair: pair[0])]


def workers_of(
    rows: Iterable[Row], events: Sequence[Row], micro_batch: int | None
) -> tuple[Worker, ...]:
    """What each worker did, in order of appearance.

    Args:
        rows: the rows of all workers on the committed lineage, with ``worker``, in any order.
        events: membership events, in order.
        micro_batch: with it each worker's share of a step is known from its rank.
    """
    own: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: number(row.get("commits"))):
        own.setdefault(str(row["worker"]), []).append(row)
    if len(own) == 1 and any(number(row.get("workers")) > 1 for row in next(iter(own.values()))):
        micro_batch = None  # one process that played several ranks (the virtual world)
    came, went = _movements(events)
    return tuple(
        Worker(
            name=name,
            steps=len(steps),
            samples=_samples(steps, micro_batch) if micro_batch else None,
            spells=_spells(steps),
            came=came.get(name, "from the start" if number(steps[0]["step"]) <= 1 else "joined"),
            went=went.get(name, "present at the end"),
        )
        for name, steps in own.items()
    )


def _movements(events: Sequence[Row]) -> tuple[dict[str, str], dict[str, str]]:
    """How each named worker came first and went last."""
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
    return came, went


def _samples(rows: Sequence[Row], micro_batch: int) -> int:
    """Samples one worker contributed: in each step the share of its rank."""
    from shoal.data.shares import shares

    cuts: dict[tuple[int, int], list[int]] = {}
    total = 0
    for row in rows:
        values = [number(row.get(key)) for key in ("from", "to", "workers", "rank")]
        if not all(math.isfinite(value) for value in values):
            continue
        begin, end, workers, rank = map(int, values)
        if (end - begin, workers) not in cuts:
            dealt = shares(end - begin, micro_batch, workers)
            cuts[end - begin, workers] = [sum(m.stop - m.start for m in own) for own in dealt]
        total += cuts[end - begin, workers][rank]
    return total


def _spells(rows: Sequence[Row]) -> tuple[Spell, ...]:
    """The uninterrupted stretches of committed steps in one worker's rows."""
    stretches: list[list[Row]] = []
    for row in rows:
        if not stretches or number(row.get("step")) > number(stretches[-1][-1].get("step")) + 1:
            stretches.append([])
        stretches[-1].append(row)
    return tuple(_spell(stretch) for stretch in stretches)


def _spell(rows: Sequence[Row]) -> Spell:
    first, last = rows[0], rows[-1]
    begin = number(first.get("samples")) - _size(first)
    return Spell(
        first_step=int(np.nan_to_num(number(first.get("step")))),
        last_step=int(np.nan_to_num(number(last.get("step")))),
        first_samples=float(np.nan_to_num(begin)),
        last_samples=float(np.nan_to_num(number(last.get("samples")))),
    )


def _size(row: Row) -> float:
    """Samples of a row's step."""
    size = number(row.get("to")) - number(row.get("from"))
    return size if math.isfinite(size) else number(row.get("global_batch"))


def count_samples(chain: Sequence[Row]) -> dict[str, int]:
    """Samples used, used again and passed over, counted from the positions of the committed steps.

    A step covers the positions ``[from, to)``, counted over the whole run or anew in every epoch;
    both are understood. Nothing is said about what comes before the first step of ``chain`` (a run
    that was resumed elsewhere) or after its last.

    Returns:
        ``used``, ``repeated`` and ``missed``; empty when a row holds no positions.
    """
    used = repeated = missed = 0
    spans: list[tuple[int, int]] = []
    epoch = math.nan
    passes: list[list[tuple[int, int]]] = [spans]
    for row in chain:
        begin, end = number(row.get("from")), number(row.get("to"))
        if math.isnan(begin) or math.isnan(end):
            return {}
        anew = number(row.get("epoch")) != epoch and spans and begin < spans[-1][1]
        epoch = number(row.get("epoch"))
        if anew:
            spans = []
            passes.append(spans)
        spans.append((int(begin), int(end)))
    for place, spans in enumerate(passes):
        reach = 0 if place else min((begin for begin, _ in spans), default=0)
        for begin, end in sorted(spans):
            used += end - begin
            missed += max(0, begin - reach)
            repeated += max(0, min(reach, end) - begin)
            reach = max(reach, end)
    return {"used": used, "repeated": repeated, "missed": missed} if chain else {}
