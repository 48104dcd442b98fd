"""A worker that trains a perceptron until it is stopped; ``benchmarks/elastic_changes.py`` disturbs it.

SHOAL_BENCH_SIZE   which one (see ``step_worker.LAYERS``); 13k by default
SHOAL_BENCH_PLACE  a directory for signals: while ``pause`` is there it does nothing; when ``kill-NAME``
                   is there, worker NAME writes the time to ``killed-NAME`` and kills itself in its next
                   exchange, after its gradients were sent and before the others' have arrived; into
                   ``changes-NAME.jsonl`` it writes how long each change of membership took
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import shoal
from step_worker import LAYERS, LOCAL_BATCH, data, mlp


class Signals:
    """What the benchmark wants of this worker, and what it hears from it."""

    def __init__(self, place: Path, name: str) -> None:
        self._pause = str(place / "pause")
        self._kill = str(place / f"kill-{name}")
        self._killed = place / f"killed-{name}"
        self._changes = (place / f"changes-{name}.jsonl").open("a", buffering=1)

    def pause(self) -> None:
        """Wait as long as the benchmark measures something else."""
        while os.path.exists(self._pause):
            time.sleep(0.02)

    def die(self) -> None:
        """Between the launch of the reductions and the wait for them: SIGKILL, if it was asked for."""
        if os.path.exists(self._kill):
            self._killed.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, world: Any) -> None:
        """Time every ``start_step`` that brings another membership."""
        start_step, workers = world.start_step, 0

        def timed(**how: Any) -> Any:
            nonlocal workers
            begun = time.time()
            membership = start_step(**how)
            if membership.workers != workers:
                row = {"time": begun, "seconds": time.time() - begun}
                row |= {"before": workers, "after": membership.workers}
                self._changes.write(json.dumps(row) + "\n")
                workers = membership.workers
            return membership

        world.start_step = timed


def main() -> None:
    sizes = LAYERS[os.environ.get("SHOAL_BENCH_SIZE", "13k")]
    model = mlp(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fleet = shoal.init(model, optimizer, scaling=shoal.scaling.Dynamic(reference_batch=LOCAL_BATCH))
    signals = Signals(Path(os.environ["SHOAL_BENCH_PLACE"]), os.environ["SHOAL_WORKER"])
    signals.watch(fleet._loop.world)
    training = data(sizes[0], 1 << 14)
    for _ in fleet.epochs(1_000_000):
        for x, y in fleet.batches(training, local_batch=LOCAL_BATCH):
            signals.pause()
            fleet.backward(functional.cross_entropy(model(x), y))
            signals.die()
            fleet.step()


if __name__ == "__main__":
    main()
