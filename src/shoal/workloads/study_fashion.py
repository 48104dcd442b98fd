"""Workloads of a study on Fashion-MNIST, 55,000 / 5,000 / 10,000, at sizes that fit a few cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.data.image_tasks import image_task
from shoal.errors import UsageError
from shoal.workloads.study_digits import check_widths, relu_net
from shoal.workloads.study_workload import Split, Workload, cross_entropy

SIDE = 28
CLASSES = 10


def fashion_cnn(
    *,
    channels: Sequence[int] = (8, 16),
    hidden: int = 24,
    train_samples: int | None = None,
    val_samples: int | None = None,
) -> Workload:
    """Two 3x3 convolutions, each pooled, and one hidden layer: 20,338 parameters, no normalisation.

    Args:
        channels: of the two convolutions.
        hidden: width of the hidden layer.
        train_samples: train on the first of them only, to see what the size of the data does.
        val_samples: validate on the first of them only; evaluation costs in proportion.

    Raises:
        DataMissing: Fashion-MNIST is nowhere and could not be fetched.
        UsageError: a size below 1, or more samples than there are.
    """
    first, second = _two(channels)
    check_widths([first, second, hidden])

    def model() -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (SIDE // 4) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )
        for layer in net:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        return net

    train, val, test = _splits(train_samples, val_samples)
    return Workload(
        name="fashion_cnn", model=model, loss=cross_entropy, train=train, val=val, test=test
    )


def fashion_fc(
    *,
    widths: Sequence[int] = (256,),
    train_samples: int | None = None,
    val_samples: int | None = None,
) -> Workload:
    """Fashion-MNIST and a fully connected ReLU net; 784-256-10 (203,530 parameters) by default.

    Args:
        widths: of the hidden layers, for example ``[64, 64, 64]``.
        train_samples: as :func:`fashion_cnn`.
        val_samples: as :func:`fashion_cnn`.

    Raises:
        DataMissing: Fashion-MNIST is nowhere and could not be fetched.
        UsageError: a size below 1, or more samples than there are.
    """
    sizes = check_widths(widths)
    train, val, test = ((_flat(x), y) for x, y in _splits(train_samples, val_samples))
    return Workload(
        name="fashion_fc_" + "_".join(map(str, sizes)),
        model=lambda: relu_net(SIDE * SIDE, [*sizes, CLASSES]),
        loss=cross_entropy,
        train=train,
        val=val,
        test=test,
    )


def _two(channels: Sequence[int]) -> tuple[int, int]:
    sizes = check_widths(channels)
    if len(sizes) != 2:
        raise UsageError(f"channels = {channels!r}; there are two convolutions; give two numbers")
    return sizes[0], sizes[1]


def _flat(images: Tensor) -> Tensor:
    return images.flatten(1)


def _splits(train_samples: int | None, val_samples: int | None) -> tuple[Split, Split, Split]:
    task = image_task("fashion-mnist")
    return (
        _first(task.train, train_samples, "train_samples"),
        _first(task.validation, val_samples, "val_samples"),
        task.test,
    )


def _first(split: Split, count: int | None, name: str) -> Split:
    if count is None:
        return split
    if not 1 <= count <= len(split[0]):
        raise UsageError(f"{name} = {count}; there are {len(split[0])}; use 1 to {len(split[0])}")
    return split[0][:count].clone(), split[1][:count].clone()
