"""What each shipped sync rule sends, as a formula: the other side of the bytes that are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.testing.sync_task import LAYOUT, NUMBERS

FORMULAS: dict[str, Callable[[Any, int, int, int], int]] = {
    "independent": lambda rule, p, size, steps: 0,
    "lookahead": lambda rule, p, size, steps: 0,
    "allreduce": lambda rule, p, size, steps: steps * 2 * (p - 1) * size,
    "leader": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * ((p - 1) * size * (rule.pull > 0) + 12 * p * (p - 1))
    ),
    "local_sgd": lambda rule, p, size, steps: (
        (min(steps, rule.warmup_steps) + max(0, steps - rule.warmup_steps) // rule.sync_every)
        * 2
        * (p - 1)
        * size
    ),
    "easgd": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * 2 * (p - 1 if rule.synchronous else p) * size
    ),
    "eamsgd": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * p * size,
    "downpour": lambda rule, p, size, steps: (
        (steps // rule.sync_every) * (2 * p if p > 1 else 1) * size
    ),
    "slowmo": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "bmuf": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "diloco": lambda rule, p, size, steps: (steps // rule.sync_every) * 2 * (p - 1) * size,
    "sgp": lambda rule, p, size, steps: (
        (steps // rule.sync_every)
        * p
        * (size + size // NUMBERS)
        * min(rule.peers, (p - 1).bit_length())
    ),
    "powersgd": lambda rule, p, size, steps: (
        min(steps, rule.warmup_steps) * 2 * (p - 1) * size
        + max(0, steps - rule.warmup_steps) * 2 * (p - 1) * _thin(rule) * (size // NUMBERS)
    ),
}
"""Payload bytes of ``steps`` steps with p workers and N bytes of weights, by the name of the rule; steps a
multiple of the period, one group."""


def _thin(rule: Any) -> int:
    """Numbers that PowerSGD sends for ``LAYOUT``: the factors of what it compresses, the rest as it is."""
    total = 0
    for shape in LAYOUT:
        a, b = shape[0], shape.numel() // shape[0]
        is_thin = len(shape) > 1 and rule.rank * (a + b) * rule.min_compression < a * b
        total += rule.rank * (a + b) if is_thin else shape.numel()
    return total
