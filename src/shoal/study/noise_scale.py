"""The gradient noise scale along one trial, and whether it foretells B_crit.

With G the gradient over all data and Sigma the covariance of one sample's gradient, a batch of B drawn
without replacement from n samples has E|g_B|^2 = |G|^2 + tr(Sigma) (1/B - 1/n). Two batch sizes s < b give

    tr(Sigma) = (|g_s|^2 - |g_b|^2) / (1/s - 1/b)
    |G|^2     = |g_b|^2 - tr(Sigma) (1/b - 1/n)
    B_simple  = tr(Sigma) / |G|^2

Each is averaged before they are divided: the ratio of noisy numbers is biased. The averages are over bins of
equal width in the log of the loss, from the start to the crossing, so that the end, where most steps are,
does not drown the rest.

Source: McCandlish et al. 2018, appendix A.1, with the finite-population term; sections 5.1 and 9.13 of the
project's notes on Shallue et al. 2019. For plain SGD at its best learning rate; with momentum it is a proxy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.errors import UsageError
from shoal.study.intervals import Interval

BINS = 5
BLOCK = 4
RESAMPLES = 500
DECADE = 10.0


class NoiseMeasurement(NamedTuple):
    """Squared gradient norms at one step.

    Args:
        step: optimizer steps done.
        loss: mean over the large batch.
        small: mean of |g_s|^2 over the micro-batches.
        large: |g_b|^2 of their mean.
    """

    step: int
    loss: float
    small: float
    large: float


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """B_simple averaged over progress.

    Args:
        value: mean over the bins; NaN where no bin has a positive |G|^2.
        interval: by drawing blocks of neighbouring measurements again.
        bins: (loss at the bin's start, at its end, B_simple; NaN where |G|^2 is not positive).
        measurements: how many.
    """

    value: float
    interval: Interval
    bins: tuple[tuple[float, float, float], ...]
    measurements: int

    def foretells(self, b_crit: float) -> bool:
        """Whether it lies within a factor 10 of a measured B_crit."""
        return math.isfinite(self.value) and 1 / DECADE <= self.value / b_crit <= DECADE


def noise_scale(
    measurements: Sequence[NoiseMeasurement],
    *,
    small_batch: int,
    large_batch: int,
    train_samples: int | None,
    bins: int = BINS,
    block: int = BLOCK,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> NoiseScale:
    """B_simple from measurements along one trial, from its start to its crossing.

    Args:
        measurements: in step order, at least 2.
        small_batch: s, samples of a micro-batch.
        large_batch: b, samples of all micro-batches of one measurement together.
        train_samples: n, or None for sampling with replacement.
        bins: of equal width in log loss.
        block: neighbouring measurements are drawn again in blocks of that many.
        resamples: how often.
        seed: of that drawing.

    Raises:
        UsageError: fewer than 2 measurements, or not s < b <= n.
    """
    if len(measurements) < 2:
        raise UsageError(
            f"measurements = {len(measurements)}; the noise scale is averaged along a trial; measure at 2 "
            "steps or more"
        )
    if not 1 <= small_batch < large_batch or large_batch > (train_samples or math.inf):
        raise UsageError(
            f"small_batch, large_batch = {small_batch}, {large_batch}; small is less than large, and large "
            f"no more than the {train_samples} training samples; choose others"
        )
    inverse = 0.0 if train_samples is None else 1.0 / train_samples
    small = np.array([m.small for m in measurements])
    large = np.array([m.large for m in measurements])
    trace = (small - large) / (1 / small_batch - 1 / large_batch)
    norm = large - trace * (1 / large_batch - inverse)
    edges, places = _bins([m.loss for m in measurements], bins)
    value, scales = _averaged(trace, norm, places, bins)
    random = np.random.default_rng(seed)
    drawn: list[float] = []
    for _ in range(resamples):
        rows = _blocks(len(measurements), block, random)
        again, _ = _averaged(trace[rows], norm[rows], places[rows], bins)
        if math.isfinite(again):
            drawn.append(again)
    low, high = np.quantile(drawn, [0.025, 0.975]) if drawn else (math.nan, math.nan)
    return NoiseScale(
        value=value,
        interval=Interval(float(low), float(high)),
        bins=tuple((edges[k], edges[k + 1], scales[k]) for k in range(bins) if (places == k).any()),
        measurements=len(measurements),
    )


def _bins(losses: Sequence[float], bins: int) -> tuple[list[float], np.ndarray]:
    """Edges from the largest loss to the smallest, equal in log; and the bin of each measurement."""
    if min(losses) <= 0 or not all(map(math.isfinite, losses)):
        raise UsageError(
            f"loss = {min(losses)}; progress is measured in the log of the loss, which is positive and "
            "finite; measure up to the crossing only, with a positive loss"
        )
    logs = np.log(losses)
    edges = np.linspace(logs.max(), logs.min(), bins + 1)
    width = (logs.max() - logs.min()) / bins
    places = np.zeros(len(losses), dtype=np.int64)
    if width > 0:
        places = np.minimum(((logs.max() - logs) / width).astype(np.int64), bins - 1)
    return [math.exp(e) for e in edges], places


def _averaged(
    trace: np.ndarray, norm: np.ndarray, places: np.ndarray, bins: int
) -> tuple[float, list[float]]:
    """B_simple of each bin from averages within it, and the mean of those that have one."""
    scales: list[float] = []
    for place in range(bins):
        inside = places == place
        top, bottom = (float(v[inside].mean()) if inside.any() else 0.0 for v in (trace, norm))
        scales.append(top / bottom if bottom > 0 else math.nan)
    known = [s for s in scales if math.isfinite(s)]
    return (float(np.mean(known)) if known else math.nan), scales


def _blocks(count: int, block: int, random: np.random.Generator) -> np.ndarray:
    """Places of ``count`` measurements drawn as runs of ``block`` neighbours, around the end."""
    starts = random.integers(count, size=math.ceil(count / block))
    return ((starts[:, None] + np.arange(block)) % count).reshape(-1)[:count]
