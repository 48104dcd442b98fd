"""How fast the order of an epoch is, and how much memory it takes.

`order_*` rows are the cost of one index of `Order.take` on one core, the making of the `Order` included.
Where a whole epoch fits into memory the peer is `torch.randperm(n)`, which gives as many indices, but
can only give all of them at once. `order_peak` is the peak allocation for a million positions of an
epoch of 2**40 - 3 samples, against the same for 60,000: it is 1 where memory does not grow with n.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.pairing import Row, measured, paired
from shoal.data import Order

PAIRS = 15
WARM_UP = 2
ASKED = 1_000_000
UNIT = "seconds per million indices"


def run() -> list[dict[str, object]]:
    """All rows, in some ten seconds on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            beside_randperm("order_60k", 60_000),
            alone("order_2p40", 2**40 - 3),
            beside_randperm("order_pow2plus1", 2**20 + 1),
            alone("order_2p39plus1", 2**39 + 1),
            peak(),
        ]
    finally:
        torch.set_num_threads(threads)
    return [row.as_dict() for row in rows]


def beside_randperm(name: str, n: int) -> Row:
    """A whole epoch, ours and torch's in turn."""
    generator = torch.Generator()
    ours: list[float] = []
    theirs: list[float] = []
    for epoch in range(WARM_UP + PAIRS):
        ours.append(cost(lambda epoch=epoch: Order(n=n, seed=0, epoch=epoch).take(0, n), n))
        theirs.append(cost(lambda: torch.randperm(n, generator=generator), n))
    return paired(
        name,
        UNIT,
        ours[WARM_UP:],
        theirs[WARM_UP:],
        peer=f"torch.randperm({n}), which stores the whole epoch",
        note=rate(ours[WARM_UP:]),
    )


def alone(name: str, n: int) -> Row:
    """The first million positions of an epoch that could not be stored."""
    values = [
        cost(lambda epoch=epoch: Order(n=n, seed=0, epoch=epoch).take(0, ASKED), ASKED)
        for epoch in range(WARM_UP + PAIRS)
    ][WARM_UP:]
    return measured(name, UNIT, values, note=rate(values))


def rate(values: list[float]) -> str:
    """The same as a rate, median and best."""
    return f"{1 / np.median(values):.1f} million indices/s, best {1 / min(values):.1f}"


def cost(call: Callable[[], object], indices: int) -> float:
    """Seconds per million indices, of calls enough to be timed."""
    calls = max(1, ASKED // indices)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / (calls * indices)


def peak() -> Row:
    """Peak bytes while a million positions, given as an array, are looked up."""
    most: list[float] = []
    for n in (60_000, 2**40 - 3, 60_000):
        positions = np.arange(ASKED, dtype=np.int64) % n
        tracemalloc.start()
        try:
            Order(n=n, seed=0, epoch=1)[positions]
            most.append(float(tracemalloc.get_traced_memory()[1]))
        finally:
            tracemalloc.stop()
    return paired(
        "order_peak",
        "bytes",
        most[1:2],
        most[2:3],
        peer="the same positions at n = 60,000",
        note=f"{8 * ASKED} of them are the answer",
    )


if __name__ == "__main__":
    print(json.dumps({"rows": run()}, indent=2))
