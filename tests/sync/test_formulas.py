"""Every rule against its formula written out worker by worker (``sync_by_hand``).

Bit for bit in the first steps, where fractions are powers of two and so are the workers; else to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import sync_by_hand as naive

from shoal.sync import (
    BMUF,
    EAMSGD,
    EASGD,
    SGP,
    AllReduce,
    DiLoCo,
    Downpour,
    Leader,
    LocalSGD,
    Lookahead,
    SlowMo,
)
from shoal.testing.sync_task import integer_trace

STEPS = 14

PAIRS: dict[str, tuple[object, Callable[[int, int], naive.Trace]]] = {
    "allreduce": (AllReduce(), naive.all_reduce),
    "local_sgd": (LocalSGD(sync_every=4), partial(naive.local_sgd, period=4)),
    "leader": (
        Leader(sync_every=2, global_sync_every=2, pull=0.25),
        partial(naive.leader, period=2, pull=0.25),
    ),
    "leader-window": (
        Leader(sync_every=1, global_sync_every=1, pull=0.5, window=1),
        partial(naive.leader, period=1, pull=0.5, window=1),
    ),
    "easgd": (
        EASGD(sync_every=3, alpha=0.25),
        partial(naive.easgd, period=3, alpha=0.25, beta=0.0, synchronous=False),
    ),
    "easgd-synchronous": (
        EASGD(sync_every=2, alpha=0.25, beta=0.5, synchronous=True),
        partial(naive.easgd, period=2, alpha=0.25, beta=0.5, synchronous=True),
    ),
    "eamsgd": (
        EAMSGD(sync_every=3, alpha=0.25, momentum=0.5),
        partial(naive.eamsgd, period=3, alpha=0.25, momentum=0.5),
    ),
    "downpour": (Downpour(sync_every=2), partial(naive.downpour, period=2)),
    "slowmo": (
        SlowMo(sync_every=4, slow_momentum=0.5, slow_lr=0.5),
        partial(naive.slowmo, period=4, beta=0.5, alpha=0.5),
    ),
    "bmuf": (
        BMUF(sync_every=4, block_momentum=0.5, block_lr=0.5),
        partial(naive.bmuf, period=4, zeta=0.5, eta=0.5, nesterov=False),
    ),
    "bmuf-nesterov": (
        BMUF(sync_every=4, block_momentum=0.5, nesterov=True),
        partial(naive.bmuf, period=4, zeta=0.5, eta=1.0, nesterov=True),
    ),
    "diloco": (
        DiLoCo(sync_every=4, outer_lr=0.5, outer_momentum=0.5),
        partial(naive.diloco, period=4, lr=0.5, momentum=0.5, nesterov=True),
    ),
    "diloco-plain": (
        DiLoCo(sync_every=4, outer_lr=0.5, outer_momentum=0.5, nesterov=False),
        partial(naive.diloco, period=4, lr=0.5, momentum=0.5, nesterov=False),
    ),
    "diloco-streaming": (
        DiLoCo(sync_every=6, outer_lr=0.5, outer_momentum=0.5, fragments=3, delay=1, mixing=0.25),
        partial(
            naive.diloco,
            period=6,
            lr=0.5,
            momentum=0.5,
            nesterov=True,
            fragments=3,
            delay=1,
            mixing=0.25,
        ),
    ),
    "lookahead": (
        Lookahead(sync_every=3, step_size=0.25),
        partial(naive.lookahead, period=3, step_size=0.25),
    ),
    "sgp": (SGP(), naive.sgp),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("name", list(PAIRS))
def test_the_rule_is_its_formula(name: str, workers: int) -> None:
    rule, formula = PAIRS[name]
    found = integer_trace(rule, workers=workers, steps=STEPS)  # pyright: ignore[reportArgumentType]
    expected = formula(workers, STEPS)
    for number, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        # Three workers, and the products of many steps, round.
        assert row == pytest.approx(wanted, rel=1e-12, abs=1e-12), f"step {number}"
        if workers != 3 and number < 8:
            assert row == wanted, f"step {number}"
