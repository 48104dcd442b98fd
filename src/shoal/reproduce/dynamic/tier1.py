"""Tier 1: what each rule does to the expected loss of a noisy quadratic, calculated exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.reproduce.dynamic.criteria import QuadraticPeaks
from shoal.reproduce.dynamic.pace import Pace
from shoal.reproduce.result import Table
from shoal.scaling import Dynamic, Linear, NoiseMatched, schedules
from shoal.scaling.contract import Rule
from shoal.workloads.noisy_quadratic import NoisyQuadratic

MOMENTUM = 0.9
LR = 0.01
WORKER_SAMPLES = 8
SETTLING_STEPS = 4_000
EXCESS_STEPS = 100
PEAK_STEPS = 400

RULES: dict[str, Callable[[], Rule[Any]]] = {
    "linear, at once": lambda: Linear(reference_batch=WORKER_SAMPLES),
    "T=8": lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps=8, down="ramp"),
    "T=20": lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps=20, down="ramp"),
    "T=50": lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps=50, down="ramp"),
    "T=8r": lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps="8r", down="ramp"),
    "noise-matched": lambda: NoiseMatched(reference_batch=WORKER_SAMPLES),
    "T=128": lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps=128, down="ramp"),
}

# (change, rule) -> peak / loss before, mean relative excess: section 1.5 of the notes, calculated
# there by other code.
REFERENCE: dict[tuple[tuple[int, int], str], tuple[float, float]] = {
    ((1, 2), "linear, at once"): (1.24, 0.043),
    ((1, 2), "T=8"): (1.05, 0.010),
    ((1, 2), "T=20"): (1.00, -0.022),
    ((1, 2), "T=50"): (1.00, -0.092),
    ((1, 2), "T=8r"): (1.00, -0.012),
    ((1, 2), "noise-matched"): (1.08, 0.015),
    ((1, 4), "linear, at once"): (1.95, 0.132),
    ((1, 4), "T=8"): (1.27, 0.042),
    ((1, 4), "T=20"): (1.00, -0.017),
    ((1, 4), "T=50"): (1.00, -0.129),
    ((1, 4), "T=8r"): (1.00, -0.063),
    ((1, 4), "noise-matched"): (1.26, 0.040),
    ((1, 8), "linear, at once"): (3.75, 0.311),
    ((1, 8), "T=8"): (1.80, 0.109),
    ((1, 8), "T=20"): (1.06, 0.010),
    ((1, 8), "T=50"): (1.01, -0.137),
    ((1, 8), "T=8r"): (1.01, -0.198),
    ((1, 8), "noise-matched"): (1.60, 0.080),
    ((1, 16), "linear, at once"): (7.99, 0.675),
    ((1, 16), "T=8"): (2.86, 0.231),
    ((1, 16), "T=20"): (1.40, 0.073),
    ((1, 16), "T=50"): (1.02, -0.119),
    ((1, 16), "T=8r"): (1.02, -0.456),
    ((1, 16), "noise-matched"): (2.15, 0.146),
    ((16, 1), "linear, at once"): (1.00, -0.056),
    ((16, 1), "T=8"): (4.59, 0.703),
    ((16, 1), "T=20"): (7.23, 1.73),
    ((16, 1), "T=8r"): (1.29, 0.010),
    ((16, 1), "T=128"): (12.6, 8.35),
}


@dataclass(frozen=True, kw_only=True)
class Response:
    """How the expected loss answers a change of the number of workers.

    Args:
        before: expected loss before the change.
        losses: expected loss after each step since the change, relative to ``before``.
        update_variance: variance of the first update after the change over that of the last before.
    """

    before: float
    losses: tuple[float, ...]
    update_variance: float

    @property
    def peak(self) -> float:
        """Largest relative loss."""
        return max(self.losses)

    @property
    def excess(self) -> float:
        """Mean of (relative loss - 1) over the first 100 steps; negative is better than before."""
        return sum(self.losses[:EXCESS_STEPS]) / EXCESS_STEPS - 1.0


def respond(rule: Rule[Any], workers_before: int, workers_after: int) -> Response:
    """The response of ``rule`` to one change, after 4,000 steps at ``workers_before``.

    Args:
        rule: a scaling rule with a reference batch of 8 samples.
        workers_before: k before the change.
        workers_after: k after it.
    """
    batch = workers_before * WORKER_SAMPLES
    pace = Pace(
        rule,
        schedules.constant(),
        momentum=MOMENTUM,
        epoch_samples=1,
        global_batch=batch,
    )
    moments = NoisyQuadratic().moments()
    before = update_before = first_update = 0.0
    losses: list[float] = []
    for step in range(SETTLING_STEPS + PEAK_STEPS):
        changed = step >= SETTLING_STEPS
        batch = (workers_after if changed else workers_before) * WORKER_SAMPLES
        rate = pace.next(batch)
        lr = rate.lr(LR)
        moments = moments.step(
            lr=lr, momentum=MOMENTUM, global_batch=batch, momentum_factor=rate.momentum_factor
        )
        pace.commit(rate, batch)
        if step == SETTLING_STEPS - 1:
            before, update_before = moments.loss, lr**2 * moments.buffer_variance
        elif step == SETTLING_STEPS:
            first_update = lr**2 * moments.buffer_variance
        if changed:
            losses.append(moments.loss / before)
    return Response(
        before=before, losses=tuple(losses), update_variance=first_update / update_before
    )


Responses = dict[tuple[tuple[int, int], str], Response]


def run_tier1() -> Responses:
    """The response of every cell of the reference table; a few seconds."""
    return {
        (change, name): respond(RULES[name](), change[0], change[1]) for change, name in REFERENCE
    }


def peaks(responses: Responses) -> QuadraticPeaks:
    """What the claims T1-T6 are judged by."""
    up, down = (1, 16), (16, 1)
    return QuadraticPeaks(
        linear=responses[up, "linear, at once"].peak,
        ramp_8=responses[up, "T=8"].peak,
        ramp_8r=responses[up, "T=8r"].peak,
        update_variance=responses[up, "linear, at once"].update_variance,
        drop=responses[down, "linear, at once"].peak,
        symmetric=responses[down, "T=128"].peak,
        ratio=16,
        momentum=MOMENTUM,
    )


def table(responses: Responses) -> Table:
    """Measured peak and excess beside the reference, a row for each cell."""
    rows = tuple(
        (
            f"{before} -> {after}",
            name,
            round(responses[(before, after), name].peak, 3),
            peak,
            round(responses[(before, after), name].excess, 3),
            excess,
        )
        for ((before, after), name), (peak, excess) in REFERENCE.items()
    )
    return Table(
        title="Tier 1: noisy quadratic, exact second moments",
        columns=("workers", "rule", "peak", "reference", "mean excess", "reference"),
        rows=rows,
        note=(
            f"30 curvatures log-spaced 0.01..1, gradient noise h/B, mu {MOMENTUM}, lr {LR}, B = "
            f"{WORKER_SAMPLES}. Peak: largest expected loss in {PEAK_STEPS} steps / loss before "
            f"the change. Mean excess: over the first {EXCESS_STEPS} steps; it is negative partly "
            "because the learning rate is lower during a ramp, so judge by the peak. "
            "reference: the same table, calculated by other code before this one existed."
        ),
    )
