"""Paired measurements: both sides alternate in one run, and the ratio is taken pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a benchmark.

    ``ours`` and ``theirs`` are costs (seconds, bytes) in ``unit``, ``ratio`` is ours / theirs, so below 1 is
    better; ``interval`` its 95 % bootstrap interval over ``pairs`` pairs. Without a peer that did the same
    work in the same run, ``theirs``, ``ratio`` and ``interval`` are None and ``same_work`` is False.
    ``bound`` is what ``ours`` may cost by the row's own rule, ``of_bound`` the median of ours / bound, case
    by case.
    """

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    peer: str | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    pairs: int = 0
    same_work: bool = False
    bound: float | None = None
    of_bound: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def paired(
    name: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    peer: str,
    note: str = "",
) -> Row:
    """A row from costs measured in pairs: the median ratio and its bootstrap interval."""
    assert len(ours) == len(theirs) and ours, "costs come in pairs"
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Row(
        name=name,
        unit=unit,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        peer=peer,
        ratio=float(np.median(ratios)),
        interval=(float(low), float(high)),
        pairs=len(ratios),
        same_work=True,
        note=note,
    )


def measured(name: str, unit: str, values: Sequence[float], note: str = "") -> Row:
    """A row without a peer: the median, with the worst and the number of cases in the note."""
    said = f"worst {max(values):.4g} of {len(values)}"
    return Row(
        name=name,
        unit=unit,
        ours=statistics.median(values),
        note=f"{said}; {note}" if note else said,
    )


def bounded(
    name: str, unit: str, values: Sequence[float], bounds: Sequence[float], note: str = ""
) -> Row:
    """A row whose cases each have a bound: medians of both and of their ratios, and the worst ratio."""
    assert len(values) == len(bounds) and values, "each case has a bound"
    ratios = [value / bound for value, bound in zip(values, bounds, strict=True)]
    bound, of_bound = statistics.median(bounds), statistics.median(ratios)
    within = sum(ratio <= 1.0 for ratio in ratios)
    said = f"bound {bound:.4g}, ours/bound {of_bound:.3f}, worst {max(ratios):.3f}; "
    said += f"{within} of {len(values)} within; worst {max(values):.4g}"
    return Row(
        name=name,
        unit=unit,
        ours=statistics.median(values),
        bound=bound,
        of_bound=of_bound,
        note=f"{said}; {note}" if note else said,
    )
