"""What is compared: a scaling rule, and how many workers there are in each epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.scaling import Dynamic, Linear, NoiseMatched, SquareRoot, Unscaled
from shoal.scaling.contract import Rule

WORKER_SAMPLES = 8
SMALL, LARGE = 1, 16
BLOCK_EPOCHS = 2

STATIC = "static 1x"
STATIC_LARGE = "static 16x, linear with warm-up"
LINEAR = "linear, at once"
DYNAMIC = "T=8r up, drop at once (default)"


def alternating(epoch: int) -> int:
    """1 worker and 16 by turns, two epochs each, beginning with 1."""
    return LARGE if epoch // BLOCK_EPOCHS % 2 else SMALL


def always_small(epoch: int) -> int:
    """1 worker."""
    return SMALL


def always_large(epoch: int) -> int:
    """16 workers."""
    return LARGE


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of a comparison.

    Args:
        name: as it stands in the tables.
        rule: makes the scaling rule.
        workers: how many there are in an epoch.
        pilot: test accuracy in percent and its sd, test loss and spike in the pilot run;
            None where it has none.
    """

    name: str
    rule: Callable[[], Rule[Any]]
    workers: Callable[[int], int]
    pilot: tuple[float | None, float | None, float | None, float | None]


def _dynamic(ramp_steps: Any = "8r", down: Any = "at_once") -> Callable[[], Rule[Any]]:
    return lambda: Dynamic(reference_batch=WORKER_SAMPLES, ramp_steps=ramp_steps, down=down)


def _linear(momentum_correction: bool = True) -> Callable[[], Rule[Any]]:
    return lambda: Linear(reference_batch=WORKER_SAMPLES, momentum_correction=momentum_correction)


def _square_root() -> Rule[Any]:
    return SquareRoot(reference_batch=WORKER_SAMPLES)


def _unscaled() -> Rule[Any]:
    return Unscaled(reference_batch=WORKER_SAMPLES)


def _noise_matched() -> Rule[Any]:
    return NoiseMatched(reference_batch=WORKER_SAMPLES)


METHODS = (
    Method(
        name=STATIC,
        rule=_linear(),
        workers=always_small,
        pilot=(97.33, 0.59, 0.086, None),
    ),
    Method(
        name=STATIC_LARGE,
        rule=_linear(),
        workers=always_large,
        pilot=(97.14, 0.71, 0.095, None),
    ),
    Method(
        name=LINEAR,
        rule=_linear(),
        workers=alternating,
        pilot=(95.76, 1.29, 0.141, 0.724),
    ),
    Method(
        name="T=8 up, drop at once",
        rule=_dynamic(8),
        workers=alternating,
        pilot=(97.31, 0.66, 0.094, 0.296),
    ),
    Method(
        name="T=8 symmetric",
        rule=_dynamic(8, "ramp"),
        workers=alternating,
        pilot=(96.77, 0.88, 0.102, 0.306),
    ),
    Method(
        name=DYNAMIC,
        rule=_dynamic(),
        workers=alternating,
        pilot=(97.26, 0.65, 0.080, 0.098),
    ),
    Method(
        name="T=8r literal (also down)",
        rule=_dynamic("8r", "ramp"),
        workers=alternating,
        pilot=(97.50, 0.73, 0.082, 0.093),
    ),
    Method(
        name="noise-matched",
        rule=_noise_matched,
        workers=alternating,
        pilot=(97.36, 0.61, 0.090, 0.216),
    ),
    Method(
        name="linear, no momentum correction (v-form)",
        rule=_linear(momentum_correction=False),
        workers=alternating,
        pilot=(97.40, 0.86, 0.091, 0.093),
    ),
    Method(
        name="square root",
        rule=_square_root,
        workers=alternating,
        pilot=(97.50, None, 0.081, 0.177),
    ),
    Method(
        name="none",
        rule=_unscaled,
        workers=alternating,
        pilot=(97.48, None, 0.078, 0.098),
    ),
)

SHORT_LINEAR = "static 16x, linear"
SHORT_NONE = "static 16x, none"


@dataclass(frozen=True, kw_only=True)
class ShortMethod:
    """One row of the table of short static runs.

    Args:
        name: as it stands in the table.
        rule: makes the scaling rule.
        workers: how many there are in an epoch.
        pilot: test accuracy in percent in the pilot run, by epochs.
    """

    name: str
    rule: Callable[[], Rule[Any]]
    workers: Callable[[int], int]
    pilot: dict[int, float]


SHORT_METHODS = (
    ShortMethod(
        name="static 1x",
        rule=_linear(),
        workers=always_small,
        pilot={4: 92.5, 8: 95.5},
    ),
    ShortMethod(
        name=SHORT_LINEAR,
        rule=_linear(),
        workers=always_large,
        pilot={4: 90.9, 8: 94.8},
    ),
    ShortMethod(
        name="static 16x, square root",
        rule=_square_root,
        workers=always_large,
        pilot={4: 81.9, 8: 90.9},
    ),
    ShortMethod(
        name=SHORT_NONE,
        rule=_unscaled,
        workers=always_large,
        pilot={4: 49.0, 8: 78.1},
    ),
)
