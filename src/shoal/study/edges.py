"""Whether the best settings lie inside their ranges, per parameter; and the range to search next.

A range is *at its edge* where the median coordinate of the five best trials of a search lies outside
0.1 ... 0.9 of the unit cube. It is called a *stability limit* instead where most draws beyond the five
best diverged: no wider range would help. A parameter is *insensitive* where the best trials are spread
like all draws. S of a search whose linear decay is at the lower edge is void: it measures the range.

Source: sections 6.1 (item 7), 9.1 and 9.11 of the project's notes on Shallue et al. 2019; the paper checks
by eye. The tuning playbook of the same group tells edges from stability limits.
Deviates: the winner's own coordinate is not used; in a flat dimension it lies outside 0.05 ... 0.95 by
chance every tenth time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from shoal.study.records import SearchKey
from shoal.study.search_summary import SearchSummary, TrialSummary, cells
from shoal.study.space import Integer, Linear, Scale, Space

BEST = 5
INNER = (0.1, 0.9)
MOSTLY = 0.5
FEWEST_BEYOND = 3
BOUNDARY_EXIT = 3
DECAYS = ("decay_steps", "learning_rate_decay_steps")

Side = Literal["lower", "upper"]


class Place(StrEnum):
    """Where the best settings of one parameter lie."""

    INSIDE = "inside"
    BOUNDARY = "boundary"
    """At an edge of the range: a better setting may lie outside."""
    STABILITY = "stability limit"
    """Next to where training diverges; a wider range would not help."""
    UNKNOWN = "unknown"
    """Fewer than five trials crossed."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One parameter of one search, or of all repeats at one batch together.

    Args:
        parameter: its name.
        place: where the best lie.
        side: of the range, where they lie at one.
        median: the median coordinate of the best; NaN if unknown.
        crossers: how many feasible trials crossed.
        is_insensitive: the best are spread like all draws; None where too few say so.
    """

    parameter: str
    place: Place
    side: Side | None
    median: float
    crossers: int
    is_insensitive: bool | None = None

    @property
    def words(self) -> str:
        """In a few words, e.g. ``boundary: lr at its upper side``."""
        if self.side is None:
            return f"{self.parameter} {self.place}" + (
                " (insensitive)" if self.is_insensitive else ""
            )
        return f"{self.place}: {self.parameter} at its {self.side} side"


def search_edges(search: SearchSummary, parameters: Sequence[str]) -> list[Edge]:
    """The edges of one search.

    Args:
        search: with at least five crossing trials, or every place is unknown.
        parameters: names in the order of the trials' unit coordinates.
    """
    best = search.best(BEST)
    crossers = len(search.best(len(search.trials)))
    found: list[Edge] = []
    for axis, parameter in enumerate(parameters):
        if len(best) < BEST or any(math.isnan(_unit(t, axis)) for t in best):
            found.append(
                Edge(
                    parameter=parameter,
                    place=Place.UNKNOWN,
                    side=None,
                    median=math.nan,
                    crossers=crossers,
                )
            )
            continue
        median = float(np.median([t.trial.unit[axis] for t in best]))
        place, side = _place([search], axis, median)
        found.append(
            Edge(parameter=parameter, place=place, side=side, median=median, crossers=crossers)
        )
    return found


def _unit(trial: TrialSummary, axis: int) -> float:
    """A trial's coordinate; NaN where it is not known."""
    unit = trial.trial.unit
    return unit[axis] if axis < len(unit) else math.nan


def _place(
    searches: Sequence[SearchSummary], axis: int, median: float
) -> tuple[Place, Side | None]:
    if INNER[0] <= median <= INNER[1]:
        return Place.INSIDE, None
    side: Side = "upper" if median > INNER[1] else "lower"
    drawn = [(_unit(t, axis), t.diverged is not None) for s in searches for t in s.trials]
    beyond = [diverged for u, diverged in drawn if (u > median if side == "upper" else u < median)]
    if len(beyond) >= FEWEST_BEYOND and sum(beyond) > MOSTLY * len(beyond):
        return Place.STABILITY, side
    return Place.BOUNDARY, side


def cell_edges(
    summaries: Iterable[SearchSummary], parameters: Mapping[str, Sequence[str]]
) -> dict[tuple[str, int], list[Edge]]:
    """The edges at each curve and batch, over its repeats.

    The median is that of the searches' medians, so one odd search decides nothing.

    Args:
        summaries: of one goal.
        parameters: by curve, names in the order of the unit coordinates.
    """
    found: dict[tuple[str, int], list[Edge]] = {}
    for place, searches in cells(summaries).items():
        names = parameters[place[0]]
        each = [search_edges(search, names) for search in searches]
        found[place] = [
            _together(searches, [edges[axis] for edges in each], axis) for axis in range(len(names))
        ]
    return found


def _together(searches: Sequence[SearchSummary], edges: Sequence[Edge], axis: int) -> Edge:
    known = [
        (search, edge)
        for search, edge in zip(searches, edges, strict=True)
        if edge.place is not Place.UNKNOWN
    ]
    crossers = sum(edge.crossers for edge in edges)
    if not known:
        return Edge(
            parameter=edges[0].parameter,
            place=Place.UNKNOWN,
            side=None,
            median=math.nan,
            crossers=crossers,
        )
    median = float(np.median([edge.median for _, edge in known]))
    place, side = _place([search for search, _ in known], axis, median)
    best = [t.trial.unit[axis] for search, _ in known for t in search.best(BEST)]
    return Edge(
        parameter=edges[0].parameter,
        place=place,
        side=side,
        median=median,
        crossers=crossers,
        is_insensitive=_is_insensitive(best) if len(best) >= 2 * BEST else None,
    )


def _is_insensitive(coordinates: Sequence[float]) -> bool:
    """Whether coordinates are spread over [0, 1) as evenly as chance would have them, and widely."""
    from scipy.stats import kstest

    low, high = np.quantile(coordinates, [0.25, 0.75])
    return bool(high - low > 0.3 and float(kstest(coordinates, "uniform").pvalue) > 0.05)


def edge_limited(
    summaries: Iterable[SearchSummary], parameters: Mapping[str, Sequence[str]]
) -> dict[SearchKey, str]:
    """Searches at a boundary and why: no bound on S, so the fit leaves them out.

    A search counts where its own median and that over the repeats lie at the same side; one search alone
    is flagged by chance in a flat dimension.
    """
    rows = list(summaries)
    together = cell_edges(rows, parameters)
    limited: dict[SearchKey, str] = {}
    for search in rows:
        cell = together[(search.key.curve, search.key.global_batch)]
        own = search_edges(search, parameters[search.key.curve])
        reasons = [
            a.words
            for a, b in zip(own, cell, strict=True)
            if a.place is Place.BOUNDARY and b.place is Place.BOUNDARY and a.side == b.side
        ]
        if reasons:
            limited[search.key] = "; ".join(reasons)
    return limited


def void(
    summaries: Iterable[SearchSummary], parameters: Mapping[str, Sequence[str]]
) -> list[SearchKey]:
    """Searches whose linear decay is at the lower edge of its range: their S measures the range."""
    found: list[SearchKey] = []
    for search in summaries:
        edges = search_edges(search, parameters[search.key.curve])
        if any(
            e.parameter in DECAYS and e.place is Place.BOUNDARY and e.side == "lower" for e in edges
        ):
            found.append(search.key)
    return found


def exit_status(edges: Mapping[tuple[str, int], Sequence[Edge]]) -> int:
    """What a command that used the study ends with: 3 if some optimum lies at a boundary, else 0."""
    flagged = any(e.place is Place.BOUNDARY for row in edges.values() for e in row)
    return BOUNDARY_EXIT if flagged else 0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The space to search next at one batch.

    Args:
        curve: whose.
        global_batch: at which batch.
        space: the new one.
        changes: what was done, one line per changed parameter; empty if the space is kept.
        kept: why other flagged parameters were not changed.
    """

    curve: str
    global_batch: int
    space: Space
    changes: tuple[str, ...]
    kept: tuple[str, ...] = ()


def recenter(
    place: tuple[str, int],
    space: Space,
    edges: Sequence[Edge],
    *,
    how: Literal["move", "widen"] = "move",
) -> Proposal:
    """A space around what was found; data of the old one stay, the new one is a new study version.

    Args:
        place: curve and global batch.
        space: what was searched there.
        edges: of :func:`cell_edges` there, one per parameter of the space.
        how: "move": a range of the same width in log units, centred on the median of the best;
            "widen": a decade more on the side they lie at (for a linear range, as much again).

    Returns:
        A proposal that changes only parameters at a boundary: an inside optimum needs no other range, at a
        stability limit none would help, and a list of values cannot be moved.
    """
    scales: dict[str, Scale] = {}
    changes: list[str] = []
    kept: list[str] = []
    for edge, (name, scale) in zip(edges, space.items(), strict=True):
        scales[name] = scale
        if edge.place is Place.STABILITY:
            kept.append(
                f"{name}: most draws beyond its best diverged; a wider range would not help"
            )
        if edge.place is not Place.BOUNDARY or edge.side is None:
            continue
        if how == "move":
            moved = scale.window(edge.median - 0.5, edge.median + 0.5)
        else:
            more = _decade(scale)
            low, high = (0.0, 1 + more) if edge.side == "upper" else (-more, 1.0)
            moved = scale.window(low, high)
        if moved == scale:
            kept.append(f"{name}: it cannot be moved further to the {edge.side} side")
            continue
        scales[name] = moved
        changes.append(
            f"{name}: {scale.min:.4g} ... {scale.max:.4g} becomes {moved.min:.4g} ... {moved.max:.4g}"
        )
    return Proposal(
        curve=place[0],
        global_batch=place[1],
        space=Space(scales),
        changes=tuple(changes),
        kept=tuple(kept),
    )


def _decade(scale: Scale) -> float:
    """A factor of ten in the unit of a scale; its whole width where it has no logarithm."""
    if isinstance(scale, (Linear, Integer)) or not hasattr(scale, "decade"):
        if isinstance(scale, Integer) and scale.log:
            return 1 / math.log10((scale.max + 1) / scale.min)
        return 1.0
    return scale.decade  # type: ignore[union-attr]
