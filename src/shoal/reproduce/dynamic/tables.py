"""Tables and words of ``shoal reproduce dynamic``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.reproduce.dynamic.long import LongSettings, cells
from shoal.reproduce.dynamic.methods import DYNAMIC, LINEAR, METHODS, SHORT_METHODS, STATIC
from shoal.reproduce.dynamic.tier2 import DigitsRows, sd
from shoal.reproduce.result import Cell, Table

PILOT = (
    "pilot: an earlier run of other code on other seeds, from which settings and criteria come; it "
    "may differ in the split and the start of the weights."
)
NO_CORRECTION = "linear, no momentum correction (v-form)"

CHOICES = (
    "The ramp is the paper's equation (6): the multiplier goes from its old value to k in a "
    "straight line over T optimizer steps, the first step after a change still at the old learning "
    "rate.",
    "Its length T = 8r (r = new multiplier / multiplier in force) is our choice. Of the paper's T "
    "only second-hand readings are known to us: 8, or 8 times the number of workers. On the noisy "
    "quadratic 8r removes the spike at every ratio and 8 only at small ones (table of tier 1).",
    "Dropping at once when workers leave is our choice; nothing was found on it. A large learning "
    "rate with a small batch does harm: see 16 -> 1 in the table of tier 1.",
    "Starting a ramp from any multiplier, and anchoring it anew at a change in mid-ramp, are ours "
    "too.",
    "The pilot's split of the digits, start of the weights and border of a shifted image are not "
    "on record. Here: a stratified split with one seed, N(0, 2 / fan-in) and zeros. The short "
    "static runs keep the 2 warm-up epochs of the main setting.",
)


def caveats(rows: DigitsRows) -> tuple[str, ...]:
    """What must be read before the numbers are quoted."""
    v_form, dynamic = rows.main[NO_CORRECTION], rows.main[DYNAMIC]
    return (
        "A small MLP without BatchNorm, in a setting chosen because linear scaling breaks there. "
        "In milder settings the accuracies tie and only the spike differs; with numbers of workers "
        "drawn at random the pilot saw no difference at all.",
        "A plain v-form without momentum correction does about as well here: "
        f"{v_form.accuracy.mean():.2f} % and spike {np.mean(v_form.spike):.3f}, against "
        f"{dynamic.accuracy.mean():.2f} % and {np.mean(dynamic.spike):.3f} for Dynamic.",
        "The paper's results on many GPUs (ImageNet, COCO, ADE20K) are not reproduced.",
        "360 test images: one image is 0.28 points.",
        "'square root' and 'none' look fine only because 30 epochs are plenty. The short static "
        "runs show the need for linear scaling.",
        "On the noisy quadratic a negative mean excess comes in part from the lower learning rate "
        "during a ramp: judge by the peak.",
    )


def _mean_sd(mean: float | None, deviation: float | None) -> str | None:
    if mean is None:
        return None
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ({deviation:.2f})"


def main_table(rows: DigitsRows) -> Table:
    """Every method beside the numbers of the pilot."""

    def row(name: str, pilot: tuple[float | None, ...]) -> tuple[Cell, ...]:
        outcome = rows.main[name]
        spike = float(np.mean(outcome.spike))
        accuracy, accuracy_sd, test_loss, pilot_spike = pilot
        return (
            name,
            _mean_sd(float(outcome.accuracy.mean()), sd(outcome.accuracy)),
            _mean_sd(accuracy, accuracy_sd),
            round(float(outcome.test_loss.mean()), 3),
            test_loss,
            round(spike, 3) if np.isfinite(spike) else ("inf" if np.isinf(spike) else None),
            pilot_spike,
        )

    settings = rows.settings
    return Table(
        title=f"Tier 2: digits, {len(settings.seeds)} paired seeds, {settings.epochs} epochs",
        columns=(
            "method",
            "acc % (sd)",
            "pilot",
            "test loss",
            "pilot",
            "spike",
            "pilot",
        ),
        rows=tuple(row(method.name, method.pilot) for method in METHODS),
        note=(
            f"Workers 1 and 16 by turns, 2 epochs each, unless static; lr {settings.lr}, momentum "
            f"{settings.momentum}, weight decay {settings.weight_decay}, 8 samples per worker, "
            "cosine by samples. Spike: largest loss in the 40 steps after a scale-out minus the "
            f"mean of the 50 before. Seeds {settings.seeds[0]}-{settings.seeds[-1]}. {PILOT}"
        ),
    )


def seed_table(rows: DigitsRows) -> Table:
    """The compared methods seed by seed; all others are in ``result.json``."""
    names = (STATIC, LINEAR, "T=8 up, drop at once", DYNAMIC)
    body = tuple(
        (
            str(seed),
            *(round(float(rows.main[name].accuracy[row]), 2) for name in names),
            round(float(rows.main[LINEAR].spike[row]), 3),
            round(float(rows.main[DYNAMIC].spike[row]), 3),
        )
        for row, seed in enumerate(rows.settings.seeds)
    )
    return Table(
        title="Tier 2, seed by seed: test accuracy in percent, and spikes",
        columns=("seed", *names, "spike, linear at once", "spike, T=8r"),
        rows=body,
    )


def short_table(rows: DigitsRows) -> Table:
    """Short static runs: why the learning rate has to follow the batch at all."""
    epochs = tuple(rows.short)
    columns: list[str] = ["method"]
    for count in epochs:
        columns += [f"{count} epochs, acc % (sd)", "pilot"]
    body: list[tuple[Cell, ...]] = []
    for method in SHORT_METHODS:
        row: list[Cell] = [method.name]
        for count in epochs:
            accuracy = rows.short[count][method.name].accuracy
            row += [_mean_sd(float(accuracy.mean()), sd(accuracy)), method.pilot.get(count)]
        body.append(tuple(row))
    return Table(
        title=f"Short static runs, lr {rows.settings.short_lr}",
        columns=tuple(columns),
        rows=tuple(body),
        note=f"In few epochs a batch of 128 needs the larger learning rate. {PILOT}",
    )


def long_table(settings: LongSettings, finished: Mapping[str, Mapping[str, Any]]) -> Table:
    """Every cell of the long experiment, finished or not."""
    body = tuple(
        (
            cell.scenario,
            cell.method,
            str(cell.seed),
            *(
                finished[cell.name].get(field) if cell.name in finished else None
                for field in ("accuracy", "test_loss", "spike", "steps", "seconds")
            ),
            "finished" if cell.name in finished else "not run",
        )
        for cell in cells(settings)
    )
    return Table(
        title="Long: Fashion-MNIST, small CNN",
        columns=(
            "workers",
            "method",
            "seed",
            "acc %",
            "test loss",
            "spike",
            "steps",
            "seconds",
            "state",
        ),
        rows=body,
        note=(
            f"{settings.epochs} epochs, {settings.worker_samples} samples per worker, lr "
            f"{settings.lr}. drawn: 1-16 workers, anew every {settings.block_epochs} epochs. "
            "trace: a synthetic trace in the shape of spot capacity, not a recording."
        ),
    )
