"""What the figures draw, computed from a run without drawing: stretches, ramps, means and rates."""

from __future__ import annotations

import math

import numpy as np

from shoal.report.columns import Floats, number
from shoal.report.run import Run

DRAWN_POINTS = 1500


def sample_range(run: Run) -> tuple[float, float]:
    """First and last sample on the shared axis; (0, 1) for a run without any."""
    ats = [number(row["at"]) for row in (*run.events, *run.evaluations)]
    ends = [value for value in ats if math.isfinite(value)]
    if len(run.steps):
        first = float(run.steps.samples[0]) - float(np.nan_to_num(run.steps.global_batch[0]))
        ends += [max(0.0, first), float(run.steps.samples[-1])]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return (low, high) if high > low else (low, low + 1.0)


def thin(x: Floats, y: Floats, points: int = DRAWN_POINTS) -> tuple[Floats, Floats]:
    """At most about ``points`` points of a line that keep every bucket's least and greatest value.

    A line of a million steps and its thinned copy look the same at the size it is drawn; non-finite
    values are left out where their bucket holds finite ones.
    """
    if len(x) <= points:
        return x, y
    kept: list[int] = [0]
    for bucket in np.array_split(np.arange(len(x)), max(1, points // 2)):
        finite = bucket[np.isfinite(y[bucket])]
        if len(finite):
            kept += [int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])]
        else:
            kept.append(int(bucket[0]))
    index = np.unique([*kept, len(x) - 1])
    return x[index], y[index]


def held(run: Run, values: Floats) -> tuple[Floats, Floats]:
    """A quantity that holds during a step, as the corners of a staircase over samples.

    Each step covers the samples from the end of the one before; only the corners where the value
    changes are kept, so a long constant stretch costs two points.
    """
    ends = run.steps.samples
    begins = np.concatenate([[sample_range(run)[0]], ends[:-1]])
    changed = np.concatenate([[True], values[1:] != values[:-1]])
    starts = begins[changed]
    stops = np.concatenate([starts[1:], ends[-1:]])
    x = np.column_stack([starts, stops]).ravel()
    y = np.repeat(values[changed], 2)
    return x, y


def ramps(run: Run) -> list[tuple[float, float]]:
    """Stretches of samples in which the learning rate is on its way to its target."""
    steps = run.steps
    if not len(steps):
        return []
    gap = np.abs(steps.lr - steps.lr_target) > 1e-9 * np.maximum(np.abs(steps.lr_target), 1e-30)
    begins = np.concatenate([[sample_range(run)[0]], steps.samples[:-1]])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], gap, [False]]).astype(np.int8)))
    return [
        (float(begins[first]), float(steps.samples[after - 1]))
        for first, after in zip(edges[0::2], edges[1::2], strict=True)
    ]


def smoothed(values: Floats, window: int) -> Floats:
    """A centred mean over ``window`` entries; non-finite ones are left out, NaN if none is left."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    low = np.maximum(index - window // 2, 0)
    high = np.minimum(index + window // 2 + 1, len(values))
    many = counts[high] - counts[low]
    return np.where(many > 0, (sums[high] - sums[low]) / np.maximum(many, 1), np.nan)


def throughput(run: Run, bins: int = 120) -> tuple[Floats, Floats]:
    """Samples per second over stretches of equally many steps, as the corners of a staircase."""
    steps = run.steps
    if len(steps) < 2:
        return np.empty(0), np.empty(0)
    index = np.unique(np.linspace(0, len(steps) - 1, min(bins, len(steps) - 1) + 1).astype(int))
    seconds = np.diff(steps.seconds[index])
    rate = np.where(seconds > 0, np.diff(steps.samples[index]) / np.maximum(seconds, 1e-9), np.nan)
    ends = steps.samples[index]
    return np.column_stack([ends[:-1], ends[1:]]).ravel(), np.repeat(rate, 2)


def greatest(y: Floats) -> float:
    """The greatest finite value if it is positive, else 1: the top of an axis that starts at 0."""
    known = y[np.isfinite(y)]
    return float(known.max()) if len(known) and known.max() > 0 else 1.0
