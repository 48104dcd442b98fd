"""The best learning rate, momentum and effective learning rate at each batch, and how they follow it.

The winners' learning rates and momenta lie on a ridge: each scatters widely, their combination
lr / (1 - momentum), the *effective* learning rate, much less. So it is that one that is averaged (the
five best over all repeats) and interpolated, monotone in the batch, at one momentum.

Source: section 2.2 (optimal metaparameters) and 9.12 of the project's notes on Shallue et al. 2019.
Deviates: the paper shows the winner of one search and draws the rules from the smallest batch; here
exponents are fitted too, with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UsageError
from shoal.study.intervals import Interval
from shoal.study.search_summary import SearchSummary, TrialSummary, cells

BEST = 5


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best settings at one batch, over its repeats.

    Args:
        curve: whose.
        global_batch: at which batch.
        winners: the winners' parameters, one per search that reached the goal.
        effective_lr: geometric mean of lr / (1 - momentum) over the best five trials of all repeats.
        effective_lr_spread: sd of its natural log over these; NaN for one.
        lr: geometric mean of lr over them.
        momentum: 1 - the geometric mean of 1 - momentum over them; 0 without momentum.
        trials: how many there were.
    """

    curve: str
    global_batch: int
    winners: tuple[Mapping[str, float], ...]
    effective_lr: float
    effective_lr_spread: float
    lr: float
    momentum: float
    trials: int


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """The slope of a log parameter over the log batch, over the winners of single searches.

    Args:
        parameter: ``effective_lr``, ``lr`` or ``one_minus_momentum``.
        value: 1 is the linear rule, 1/2 the square root, 0 no dependence.
        interval: at 95 %; None for fewer than 3 winners.
        smallest: first batch in use.
        largest: last batch in use.
        winners: how many winners.
    """

    parameter: str
    value: float
    interval: Interval | None
    smallest: int
    largest: int
    winners: int


def momentum_of(parameters: Mapping[str, float]) -> float:
    """The momentum of a setting: 0 for plain SGD, beta1 for Adam."""
    return parameters.get("momentum", parameters.get("beta1", 0.0))


def effective_lr(parameters: Mapping[str, float]) -> float:
    """lr / (1 - momentum) for SGD and its momentum variants; lr for Adam, whose step has no such sum.

    Example:
        >>> round(effective_lr({"lr": 0.1, "momentum": 0.9}), 12)
        1.0
    """
    return learning_rate(parameters) / (1 - parameters.get("momentum", 0.0))


def learning_rate(parameters: Mapping[str, float]) -> float:
    """``lr``, or ``learning_rate`` as the released archive names it.

    Raises:
        UsageError: there is neither.
    """
    for name in ("lr", "learning_rate"):
        if name in parameters:
            return parameters[name]
    raise UsageError(f"parameters = {sorted(parameters)}; none is lr; a trial has a learning rate")


def optima(summaries: Iterable[SearchSummary]) -> list[Optimum]:
    """The best settings at every curve and batch where a search reached the goal.

    Args:
        summaries: of one goal.
    """
    found: list[Optimum] = []
    for (curve, batch), searches in cells(summaries).items():
        best = best_of(searches)
        if not best:
            continue
        settings = [trial.trial.parameters for trial in best]
        effective = np.log([effective_lr(p) for p in settings])
        found.append(
            Optimum(
                curve=curve,
                global_batch=batch,
                winners=tuple(s.winner.trial.parameters for s in searches if s.winner is not None),
                effective_lr=math.exp(float(np.mean(effective))),
                effective_lr_spread=float(np.std(effective, ddof=1)) if len(best) > 1 else math.nan,
                lr=math.exp(float(np.mean(np.log([learning_rate(p) for p in settings])))),
                momentum=1
                - math.exp(float(np.mean([math.log1p(-momentum_of(p)) for p in settings]))),
                trials=len(best),
            )
        )
    return found


def best_of(searches: Sequence[SearchSummary], count: int = BEST) -> list[TrialSummary]:
    """The trials of all repeats that crossed first; ties by repeat, then id."""
    ranked = [
        (trial.crossing, search.key.repeat, trial.trial.id, trial)
        for search in searches
        for trial in search.best(count)
    ]
    return [row[3] for row in sorted(ranked, key=lambda row: row[:3])[:count]]


def exponents(
    summaries: Iterable[SearchSummary], *, largest: float = math.inf
) -> dict[str, list[Exponent]]:
    """Fitted exponents of each curve, by least squares over the winners of its searches.

    Args:
        summaries: of one goal.
        largest: batches beyond are left out; the fitted B_crit, say, to see the rise alone.
    """
    rows: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
    for search in summaries:
        if search.winner is not None and search.key.global_batch <= largest:
            place = (search.key.global_batch, search.winner.trial.parameters)
            rows.setdefault(search.key.curve, []).append(place)
    found: dict[str, list[Exponent]] = {}
    for curve, winners in sorted(rows.items()):
        batches = [batch for batch, _ in winners]
        if len(set(batches)) < 2:
            continue
        values = {
            "effective_lr": [math.log(effective_lr(p)) for _, p in winners],
            "lr": [math.log(learning_rate(p)) for _, p in winners],
        }
        if any(momentum_of(p) > 0 for _, p in winners):
            values["one_minus_momentum"] = [math.log1p(-momentum_of(p)) for _, p in winners]
        found[curve] = [_exponent(name, batches, logs) for name, logs in values.items()]
    return found


def _exponent(parameter: str, batches: Sequence[int], logs: Sequence[float]) -> Exponent:
    from scipy.stats import t as student

    x, y = np.log(np.asarray(batches, dtype=np.float64)), np.asarray(logs, dtype=np.float64)
    centred = x - x.mean()
    squares = float(centred @ centred)
    slope = float(centred @ y) / squares
    interval, freedom = None, len(y) - 2
    if freedom > 0:
        residuals = y - y.mean() - slope * centred
        error = math.sqrt(float(residuals @ residuals) / freedom / squares)
        half = float(student.ppf(0.975, freedom)) * error
        interval = Interval(slope - half, slope + half)
    return Exponent(
        parameter=parameter,
        value=slope,
        interval=interval,
        smallest=min(batches),
        largest=max(batches),
        winners=len(logs),
    )


def rules(first: Optimum, batches: Sequence[int]) -> dict[str, list[float]]:
    """The linear and the square-root rule for the effective learning rate, from the smallest batch."""
    ratio = [batch / first.global_batch for batch in batches]
    return {
        "linear": [first.effective_lr * r for r in ratio],
        "square_root": [first.effective_lr * math.sqrt(r) for r in ratio],
    }


@dataclass(frozen=True, kw_only=True)
class EffectiveLr:
    """The effective learning rate as a rising function of the batch.

    Args:
        global_batches: knots, rising.
        values: there, never falling.
    """

    global_batches: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, global_batch: float) -> float:
        """Interpolated between the knots on log-log axes; held constant outside."""
        return math.exp(
            float(
                np.interp(math.log(global_batch), np.log(self.global_batches), np.log(self.values))
            )
        )

    def lr(self, global_batch: float, momentum: float = 0.0) -> float:
        """The learning rate that gives it at one momentum in [0, 1)."""
        return self.at(global_batch) * (1 - momentum)


def monotone(points: Sequence[Optimum]) -> EffectiveLr:
    """The rising step-less curve nearest to the optima: isotonic on logs, weighted by trials.

    Args:
        points: of one curve, at least one.

    Raises:
        UsageError: none, or several curves.
    """
    if len({p.curve for p in points}) != 1:
        raise UsageError("points = of no or several curves; interpolate one curve's optima")
    ordered = sorted(points, key=lambda p: p.global_batch)
    logs = isotonic([math.log(p.effective_lr) for p in ordered], [float(p.trials) for p in ordered])
    return EffectiveLr(
        global_batches=tuple(p.global_batch for p in ordered),
        values=tuple(math.exp(v) for v in logs),
    )


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never-falling sequence nearest in weighted squares, by pooling adjacent violators.

    Example:
        >>> isotonic([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])
        [1.0, 2.5, 2.5]
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            mean = (before[0] * before[1] + block[0] * block[1]) / total
            block = (mean, total, before[2] + block[2])
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]
