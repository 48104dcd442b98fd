"""Fashion-MNIST and a small convolutional network without BatchNorm (20,338 parameters).

Without BatchNorm a step over the whole global batch equals the weighted mean over any split of it
into workers, so virtual workers need no loop of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE = 28
CLASSES = 10


class SmallCNN(nn.Module):
    """Two convolutions of 3x3 with 8 and 16 channels, each pooled, then 24 hidden units.

    Args:
        seed: of its weights, which are drawn as PyTorch's layers draw them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * (SIDE // 4) ** 2, 24),
                nn.ReLU(),
                nn.Linear(24, CLASSES),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (samples, 10) for standardised images of shape (samples, 1, 28, 28)."""
        return self.layers(images)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy over all samples.

    Args:
        model: gives logits.
        images: standardised, shape (samples, 1, 28, 28).
        labels: int64, shape (samples,).
    """
    right, loss = 0, 0.0
    for part, wanted in zip(images.split(1_000), labels.split(1_000), strict=True):
        logits = model(part)
        right += int((logits.argmax(1) == wanted).sum())
        loss += float(nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    return 100 * right / len(labels), loss / len(labels)
