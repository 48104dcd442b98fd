"""One of two workers that train the same model by shoal and by DistributedDataParallel, block by block.

Started by ``benchmarks/elastic.py`` under ``shoal run``: both sides live in the same two processes, use one
thread, the same bucket size, data, model and optimizer, and alternate in short blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shoal

LAYERS = {
    "13k": (64, 128, 32, 10),
    "351k": (256, 512, 384, 64, 10),
    "3m": (784, 1400, 1200, 150, 10),
}
LOCAL_BATCH = 32
BUCKET_BYTES = shoal.sync.AllReduce().bucket_bytes


def mlp(sizes: tuple[int, ...]) -> nn.Module:
    """A perceptron with ReLU between its layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data(features: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with labels: only the time of a step matters here."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    return x, torch.randint(0, 10, (samples,), generator=generator)


class Shoal:
    """The loop of the README, ``steps`` at a time."""

    def __init__(self, sizes: tuple[int, ...], samples: int) -> None:
        self.model = mlp(sizes)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.fleet = shoal.init(self.model, optimizer)
        self.data = data(sizes[0], samples)
        self.batches = self.forever()
        next(self.batches)

    def forever(self):
        for _ in self.fleet.epochs(1_000_000):
            for x, y in self.fleet.batches(self.data, local_batch=LOCAL_BATCH):
                yield
                self.fleet.backward(functional.cross_entropy(self.model(x), y))
                self.fleet.step()

    def block(self, steps: int) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(steps):
            next(self.batches)
        return (time.perf_counter() - start) / steps


class Ddp:
    """The same by DistributedDataParallel on gloo, each rank its half of a fresh permutation."""

    def __init__(
        self, sizes: tuple[int, ...], samples: int, rank: int, store: Path, bucket_bytes: int
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2
            )
        self.rank = rank
        self.model = DistributedDataParallel(
            mlp(sizes), bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = data(sizes[0], samples)
        self.order = torch.randperm(samples)
        self.at = 0

    def block(self, steps: int) -> float:
        """Seconds a step."""
        x, y = self.data
        start = time.perf_counter()
        for _ in range(steps):
            if self.at + 2 * LOCAL_BATCH > len(x):
                self.order, self.at = torch.randperm(len(x)), 0
            first = self.at + self.rank * LOCAL_BATCH
            mine = self.order[first : first + LOCAL_BATCH]
            self.at += 2 * LOCAL_BATCH
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(x[mine]), y[mine]).backward()
            self.optimizer.step()
        return (time.perf_counter() - start) / steps


def peak_bytes() -> int:
    """The largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(LAYERS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("shoal", "ddp"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes, samples = LAYERS[arguments.size], 1 << 14
    name = os.environ["SHOAL_WORKER"]
    store = arguments.out / f"store-{arguments.size}-{arguments.only}"
    result: dict[str, object] = {}
    if arguments.only == "ddp":
        # The supervisor's barrier is not needed here; DDP gathers by itself.
        ddp = Ddp(sizes, samples, int(name.lstrip("w")), store, BUCKET_BYTES)
        ddp.block(arguments.steps * 10)
        result = {"peak_bytes": peak_bytes()}
    elif arguments.only == "shoal":
        ours = Shoal(sizes, samples)
        ours.block(arguments.steps * 10)
        result = {"peak_bytes": peak_bytes()}
    else:
        ours = Shoal(sizes, samples)
        ddp = Ddp(sizes, samples, ours.fleet.rank, store, BUCKET_BYTES)
        for side in (ours, ddp):
            side.block(3 * arguments.steps)
        pairs = []
        for i in range(arguments.pairs):
            first, second = (ours, ddp) if i % 2 else (ddp, ours)
            dist.barrier()
            a = first.block(arguments.steps)
            dist.barrier()
            b = second.block(arguments.steps)
            pairs.append((a, b) if i % 2 else (b, a))
        result = {"pairs": pairs, "workers": ours.fleet.workers}
    (arguments.out / f"{arguments.size}-{arguments.only}-{name}.json").write_text(
        json.dumps(result)
    )
    # Nothing is left to say to the other worker, which may be gone: end without goodbyes.
    os._exit(0)


if __name__ == "__main__":
    main()
