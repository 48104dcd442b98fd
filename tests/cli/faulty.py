"""A training script with one chosen mistake; run by ``test_bad_input.py`` under ``shoal run``."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import shoal


class Shrinks:
    """A data set that loses a sample in mid-run."""

    reads = 0

    def __len__(self) -> int:
        return 64 if self.reads < 20 else 63

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        return torch.ones(4), torch.tensor(0)


def main(mistake: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3 if mistake == "other_model" else 2)
    settings: dict[str, object] = {"scaling": shoal.scaling.Dynamic(reference_batch=8)}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples = {"no_samples": 0, "other_data": 72}.get(mistake, 64)
    data: object = (torch.randn(samples, 4), torch.randint(0, 2, (samples,)))
    batching = {"local_batch": 8}
    if mistake == "batch_size":
        batching = {"batch_size": 8}
    elif mistake == "refused_rule":
        optimizer = torch.optim.Adam(model.parameters())
    elif mistake == "other_seed":
        settings["seed"] = 7
    elif mistake == "shrinks":
        data = Shrinks()
    fleet = shoal.init(model, optimizer, **settings)  # type: ignore[arg-type]
    for _ in fleet.epochs(int(os.environ.get("EPOCHS", "3"))):
        for x, y in fleet.batches(data, **batching):
            loss = functional.cross_entropy(model(x), y)
            if mistake == "not_finite" and fleet.step_count == 10:
                loss = loss * float("nan")
            if mistake == "slow":
                time.sleep(0.02)
            fleet.backward(loss)
            fleet.step()
        if mistake == "checkpointed":
            fleet.checkpoint()
            if fleet.is_primary:
                print(f"at {fleet.samples_seen} of {Path.cwd().name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
