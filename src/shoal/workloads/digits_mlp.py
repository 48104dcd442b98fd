"""The bundled 8x8 digits and a small MLP, trained for many seeds in one tensor program.

One seed is one independent run: its own weights, its own sample order and its own pixel shifts. The
runs are stacked along the first axis of every tensor, so a step of all of them is a handful of
batched matrix products. Per seed the arithmetic is that of an ordinary model under
``torch.optim.SGD``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data import Order, load_digits
from shoal.workloads.draws import keyed_integers

SIDE = 8
CLASSES = 10
LARGEST_VALUE = 16
TRAIN_SAMPLES = 1437
TEST_SAMPLES = 360
SPLIT_SEED = 0

_SHIFT_DOWN, _SHIFT_RIGHT = 0, 1


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """The digits, split once for all seeds.

    Args:
        train_images: float32 in [0, 1], shape (1437, 8, 8).
        train_labels: int64, shape (1437,).
        test_images: float32 in [0, 1], shape (360, 8, 8).
        test_labels: int64, shape (360,).
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @cached_property
    def shifted(self) -> Tensor:
        """Training images under each of the nine shifts, shape (9, samples, 64).

        Row ``3 * down + right`` holds the images moved by ``down - 1`` and ``right - 1`` pixels;
        what moves in from the border is 0.
        """
        padded = nn.functional.pad(self.train_images, (1, 1, 1, 1))
        moved = [
            padded[:, 2 - down : 2 - down + SIDE, 2 - right : 2 - right + SIDE]
            for down in range(3)
            for right in range(3)
        ]
        return torch.stack(moved).reshape(9, len(self.train_labels), SIDE * SIDE)

    def epoch(self, seeds: Sequence[int], start: int, samples: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels at stream positions ``start ... start + samples - 1`` of every seed.

        Args:
            seeds: the runs, in the order of the first axis.
            start: first position, >= 0.
            samples: how many, >= 1.

        Returns:
            Inputs (seeds, samples, 64) float32 and labels (seeds, samples) int64, newly allocated.
        """
        positions = np.arange(start, start + samples, dtype=np.int64)
        count = len(self.train_labels)
        rows = np.empty((len(seeds), samples), dtype=np.int64)
        shifts = np.empty_like(rows)
        for row, seed in enumerate(seeds):
            rows[row] = _stream(seed, start, start + samples, count)
            down = keyed_integers(seed, _SHIFT_DOWN, positions, bound=3)
            right = keyed_integers(seed, _SHIFT_RIGHT, positions, bound=3)
            shifts[row] = 3 * down + right
        samples_at = torch.from_numpy(rows)
        inputs = self.shifted[torch.from_numpy(shifts), samples_at]
        return inputs, self.train_labels[samples_at]


def _stream(seed: int, start: int, stop: int, count: int) -> NDArray[np.int64]:
    """The samples at positions ``start ... stop - 1`` of an endless row of shuffled passes."""
    pieces: list[NDArray[np.int64]] = []
    while start < stop:
        number, offset = divmod(start, count)
        end = min(count, offset + stop - start)
        pieces.append(Order(n=count, seed=seed, epoch=number).take(offset, end))
        start += end - offset
    return np.concatenate(pieces)


def load_digits_task() -> DigitsTask:
    """The 1,797 digits bundled with scikit-learn, split 1,437 / 360 with every class in proportion.

    Returns:
        The task; pixel values are divided by 16.

    Raises:
        UsageError: scikit-learn is not installed.

    Deviates: the notes do not name the split; this one is scikit-learn's stratified split, seed 0.
    """
    data = load_digits()
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        np.arange(len(data.labels)),
        test_size=TEST_SAMPLES,
        stratify=data.labels.numpy(),
        random_state=SPLIT_SEED,
    )
    images = data.images.float() / LARGEST_VALUE
    return DigitsTask(
        train_images=images[train],
        train_labels=data.labels[train],
        test_images=images[test],
        test_labels=data.labels[test],
    )


class StackedMLP(nn.Module):
    """One MLP for each seed, 64-64-64-10 with ReLU, stacked along the first axis of each parameter.

    Weights are drawn per seed from N(0, 2 / fan_in), biases start at 0, so seed ``s`` has the same
    weights whatever other seeds stand beside it.

    Args:
        seeds: one run for each, >= 0.
        widths: layer widths from input to output.
    """

    def __init__(self, seeds: Sequence[int], widths: Sequence[int] = (64, 64, 64, CLASSES)) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for inputs, outputs in itertools.pairwise(widths):
            drawn = [torch.randn(inputs, outputs, generator=g) for g in generators]
            self.weights.append(nn.Parameter(torch.stack(drawn) * (2 / inputs) ** 0.5))
            self.biases.append(nn.Parameter(torch.zeros(len(seeds), 1, outputs)))

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.weights, self.biases, strict=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits.

        Args:
            inputs: shape (seeds, samples, 64), or (1, samples, 64) to give all seeds the same.

        Returns:
            Logits of shape (seeds, samples, 10).
        """
        hidden = inputs.expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(self._layers()):
            hidden = torch.baddbmm(bias, hidden, weight)
            if layer != last:
                hidden = hidden.relu()
        return hidden

    def member(self, row: int) -> nn.Sequential:
        """A copy of the run at ``row`` as an ordinary model of ``nn.Linear`` and ``nn.ReLU``."""
        modules: list[nn.Module] = []
        for weight, bias in self._layers():
            linear = nn.Linear(weight.shape[1], weight.shape[2])
            with torch.no_grad():
                linear.weight.copy_(weight[row].T)
                linear.bias.copy_(bias[row, 0])
            modules += [linear, nn.ReLU()]
        return nn.Sequential(*modules[:-1])


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each seed.

    Args:
        logits: shape (seeds, samples, classes).
        labels: shape (seeds, samples).

    Returns:
        Shape (seeds,). Its sum has, for each seed's parameters, the gradient of that seed's mean.
    """
    seeds, samples, classes = logits.shape
    each = nn.functional.cross_entropy(
        logits.reshape(-1, classes), labels.reshape(-1), reduction="none"
    )
    return each.view(seeds, samples).mean(1)


@torch.no_grad()
def evaluate(model: StackedMLP, task: DigitsTask) -> tuple[Tensor, Tensor]:
    """Test accuracy in percent and mean test loss of each seed, both of shape (seeds,)."""
    logits = model(task.test_images.reshape(1, -1, SIDE * SIDE))
    labels = task.test_labels.expand(logits.shape[0], -1)
    accuracy = (logits.argmax(2) == labels).double().mean(1) * 100
    return accuracy, losses(logits, labels)
