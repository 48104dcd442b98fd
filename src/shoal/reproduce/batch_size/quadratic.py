"""The noisy quadratic's part: P1 and P2, exact and in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.reproduce.batch_size import criteria
from shoal.reproduce.claims import Claim, Statement
from shoal.reproduce.result import Table
from shoal.workloads.quadratic_study import (
    Optimum,
    QuadraticTask,
    heavy_ball_optima,
    sgd_optima,
)

BATCHES = tuple(4**k for k in range(1, 11))
CAUTIOUS_LR = 1.9
CAUTIOUS_PULL = 0.01

# Steps in section 5.3 of the notes, computed there by other code on coarser grids (120 learning rates; 40 by
# 15 for momentum).
REFERENCE_SGD = (1513608, 378337, 96518, 25808, 10496, 7884, 7203, 7064, 7031, 7023)
REFERENCE_MOMENTUM = (1504149, 377520, 88912, 20395, 5332, 1380, 362, 202, 192, 188)


@dataclass(frozen=True, kw_only=True)
class LeastSquares:
    """S = S_min (1 + B_crit / B), fitted to ln S.

    Args:
        s_min: steps of an endless batch.
        b_crit: the batch at which steps and samples are twice their least.
        rms: root mean square of the residuals of ln S.
    """

    s_min: float
    b_crit: float
    rms: float

    @property
    def e_min(self) -> float:
        """Least samples."""
        return self.s_min * self.b_crit


def least_squares(batches: Sequence[int], steps: Sequence[float]) -> LeastSquares:
    """The least-squares fit of the trade-off to exact values, which have no spread of their own.

    Args:
        batches: at least three.
        steps: S at each, > 0.

    Source: McCandlish et al. 2018, section 2.3, fitted as in section 5.2 of the notes.
    """
    inverse = 1 / np.asarray(batches, dtype=np.float64)
    logs = np.log(np.asarray(steps, dtype=np.float64))

    def residuals(log_crit: float) -> np.ndarray:
        shape = np.log1p(math.exp(log_crit) * inverse)
        return logs - shape - np.mean(logs - shape)

    def loss(log_crit: float) -> float:
        return float(np.mean(residuals(log_crit) ** 2))

    # A fine grid finds the valley, bisection of the slope its bottom.
    grid = np.linspace(math.log(min(batches)) - 10, math.log(max(batches)) + 10, 400)
    start = int(np.argmin([loss(x) for x in grid]))
    best = _minimum(
        loss, float(grid[max(start - 1, 0)]), float(grid[min(start + 1, len(grid) - 1)])
    )
    crit = math.exp(best)
    s_min = math.exp(float(np.mean(logs - np.log1p(crit * inverse))))
    return LeastSquares(s_min=s_min, b_crit=crit, rms=math.sqrt(loss(best)))


def _minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    """Golden section on a valley."""
    shrink = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return (low + high) / 2


@dataclass(frozen=True, kw_only=True)
class QuadraticStudy:
    """S of both optimizers on the noisy quadratic.

    Args:
        sgd: over every stable learning rate.
        momentum: over every momentum to 1 - 1e-5.
        cautious_sgd: learning rates to 95 % of the stability limit only.
        cautious_momentum: momentum to 0.99 only.
    """

    sgd: Sequence[Optimum]
    momentum: Sequence[Optimum]
    cautious_sgd: Sequence[Optimum]
    cautious_momentum: Sequence[Optimum]

    def to_dict(self) -> dict[str, object]:
        """Every optimum as plain values."""
        return {
            name: [
                {
                    "global_batch": o.global_batch,
                    "steps": o.steps,
                    "lr": o.lr,
                    "momentum": o.momentum,
                }
                for o in getattr(self, name)
            ]
            for name in ("sgd", "momentum", "cautious_sgd", "cautious_momentum")
        }


def fit(optima: Sequence[Optimum]) -> LeastSquares:
    """The trade-off fitted to exact optima."""
    return least_squares([o.global_batch for o in optima], [o.steps for o in optima])


def run_quadratic() -> QuadraticStudy:
    """Solve the task at every batch; about 20 s of one core."""
    task = QuadraticTask()
    return QuadraticStudy(
        sgd=sgd_optima(task, BATCHES),
        momentum=heavy_ball_optima(task, BATCHES),
        cautious_sgd=sgd_optima(task, BATCHES, largest_lr=CAUTIOUS_LR),
        cautious_momentum=heavy_ball_optima(task, BATCHES, least_pull=CAUTIOUS_PULL),
    )


def judge(study: QuadraticStudy) -> tuple[Claim, ...]:
    """P1 and P2 over everything, P1r and P2r in the reference's ranges."""
    return (
        _judge_sgd(criteria.P1, study.sgd),
        _judge_momentum(criteria.P2, study.sgd, study.momentum),
        _judge_sgd(criteria.P1R, study.cautious_sgd),
        _judge_momentum(criteria.P2R, study.sgd, study.cautious_momentum),
    )


def _judge_sgd(statement: Statement, optima: Sequence[Optimum]) -> Claim:
    steps, crit = _steps(optima), fit(optima).b_crit
    shrinks, plateau = steps[4] / steps[64], steps[2**20] / steps[2**14]
    return statement.judge(
        holds=_inside(shrinks, criteria.SGD_SHRINKS_BETWEEN)
        and plateau > criteria.SGD_PLATEAU_ABOVE
        and _inside(crit, criteria.SGD_CRITICAL_BETWEEN),
        value={"S(4)/S(64)": shrinks, "S(2^20)/S(2^14)": plateau, "B_crit": crit},
    )


def _judge_momentum(
    statement: Statement, sgd: Sequence[Optimum], momentum: Sequence[Optimum]
) -> Claim:
    steps, heavy = _steps(sgd), _steps(momentum)
    ratios = {batch: heavy[batch] / steps[batch] for batch in steps}
    small = [ratio for batch, ratio in ratios.items() if batch <= 64]
    critical = fit(momentum).b_crit / fit(sgd).b_crit
    return statement.judge(
        holds=all(_inside(ratio, criteria.MOMENTUM_SMALL_BETWEEN) for ratio in small)
        and ratios[2**18] < criteria.MOMENTUM_LARGE_BELOW
        and critical > criteria.MOMENTUM_CRITICAL_RATIO_ABOVE,
        value={
            "least ratio for B <= 64": min(small),
            "largest": max(small),
            "ratio at 2^18": ratios[2**18],
            "B_crit ratio": critical,
        },
    )


def caveats(study: QuadraticStudy) -> tuple[str, ...]:
    """How P1 and P2 depend on what is searched."""
    sgd, cautious = _steps(study.sgd), _steps(study.cautious_sgd)
    heavy, tame = _steps(study.momentum), _steps(study.cautious_momentum)
    small = [batch for batch in BATCHES if batch <= 64]
    return (
        "P1's plateau depends on how near the learning rate may come to the stability limit: "
        f"S(2^20)/S(2^14) is {sgd[2**20] / sgd[2**14]:.3f} with every stable learning rate and "
        f"{cautious[2**20] / cautious[2**14]:.3f} with those to 95 % of the limit, as on the reference's grid.",
        "P2's left part depends on how much momentum is searched: momentum / SGD at B <= 64 is at least "
        f"{min(heavy[b] / sgd[b] for b in small):.3f} with m to 0.99999, where it acts as averaging, and "
        f"{min(tame[b] / sgd[b] for b in small):.3f} with m to 0.99.",
        "The quadratic has no evaluation noise and its optimum is exact: it says nothing about the luck of "
        "a search, and nothing about generalisation.",
    )


def table(study: QuadraticStudy) -> Table:
    """Steps and best settings beside the reference."""
    rows = tuple(
        (
            f"{one.global_batch:,}",
            one.steps,
            REFERENCE_SGD[place],
            one.lr,
            study.cautious_sgd[place].steps,
            two.steps,
            REFERENCE_MOMENTUM[place],
            two.effective_lr,
            two.momentum,
            study.cautious_momentum[place].steps,
        )
        for place, (one, two) in enumerate(zip(study.sgd, study.momentum, strict=True))
    )
    fits = {name: fit(getattr(study, name)) for name in ("sgd", "momentum")}
    words = "; ".join(
        f"{name}: S_min {found.s_min:,.0f}, E_min {found.e_min:.3g}, B_crit {found.b_crit:,.0f}, rms "
        f"{found.rms:.2f}"
        for name, found in fits.items()
    )
    return Table(
        title="Noisy quadratic: fewest steps to risk 0.01, exact",
        columns=(
            "B",
            "SGD",
            "reference",
            "best lr",
            "lr to 1.9",
            "momentum",
            "reference",
            "effective lr",
            "m",
            "m to 0.99",
        ),
        rows=rows,
        note=(
            f"h = 1/i, i = 1..10^4, gradient variance h/B. Fits: {words}. reference: section 5.3 of the "
            "notes, other code on coarser grids."
        ),
    )


def _steps(optima: Sequence[Optimum]) -> dict[int, int]:
    return {optimum.global_batch: optimum.steps for optimum in optima}


def _inside(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]
