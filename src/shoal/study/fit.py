"""The steps-samples trade-off fitted to a curve: S_min, E_min and B_crit, each with intervals.

S(B) = S_min (1 + B_crit (1/B - 1/n)): at B_crit both the steps and the samples are twice their least (for
n without end). E_min = S_min B_crit is what the smallest batches need in samples.

Every search is one term of the likelihood, censored ones included; searches that ran short or whose best
setting lies at the edge of its range are no bound on S and are left out, by name. Intervals: profile
likelihood, and whole searches drawn again within each batch.

Source: section 9.8 of the project's notes on Shallue et al. 2019; McCandlish et al. 2018, section 2.3.
Deviates: the profile's threshold is n ln(1 + t^2/(n - 2)) in place of chi-squared, exact for a normal
model with unknown sigma, since studies have few searches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.errors import UsageError
from shoal.study.intervals import Interval, pooled_spread
from shoal.study.likelihood import FitPoint, Likelihood, Optimum
from shoal.study.records import SearchKey
from shoal.study.search_summary import SearchSummary

LEVEL = 0.95
RESAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A fitted quantity.

    Args:
        value: at the optimum.
        profile: by profile likelihood; ends may be 0 or infinite.
        bootstrap: by drawing whole searches again; None where a batch has one search only.
    """

    value: float
    profile: Interval
    bootstrap: Interval | None


@dataclass(frozen=True, kw_only=True)
class LackOfFit:
    """Whether the curve's form explains the means, given how repeats scatter.

    Args:
        ratio: mean square of (batch mean - fit) over that within batches.
        p_value: chance of a larger ratio if the form is right.
        spread: the sd of ln S within batches.
    """

    ratio: float
    p_value: float
    spread: float

    @property
    def is_evident(self) -> bool:
        """Whether the form is refuted at 1 %."""
        return self.p_value < 0.01


@dataclass(frozen=True, kw_only=True)
class TradeoffFit:
    """One curve's fit.

    Args:
        curve: its name.
        refusal: why B_crit and what follows from it must not be used; empty if they may.
        s_min: least steps, of an endless batch (of the whole data, with a train_samples).
        e_min: least samples.
        b_crit: their ratio.
        sigma: sd of one search's ln S around the fit, or the resolution of the grid if that is more.
        rms: root mean square of ln S - fit over the searches that reached the goal.
        lack_of_fit: None where no batch was repeated.
        batches: measured batches in use, rising: at least one search reached the goal there.
        searches: how many searches were used.
        censored: how many of them are censored.
        left_out: reason by search.
        train_samples: n of the finite-population term, or None.
    """

    curve: str
    refusal: str
    s_min: Estimate
    e_min: Estimate
    b_crit: Estimate
    sigma: float
    rms: float
    lack_of_fit: LackOfFit | None
    batches: tuple[int, ...]
    searches: int
    censored: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    train_samples: int | None = None

    @property
    def is_usable(self) -> bool:
        """Whether B_crit is inside what was measured."""
        return not self.refusal

    def steps(self, global_batch: float) -> float:
        """S at a batch, by the fit."""
        inverse = 0.0 if self.train_samples is None else 1.0 / self.train_samples
        return self.s_min.value * (1 + self.b_crit.value * (1 / global_batch - inverse))


def fit_curve(
    summaries: Iterable[SearchSummary],
    *,
    edge_limited: Mapping[SearchKey, str] | None = None,
    train_samples: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> TradeoffFit | None:
    """Fit one curve's searches.

    Args:
        summaries: of one curve and one goal.
        edge_limited: searches whose best setting lies at the edge of its range, and why that is said.
        train_samples: n, when samples are drawn without replacement.
        resamples: how often whole searches are drawn again; 0 leaves the bootstrap out.
        seed: of that drawing.

    Returns:
        The fit, with a ``refusal`` unless a measured batch lies above B_crit and one below B_crit/4.
        None if fewer than three batches have a search that reached the goal: nothing can be fitted.

    Raises:
        UsageError: several curves or goals, or a batch larger than ``train_samples``.
    """
    rows = list(summaries)
    if len({(s.key.curve, s.goal) for s in rows}) > 1:
        raise UsageError("summaries = of several curves or goals; a fit is of one; split them")
    points, left_out = fit_points(rows, edge_limited or {})
    batches = sorted({p.global_batch for _, p in points if not p.is_censored})
    if len(batches) < 3:
        return None
    if train_samples is not None and batches[-1] > train_samples:
        raise UsageError(
            f"train_samples = {train_samples}; batches without replacement are no larger, but "
            f"{batches[-1]} was measured; give the number of training samples, or None"
        )
    return _fit(rows[0].key.curve, points, batches, left_out, train_samples, resamples, seed)


def fit_points(
    rows: Sequence[SearchSummary], edge_limited: Mapping[SearchKey, str]
) -> tuple[list[tuple[SearchKey, FitPoint]], dict[str, str]]:
    """The likelihood's terms, and why the other searches have none."""
    points: list[tuple[SearchKey, FitPoint]] = []
    left_out: dict[str, str] = {}
    for row in rows:
        if row.is_short:
            left_out[str(row.key)] = row.result.words
        elif row.key in edge_limited:
            left_out[str(row.key)] = edge_limited[row.key]
        elif row.steps is not None and row.steps > 0:
            points.append((row.key, FitPoint(row.key.global_batch, row.previous, row.steps)))
        elif row.is_censored:
            above = float(row.censored_at)
            points.append((row.key, FitPoint(row.key.global_batch, above, math.inf)))
        else:
            left_out[str(row.key)] = (
                "nothing was measured yet" if row.steps is None else "met at step 0"
            )
    return points, left_out


def _fit(
    curve: str,
    keyed: Sequence[tuple[SearchKey, FitPoint]],
    batches: Sequence[int],
    left_out: Mapping[str, str],
    train_samples: int | None,
    resamples: int,
    seed: int,
) -> TradeoffFit:
    points = [point for _, point in keyed]
    likelihood = Likelihood(points, train_samples=train_samples, least_sigma=least_sigma(points))
    best = likelihood.maximise()
    drawn = _bootstrap(points, best, train_samples, resamples, seed)
    threshold = profile_threshold(len(points))
    value = {
        "s_min": math.exp(best.log_s_min),
        "b_crit": math.exp(best.log_b_crit),
        "e_min": math.exp(best.log_e_min),
    }
    estimates = {
        name: Estimate(
            value=value[name],
            profile=_profile(likelihood, best, name, value[name], threshold),
            bootstrap=_percentiles(drawn, name),
        )
        for name in value
    }
    reached = [p for p in points if not p.is_censored]
    mean = {p.global_batch: m for p, m in zip(points, likelihood.mean(*best[:2]), strict=True)}
    residuals = np.array([p.log_steps - mean[p.global_batch] for p in reached])
    return TradeoffFit(
        curve=curve,
        refusal=refusal(value["b_crit"], batches),
        s_min=estimates["s_min"],
        e_min=estimates["e_min"],
        b_crit=estimates["b_crit"],
        sigma=math.exp(best.log_sigma),
        rms=float(np.sqrt(np.mean(residuals**2))),
        lack_of_fit=_lack_of_fit(points, mean),
        batches=tuple(batches),
        searches=len(points),
        censored=len(points) - len(reached),
        left_out=dict(left_out),
        train_samples=train_samples,
    )


def refusal(b_crit: float, batches: Sequence[int]) -> str:
    """Why a fitted B_crit must not be used, given the measured batches; empty if it may."""
    low, high = batches[0], batches[-1]
    if high <= b_crit:
        return (
            f"B_crit is not resolved: no measured batch lies above the fitted {b_crit:,.0f} "
            f"(the largest that reached the goal is {high:,}); measure larger batches"
        )
    if low >= b_crit / 4:
        return (
            f"B_crit is not resolved: no measured batch lies below a quarter of the fitted {b_crit:,.1f} "
            f"(the smallest that reached the goal is {low:,}); measure smaller batches"
        )
    return ""


def least_sigma(points: Sequence[FitPoint]) -> float:
    """The least spread that is sought: a quarter of the median grid step, at least 0.1 %."""
    widths = [math.log(p.upto / p.above) for p in points if not p.is_censored and p.above > 0]
    return max(0.25 * float(np.median(widths)), 1e-3) if widths else 1e-2


def profile_threshold(count: int, level: float = LEVEL) -> float:
    """How far twice the log-likelihood may fall within the interval, for ``count`` searches."""
    from scipy.stats import t as student

    freedom = max(count - 2, 1)
    quantile = float(student.ppf(0.5 + level / 2, freedom))
    return count * math.log1p(quantile**2 / freedom)


def _profile(
    likelihood: Likelihood, best: Optimum, name: str, value: float, threshold: float
) -> Interval:
    """Where the likelihood, maximised over the rest, has fallen by the threshold."""

    def fallen(log_value: float) -> float:
        held = likelihood.maximise(start=best, **{name: math.exp(log_value)})
        return 2 * (best.value - held.value) - threshold

    centre = math.log(value)
    return Interval(
        _crossing(fallen, centre, -1, default=0.0), _crossing(fallen, centre, 1, default=math.inf)
    )


def _crossing(
    fallen: Callable[[float], float], centre: float, side: int, *, default: float
) -> float:
    """The root on one side of the optimum, sought in growing strides; ``default`` beyond e^8."""
    from scipy.optimize import brentq

    inside, stride = centre, 0.05
    while abs(inside - centre) < 8.0:
        outside = inside + side * stride
        if fallen(outside) > 0:
            low, high = sorted((inside, outside))
            return math.exp(float(brentq(fallen, low, high, xtol=1e-4)))  # type: ignore[arg-type]
        inside, stride = outside, stride * 2
    return default


def _bootstrap(
    points: Sequence[FitPoint],
    best: Optimum,
    train_samples: int | None,
    resamples: int,
    seed: int,
) -> list[Optimum]:
    """Optima of studies whose searches are drawn again within each batch; none without repeats."""
    groups: dict[int, list[FitPoint]] = {}
    for point in points:
        groups.setdefault(point.global_batch, []).append(point)
    if min(map(len, groups.values())) < 2:
        return []
    random = np.random.default_rng(seed)
    found: list[Optimum] = []
    for _ in range(resamples):
        again = [
            group[place]
            for group in groups.values()
            for place in random.integers(len(group), size=len(group))
        ]
        if all(p.is_censored for p in again):
            continue
        again_likelihood = Likelihood(
            again, train_samples=train_samples, least_sigma=least_sigma(points)
        )
        found.append(again_likelihood.maximise(start=best))
    return found


def _percentiles(drawn: Sequence[Optimum], name: str) -> Interval | None:
    if not drawn:
        return None
    logs = [getattr(optimum, f"log_{name}") for optimum in drawn]
    low, high = np.quantile(logs, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(math.exp(low), math.exp(high))


def _lack_of_fit(points: Sequence[FitPoint], mean: Mapping[int, float]) -> LackOfFit | None:
    """F test of batch means against the repeats' variance, over batches without a censored search."""
    from scipy.stats import f as fisher

    groups: dict[int, list[FitPoint]] = {}
    for point in points:
        groups.setdefault(point.global_batch, []).append(point)
    whole = {
        b: [p.log_steps for p in g] for b, g in groups.items() if not any(p.is_censored for p in g)
    }
    spread = pooled_spread(whole.values())
    if spread is None or len(whole) < 3 or spread.sd == 0:
        return None
    squares = sum(len(v) * (float(np.mean(v)) - mean[b]) ** 2 for b, v in whole.items())
    ratio = squares / (len(whole) - 2) / spread.sd**2
    return LackOfFit(
        ratio=float(ratio),
        p_value=float(fisher.sf(ratio, len(whole) - 2, spread.freedom)),
        spread=spread.sd,
    )
