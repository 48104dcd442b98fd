"""The study as one tidy table: a row per curve, batch, repeat and goal, and what there is to say about it.

A search without S has its row like any other: its ``steps`` are empty and ``censored_at`` or ``flags`` say
why. Nothing is averaged here.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from shoal.study.confirmed import Confirmed
from shoal.study.edges import Edge, Place
from shoal.study.optima import effective_lr, learning_rate, momentum_of
from shoal.study.records import SearchKey
from shoal.study.search_summary import SearchSummary


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """One search and one goal; the fields are the columns.

    Args:
        curve: whose.
        global_batch: at which batch.
        repeat: which of the repeated searches.
        metric: of the goal.
        goal: its value.
        reach: "reached", "not reached", "short" or "unfinished".
        steps: S; None unless reached.
        previous: S lies in (previous, steps].
        censored_at: h, where S is only known to be larger.
        samples: B S.
        steps_every_second: S on every second grid point.
        steps_confirmed_by_two: S where the next point must agree.
        steps_confirmed: S_conf of the setting at this batch, where this search's winner was confirmed.
        winner: id of the trial that gave S.
        lr: its learning rate.
        momentum: its momentum, 0 without.
        effective_lr: lr / (1 - momentum).
        parameters: all of the winner's, by name.
        test_metric: the goal's metric on the test split at the winner's crossing; never selected on.
        feasible: feasible trials at S, or at the end.
        draws: trials in P there.
        diverged: draws that had diverged by the search's end.
        crossers: feasible trials that crossed by the end.
        flags: in words.
    """

    curve: str
    global_batch: int
    repeat: int
    metric: str
    goal: float
    reach: str
    steps: int | None
    previous: int | None
    censored_at: int | None
    samples: int | None
    steps_every_second: int | None
    steps_confirmed_by_two: int | None
    steps_confirmed: float | None
    winner: int | None
    lr: float | None
    momentum: float | None
    effective_lr: float | None
    parameters: Mapping[str, float] = field(default_factory=dict[str, float])
    test_metric: float | None
    feasible: int
    draws: int
    diverged: int
    crossers: int
    flags: tuple[str, ...]


def curve_table(
    summaries: Iterable[SearchSummary],
    *,
    edges: Mapping[SearchKey, Sequence[Edge]] | None = None,
    void: Iterable[SearchKey] = (),
    confirmations: Iterable[Confirmed] = (),
) -> list[CurveRow]:
    """The table, sorted by curve, batch, repeat.

    Args:
        summaries: of any goals.
        edges: of each search.
        void: searches whose S measures the range of their decay.
        confirmations: S_conf per curve and batch, of the goal of ``summaries``.
    """
    voided = set(void)
    known = {(c.curve, c.global_batch): c for c in confirmations}
    rows: list[CurveRow] = []
    for summary in sorted(summaries, key=lambda s: s.key):
        own = (edges or {}).get(summary.key, ())
        confirmation = known.get((summary.key.curve, summary.key.global_batch))
        rows.append(_row(summary, own, summary.key in voided, confirmation))
    return rows


def _row(
    summary: SearchSummary, edges: Sequence[Edge], is_void: bool, confirmation: Confirmed | None
) -> CurveRow:
    result, winner, key = summary.result, summary.winner, summary.key
    parameters = dict(winner.trial.parameters) if winner is not None else {}
    test = result.test_metric
    mine = (
        confirmation is not None
        and summary.steps is not None
        and confirmation.search_steps == summary.steps
    )
    return CurveRow(
        curve=key.curve,
        global_batch=key.global_batch,
        repeat=key.repeat,
        metric=summary.goal.metric,
        goal=summary.goal.value,
        reach=str(result.reach),
        steps=result.steps,
        previous=summary.previous if result.steps is not None else None,
        censored_at=summary.censored_at if summary.is_censored else None,
        samples=result.steps * key.global_batch if result.steps is not None else None,
        steps_every_second=result.every_second,
        steps_confirmed_by_two=result.confirmed,
        steps_confirmed=confirmation.steps if confirmation is not None and mine else None,
        winner=result.winner,
        lr=learning_rate(parameters) if parameters else None,
        momentum=momentum_of(parameters) if parameters else None,
        effective_lr=effective_lr(parameters) if parameters else None,
        parameters=parameters,
        test_metric=test.value if test is not None else None,
        feasible=result.feasible,
        draws=result.draws,
        diverged=sum(t.diverged is not None and not t.has_crossed for t in summary.trials),
        crossers=len(summary.best(len(summary.trials))),
        flags=tuple(_flags(summary, edges, is_void)),
    )


def _flags(summary: SearchSummary, edges: Sequence[Edge], is_void: bool) -> list[str]:
    flags: list[str] = []
    result = summary.result
    if result.steps is None:
        flags.append(result.words)
    if result.steps == 0:
        flags.append("met at step 0: the goal asks for nothing")
    elif result.is_too_coarse:
        flags.append("below 20 steps: too few to resolve")
    if is_void:
        flags.append("void: the decay's length is at its lower edge")
    flags += [edge.words for edge in edges if edge.place in (Place.BOUNDARY, Place.STABILITY)]
    flags += [f"{edge.parameter} insensitive" for edge in edges if edge.is_insensitive]
    return flags


def as_csv(rows: Sequence[object], columns: Sequence[str] | None = None) -> str:
    """Frozen dataclasses as CSV text: one column per field, a mapping one column per key.

    Args:
        rows: all of one class; intervals become two columns, other sequences are joined with "; ".
        columns: those to keep, in order; all by default.

    Returns:
        Text with a header; None is empty, infinities are ``inf``.
    """
    flat = [flat_row(row) for row in rows]
    names = list(columns or dict.fromkeys(name for row in flat for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in flat:
        writer.writerow([row.get(name, "") for name in names])
    return buffer.getvalue()


def flat_row(row: object) -> dict[str, str | int]:
    """One row's columns as they stand in a CSV file."""
    found: dict[str, str | int] = {}
    for entry in fields(row):  # type: ignore[arg-type]
        _flatten(entry.name, getattr(row, entry.name), found)
    return found


def _flatten(name: str, value: object, found: dict[str, str | int]) -> None:
    if isinstance(value, SearchKey):
        found |= {
            "curve": value.curve,
            "global_batch": value.global_batch,
            "repeat": value.repeat,
        }
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _flatten(f"{name}.{key}", entry, found)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, entry in zip(value._fields, value, strict=True):  # type: ignore[attr-defined]
            _flatten(f"{name}_{key}", entry, found)
    elif isinstance(value, (tuple, list)):
        found[name] = "; ".join(str(cell(entry)) for entry in value)
    elif hasattr(value, "__dataclass_fields__"):
        for entry in fields(value):  # type: ignore[arg-type]
            _flatten(f"{name}_{entry.name}", getattr(value, entry.name), found)
    else:
        found[name] = cell(value)


def cell(value: object) -> str | int:
    """A value as text: nothing for None, ten digits of a float, yes and no."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else str(value)
    return str(value)
