"""Train a small CNN on Fashion-MNIST, alone or on a fleet of workers that come and go.

    python examples/fashion_mnist.py                            # one process
    shoal run --workers 1:4 examples/fashion_mnist.py           # up to four, replaced when they die

The five lines that differ from a plain PyTorch loop are marked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shoal

Batch = tuple[Tensor, Tensor]


def small_cnn(image: Tensor, classes: int) -> nn.Module:
    """A CNN of about 55,000 parameters for images like ``image`` ([1, height, width])."""
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    features = layers(image[None]).shape[1]
    return nn.Sequential(layers, nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))


def accuracy(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """Correct predictions and their number, for ``fleet.evaluate``."""
    images, labels = batch
    return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}


def train(
    task: shoal.data.ImageTask,
    *,
    epochs: int,
    scaling: Any,
    lr: float = 0.05,
    local_batch: int = 64,
    on_step: Callable[[shoal.Fleet], None] | None = None,
    **settings: Any,
) -> tuple[shoal.Fleet, float]:
    """Train and return the fleet and its test accuracy."""
    torch.manual_seed(0)
    model = small_cnn(task.train[0][0], task.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = shoal.schedules.cosine(warmup_samples=len(task.train[0]) // 20)
    fleet = shoal.init(model, optimizer, scaling=scaling, schedule=schedule, **settings)  # 1
    for epoch in fleet.epochs(epochs):  # 2
        for images, labels in fleet.batches(task.train, local_batch=local_batch):  # 3
            loss = functional.cross_entropy(model(images), labels)
            fleet.backward(loss)  # 4
            fleet.step()  # 5
            if on_step is not None:
                on_step(fleet)
        scores = fleet.evaluate(task.validation, accuracy, name="validation")
        if fleet.is_primary:
            print(
                f"epoch {epoch}: {fleet.samples_seen:,} samples, validation {scores['accuracy']:.4f}",
                flush=True,
            )
    return fleet, fleet.evaluate(task.test, accuracy, name="test")["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data", default="auto", help="auto, fashion-mnist or digits")
    arguments = parser.parse_args()
    # Under `shoal run` several processes start at once: only one of them may fetch the data.
    task = shoal.data.image_task(arguments.data, may_fetch="SHOAL_CONTROL" not in os.environ)
    fleet, tested = train(
        task,
        epochs=arguments.epochs,
        scaling=shoal.scaling.Dynamic(reference_batch=64),
        lr=arguments.lr,
    )
    if fleet.is_primary:
        print(f"test accuracy {tested:.4f} on {task.name}", flush=True)
    fleet.save(Path(os.environ.get("SHOAL_RUN_DIR", ".")) / "model.safetensors")


if __name__ == "__main__":
    main()
