"""The likelihood of steps to result that are known to lie between two grid points.

With mu_B = ln S_min + ln(1 + B_crit (1/B - 1/n)) the model's ln S and sigma the spread of one search's
ln S around it, a search with the goal reached in (t_{k-1}, t_k] contributes
ln[Phi((ln t_k - mu)/sigma) - Phi((ln t_{k-1} - mu)/sigma)], one censored at h
ln[1 - Phi((ln h - mu)/sigma)].

Source: section 9.8 of the project's notes on Shallue et al. 2019; the form of mu is the steps-examples
trade-off of McCandlish et al. 2018, section 2.3, with the finite-population term for sampling without
replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_ndtr

Floats = NDArray[np.float64]
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
REACH = 7.0
"""B_crit is sought within a factor e^7 of the smallest and largest batch."""
WIDEST_SIGMA = 3.0


class FitPoint(NamedTuple):
    """One search: its steps to result lie in (above, upto]; ``upto`` is infinite if censored."""

    global_batch: int
    above: float
    upto: float

    @property
    def is_censored(self) -> bool:
        """Whether only a lower bound is known."""
        return math.isinf(self.upto)

    @property
    def log_steps(self) -> float:
        """The middle of the interval on the log scale; its lower end where censored."""
        if self.is_censored:
            return math.log(max(self.above, 0.5))
        return 0.5 * (math.log(max(self.above, 0.5)) + math.log(self.upto))


class Optimum(NamedTuple):
    """Where the likelihood is largest: natural logs of S_min, B_crit and sigma; and its own log there."""

    log_s_min: float
    log_b_crit: float
    log_sigma: float
    value: float

    @property
    def log_e_min(self) -> float:
        """ln E_min, since E_min = S_min B_crit."""
        return self.log_s_min + self.log_b_crit


class Likelihood:
    """Of a set of searches; maximised freely or with one quantity held fixed.

    Args:
        points: one per search, at least one.
        train_samples: n, or None for sampling with replacement.
        least_sigma: sigma is not sought below it.
    """

    def __init__(
        self, points: Sequence[FitPoint], *, train_samples: int | None, least_sigma: float
    ) -> None:
        self.batches: Floats = np.array([p.global_batch for p in points], dtype=np.float64)
        inverse = 0.0 if train_samples is None else 1.0 / train_samples
        self._per_crit: Floats = np.maximum(1.0 / self.batches - inverse, 0.0)
        with np.errstate(divide="ignore"):
            self._low: Floats = np.log(np.array([p.above for p in points], dtype=np.float64))
            self._high: Floats = np.log(np.array([p.upto for p in points], dtype=np.float64))
        self._middle: Floats = np.array([p.log_steps for p in points])
        self._least = math.log(least_sigma)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which ln B_crit is sought."""
        return math.log(self.batches.min()) - REACH, math.log(self.batches.max()) + REACH

    def mean(self, log_s_min: float, log_b_crit: float) -> Floats:
        """mu of every point."""
        return log_s_min + np.log1p(math.exp(log_b_crit) * self._per_crit)

    def value(self, log_s_min: float, log_b_crit: float, log_sigma: float) -> float:
        """The log-likelihood."""
        terms, _, _ = interval_terms(
            self._low, self._high, self.mean(log_s_min, log_b_crit), math.exp(log_sigma)
        )
        return float(terms.sum())

    def maximise(
        self,
        *,
        start: Optimum | None = None,
        s_min: float | None = None,
        b_crit: float | None = None,
        e_min: float | None = None,
    ) -> Optimum:
        """The largest likelihood, with at most one of the quantities held at a given value.

        Args:
            start: where to begin; several places over the range of batches by default.
            s_min: held fixed, > 0.
            b_crit: held fixed, > 0.
            e_min: held fixed, > 0.
        """
        held = [None if value is None else math.log(value) for value in (s_min, b_crit, e_min)]
        starts = self._starts() if start is None else [start]
        return max((self._climb(s, held) for s in starts), key=lambda found: found.value)

    def _starts(self) -> list[Optimum]:
        low, high = math.log(self.batches.min()), math.log(self.batches.max())
        found: list[Optimum] = []
        for log_b_crit in np.linspace(low - 1.0, high + 1.0, 4):
            shape = self.mean(0.0, float(log_b_crit))
            log_s_min = float(np.median(self._middle - shape))
            spread = max(float(np.std(self._middle - shape)), math.exp(self._least))
            found.append(Optimum(log_s_min, float(log_b_crit), math.log(spread), -math.inf))
        return found

    def _climb(self, start: Optimum, held: Sequence[float | None]) -> Optimum:
        """L-BFGS-B over whatever is free; the held quantity leaves one of (a, b) as a function."""
        log_s_min, log_b_crit, log_e_min = held
        low, high = self.bounds

        def placed(x: Floats) -> tuple[float, float, Floats]:
            # Returns a = ln S_min, b = ln B_crit, and d(a, b)/dx for the free location parameters.
            if log_b_crit is not None:
                return float(x[0]), log_b_crit, np.array([[1.0, 0.0]])
            if log_s_min is not None:
                return log_s_min, float(x[0]), np.array([[0.0, 1.0]])
            if log_e_min is not None:
                return log_e_min - float(x[0]), float(x[0]), np.array([[-1.0, 1.0]])
            return float(x[0]), float(x[1]), np.eye(2)

        def cost(x: Floats) -> tuple[float, Floats]:
            a, b, chain = placed(x)
            value, gradient = self._slope(a, b, float(x[-1]))
            return -value, -np.append(chain @ gradient[:2], gradient[2])

        sigma_box = (self._least, math.log(WIDEST_SIGMA))
        begin = [min(max(start.log_sigma, sigma_box[0]), sigma_box[1])]
        box: list[tuple[float | None, float | None]] = [sigma_box]
        if log_s_min is not None or log_e_min is not None:
            begin, box = [start.log_b_crit, *begin], [(low, high), *box]
        elif log_b_crit is not None:
            begin, box = [self._best_level(log_b_crit), *begin], [(None, None), *box]
        else:
            begin = [start.log_s_min, start.log_b_crit, *begin]
            box = [(None, None), (low, high), *box]
        found = minimize(cost, np.array(begin), jac=True, method="L-BFGS-B", bounds=box)
        a, b, _ = placed(found.x)
        return Optimum(a, b, float(found.x[-1]), -float(found.fun))

    def _best_level(self, log_b_crit: float) -> float:
        return float(np.median(self._middle - self.mean(0.0, log_b_crit)))

    def _slope(self, a: float, b: float, log_sigma: float) -> tuple[float, Floats]:
        """The log-likelihood and its gradient by ln S_min, ln B_crit, ln sigma."""
        sigma = math.exp(log_sigma)
        scaled = math.exp(b) * self._per_crit
        terms, by_mean, by_log_sigma = interval_terms(
            self._low, self._high, a + np.log1p(scaled), sigma
        )
        by_b = float((by_mean * scaled / (1.0 + scaled)).sum())
        return float(terms.sum()), np.array([by_mean.sum(), by_b, by_log_sigma.sum()])


def interval_terms(
    low: Floats, high: Floats, mean: Floats, sigma: float
) -> tuple[Floats, Floats, Floats]:
    """ln P(low < N(mean, sigma^2) <= high), and its derivatives by mean and by ln sigma.

    Stable far into both tails: the interval is reflected into the lower one, where ``log_ndtr`` is exact.

    Args:
        low: lower ends, -inf allowed.
        high: upper ends, inf allowed.
        mean: of each.
        sigma: > 0.
    """
    za, zb = (low - mean) / sigma, (high - mean) / sigma
    flip = za > 0
    below = np.where(flip, -zb, za)
    above = np.where(flip, -za, zb)
    log_above, log_below = log_ndtr(above), log_ndtr(below)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        terms = log_above + np.log(-np.expm1(log_below - log_above))
        terms = np.maximum(terms, -1e6)
        density_a = np.exp(-0.5 * za * za - HALF_LOG_TAU - terms)
        density_b = np.exp(-0.5 * zb * zb - HALF_LOG_TAU - terms)
        weighted_a = np.where(np.isfinite(za), za * density_a, 0.0)
        weighted_b = np.where(np.isfinite(zb), zb * density_b, 0.0)
    return terms, (density_a - density_b) / sigma, weighted_a - weighted_b
