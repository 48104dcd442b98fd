"""What has to come out for each claim, fixed before anything runs, and the judges that apply it.

T1-T6 and D1-D4 are the pass criteria of sections 6.2 and 6.3 of the notes on Dynamic Mini-batch
SGD, unchanged. Q1, Q3 and Q4 apply the criteria of D1, D3 and D4 to the few seeds of ``--quick``;
they are a smoke test and never stand for D1-D4. L1-L4 are ours, for the Fashion-MNIST runs behind
``--long``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.reproduce.claims import Claim, Statement

Array = NDArray[np.float64]

LINEAR_PEAK_AT_LEAST = 7.0
T8_PEAK_BETWEEN = (2.0, 3.5)
T8R_PEAK_AT_MOST = 1.05
UPDATE_VARIANCE_WITHIN = 0.02
DROP_PEAK_AT_MOST = 1.01
SYMMETRIC_PEAK_AT_LEAST = 10.0

STATIC_MARGIN_POINTS = 0.5
LINEAR_GAP_POINTS = 1.0
SEEDS_BETTER = 12
SEEDS_NEEDED = 16
SPIKE_RATIO_AT_MOST = 0.5
SHORT_RUN_GAP_POINTS = 20.0
LONG_SEEDS_NEEDED = 3

T1 = Statement(
    id="T1",
    claim="At a change 1x to 16x, raising the learning rate at once makes the loss jump.",
    criterion="noisy quadratic, peak / loss before, linear at once: at least 7",
)
T2 = Statement(
    id="T2",
    claim="A ramp of 8 steps removes the jump of 1x to 16x only in part.",
    criterion="noisy quadratic, peak / loss before, T=8: between 2 and 3.5",
)
T3 = Statement(
    id="T3",
    claim="A ramp of 8r steps removes the jump of 1x to 16x.",
    criterion="noisy quadratic, peak / loss before, T=8r: at most 1.05",
)
T4 = Statement(
    id="T4",
    claim="The first step at once multiplies the update's variance by k^2 mu^2 + k (1 - mu^2).",
    criterion="noisy quadratic, k = 16, mu = 0.9: within 2 % of 210.4",
)
T5 = Statement(
    id="T5",
    claim="At a change 16x to 1x, dropping the learning rate at once does no harm.",
    criterion="noisy quadratic, peak / loss before, 16 to 1 at once: at most 1.01",
)
T6 = Statement(
    id="T6",
    claim="At a change 16x to 1x, a symmetric ramp down over 128 steps is harmful.",
    criterion="noisy quadratic, peak / loss before, 16 to 1 over T=128: at least 10",
)
TIER1 = (T1, T2, T3, T4, T5, T6)

_SETTING = "digits, 1x and 16x alternating every 2 epochs, lr 0.02, paired by seed"

D1 = Statement(
    id="D1",
    claim="With Dynamic the accuracy of the static small batch is kept.",
    criterion=f"{_SETTING}, 16 seeds: mean accuracy of Dynamic >= static 1x - 0.5 points",
)
D2 = Statement(
    id="D2",
    claim="Dynamic is more accurate than linear scaling at once.",
    criterion=(
        f"{_SETTING}, 16 seeds: Dynamic - linear >= 1.0 points on the mean, and > 0 in at least 12 "
        "of 16 seeds"
    ),
)
D3 = Statement(
    id="D3",
    claim="Dynamic at least halves the loss spike after a scale-out.",
    criterion=f"{_SETTING}, 16 seeds: mean spike of Dynamic <= 0.5 x that of linear at once",
)
D4 = Statement(
    id="D4",
    claim="Without scaling the learning rate, a large batch does not train in few epochs.",
    criterion=(
        "digits, 4 epochs, lr 0.005, 16 seeds: static 16x with linear scaling beats static 16x "
        "without scaling by at least 20 points"
    ),
)
TIER2 = (D1, D2, D3, D4)


def _smoke(statement: Statement, id: str) -> Statement:
    return Statement(
        id=id,
        claim=f"Smoke test of {statement.id}, too few seeds to stand for it: {statement.claim}",
        criterion=statement.criterion.replace("16 seeds", "4 seeds"),
    )


Q1, Q3, Q4 = _smoke(D1, "Q1"), _smoke(D3, "Q3"), _smoke(D4, "Q4")
QUICK = (Q1, Q3, Q4)

_DRAWN = "Fashion-MNIST CNN, workers drawn from 1-16 every 2 epochs, at least 3 seeds"
_TRACE = "Fashion-MNIST CNN, workers after a synthetic spot trace, at least 3 seeds"

L1 = Statement(
    id="L1",
    claim="With drawn worker counts Dynamic keeps the accuracy of the static small batch.",
    criterion=f"{_DRAWN}: mean accuracy of Dynamic >= static 1x - 0.5 points",
)
L2 = Statement(
    id="L2",
    claim="With drawn worker counts Dynamic at least halves the loss spike of linear at once.",
    criterion=f"{_DRAWN}: mean spike of Dynamic <= 0.5 x that of linear at once",
)
L3 = Statement(
    id="L3",
    claim="Under a spot-like trace Dynamic keeps the accuracy of the static small batch.",
    criterion=f"{_TRACE}: mean accuracy of Dynamic >= static 1x - 0.5 points",
)
L4 = Statement(
    id="L4",
    claim="Under a spot-like trace Dynamic at least halves the loss spike of linear at once.",
    criterion=f"{_TRACE}: mean spike of Dynamic <= 0.5 x that of linear at once",
)
LONG = (L1, L2, L3, L4)


@dataclass(frozen=True, kw_only=True)
class QuadraticPeaks:
    """What the noisy quadratic gave for the claims T1-T6.

    Args:
        linear: peak / loss before, 1 to 16 at once.
        ramp_8: the same with a ramp of 8 steps.
        ramp_8r: the same with a ramp of 8r steps.
        update_variance: variance of the first update after the change / before it, at once.
        drop: peak / loss before, 16 to 1 at once.
        symmetric: the same with a ramp down over 128 steps.
        ratio: k of the change.
        momentum: mu.
    """

    linear: float
    ramp_8: float
    ramp_8r: float
    update_variance: float
    drop: float
    symmetric: float
    ratio: int
    momentum: float

    @property
    def update_variance_expected(self) -> float:
        """k^2 mu^2 + k (1 - mu^2)."""
        squared = self.momentum**2
        return self.ratio**2 * squared + self.ratio * (1 - squared)


def judge_tier1(peaks: QuadraticPeaks) -> tuple[Claim, ...]:
    """T1-T6 from the peaks."""
    expected = peaks.update_variance_expected
    off = abs(peaks.update_variance / expected - 1)
    low, high = T8_PEAK_BETWEEN
    return (
        T1.judge(holds=peaks.linear >= LINEAR_PEAK_AT_LEAST, value=peaks.linear),
        T2.judge(holds=low <= peaks.ramp_8 <= high, value=peaks.ramp_8),
        T3.judge(holds=peaks.ramp_8r <= T8R_PEAK_AT_MOST, value=peaks.ramp_8r),
        T4.judge(
            holds=off <= UPDATE_VARIANCE_WITHIN,
            value={"measured": peaks.update_variance, "formula": expected},
        ),
        T5.judge(holds=peaks.drop <= DROP_PEAK_AT_MOST, value=peaks.drop),
        T6.judge(holds=peaks.symmetric >= SYMMETRIC_PEAK_AT_LEAST, value=peaks.symmetric),
    )


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """Per seed, in the same order everywhere, what the claims D1-D4 compare.

    Args:
        seeds: the seeds.
        static: test accuracy in percent, static 1x.
        linear: the same, linear scaling at once.
        dynamic: the same, Dynamic with its defaults.
        linear_spike: loss spike after a scale-out, mean over the run's scale-outs, linear at once.
        dynamic_spike: the same, Dynamic.
        short_linear: accuracy after 4 epochs, static 16x with linear scaling.
        short_none: the same without scaling.
    """

    seeds: Sequence[int]
    static: Array
    linear: Array
    dynamic: Array
    linear_spike: Array
    dynamic_spike: Array
    short_linear: Array
    short_none: Array


def judge_tier2(runs: PairedRuns) -> tuple[Claim, ...]:
    """D1-D4 where there are 16 seeds; otherwise D1-D4 as not run, then Q1, Q3 and Q4."""
    seeds = tuple(runs.seeds)
    if len(seeds) >= SEEDS_NEEDED:
        return (
            judge_kept(D1, seeds, runs.static, runs.dynamic),
            _judge_gap(runs),
            judge_spike(D3, seeds, runs.linear_spike, runs.dynamic_spike),
            _judge_short(D4, runs),
        )
    return (
        *(statement.not_run() for statement in TIER2),
        judge_kept(Q1, seeds, runs.static, runs.dynamic),
        judge_spike(Q3, seeds, runs.linear_spike, runs.dynamic_spike),
        _judge_short(Q4, runs),
    )


def judge_kept(statement: Statement, seeds: Sequence[int], static: Array, dynamic: Array) -> Claim:
    """Whether the mean accuracy of Dynamic is at most 0.5 points below the static run's."""
    difference = _difference(dynamic, static)
    return statement.judge(
        holds=difference >= -STATIC_MARGIN_POINTS,
        value={
            "dynamic": float(dynamic.mean()),
            "static_1x": float(static.mean()),
            "difference": difference,
        },
        seeds=seeds,
    )


def judge_spike(statement: Statement, seeds: Sequence[int], linear: Array, dynamic: Array) -> Claim:
    """Whether the mean spike of Dynamic is at most half that of linear scaling at once.

    A linear run that diverged has an infinite spike: any finite one is below half of it. An
    infinite spike of Dynamic never meets the criterion.
    """
    dynamic_mean, linear_mean = float(dynamic.mean()), float(linear.mean())
    holds = np.isfinite(dynamic_mean) and dynamic_mean <= SPIKE_RATIO_AT_MOST * linear_mean
    ratio = dynamic_mean / linear_mean if linear_mean > 0 else float("nan")
    return statement.judge(
        holds=bool(holds),
        value={"dynamic": dynamic_mean, "linear_at_once": linear_mean, "ratio": ratio},
        seeds=seeds,
    )


def _judge_gap(runs: PairedRuns) -> Claim:
    difference = _difference(runs.dynamic, runs.linear)
    better = int((runs.dynamic > runs.linear + 1e-9).sum())
    worse = int((runs.dynamic < runs.linear - 1e-9).sum())
    needed = SEEDS_BETTER * len(runs.seeds) / SEEDS_NEEDED
    return D2.judge(
        holds=difference >= LINEAR_GAP_POINTS and better >= needed,
        value={
            "dynamic": float(runs.dynamic.mean()),
            "linear_at_once": float(runs.linear.mean()),
            "difference": difference,
            "seeds_better": better,
            "seeds_tied": len(runs.seeds) - better - worse,
            "seeds_worse": worse,
        },
        seeds=runs.seeds,
    )


def _judge_short(statement: Statement, runs: PairedRuns) -> Claim:
    difference = _difference(runs.short_linear, runs.short_none)
    return statement.judge(
        holds=difference >= SHORT_RUN_GAP_POINTS,
        value={
            "linear_16x": float(runs.short_linear.mean()),
            "none_16x": float(runs.short_none.mean()),
            "difference": difference,
        },
        seeds=runs.seeds,
    )


def _difference(left: Array, right: Array) -> float:
    """Mean difference of paired accuracies, free of the rounding of the single means."""
    return round(float((left - right).mean()), 9)
