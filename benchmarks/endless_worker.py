"""A worker that trains a small model until it is stopped; ``benchmarks/elastic.py`` disturbs it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import shoal


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fleet = shoal.init(model, optimizer, scaling=shoal.scaling.Dynamic(reference_batch=32))
    x = torch.randn(1 << 14, 64)
    y = torch.randint(0, 10, (1 << 14,))
    for _ in fleet.epochs(1_000_000):
        for a, b in fleet.batches((x, y), local_batch=32):
            fleet.backward(functional.cross_entropy(model(a), b))
            fleet.step()


if __name__ == "__main__":
    main()
