"""Workloads of a study on scikit-learn's digits: seconds a search, no network needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.digits import load_digits
from shoal.data.order import Order
from shoal.errors import UsageError
from shoal.workloads.study_workload import Split, Workload, cross_entropy

PIXELS = 64
CLASSES = 10
TRAIN, VAL, TEST = 1024, 386, 387
"""The split's sizes: a full batch that is a power of two, the rest halved."""

_LARGEST_VALUE = 16.0
# The split is part of the workload: nothing that a study sets moves it.
_SPLIT_SEED = 20181108


def relu_net(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    """A fully connected ReLU net: weights N(0, 2 / fan_in), biases 0.

    Args:
        inputs: size of a flat sample.
        widths: of the hidden layers and of the output, at least one.

    Source: He, Zhang, Ren, Sun 2015, equation 10.
    """
    layers: list[nn.Module] = []
    for fan_in, width in itertools.pairwise([inputs, *widths]):
        linear = nn.Linear(fan_in, width)
        nn.init.normal_(linear.weight, std=(2 / fan_in) ** 0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def check_widths(widths: Sequence[int]) -> list[int]:
    """``widths`` as a list.

    Raises:
        UsageError: a width that is not a whole number >= 1.
    """
    if isinstance(widths, str) or not all(type(w) is int and w >= 1 for w in widths):
        raise UsageError(
            f"widths = {widths!r}; hidden layers have whole sizes of at least 1; for example [32, 32]"
        )
    return list(widths)


def digits_mlp(*, widths: Sequence[int] = (32, 32)) -> Workload:
    """The digits and an MLP 64-32-32-10: 3,466 parameters, split 1,024 / 386 / 387.

    Args:
        widths: of the hidden layers.

    Raises:
        UsageError: scikit-learn is not installed, or a width below 1.

    Source: section 6.4 of the notes on Shallue et al. 2019; its split's rows are our own draw.
    """
    sizes = check_widths(widths)
    train, val, test = digits_splits()
    return Workload(
        name="digits_mlp",
        model=lambda: relu_net(PIXELS, [*sizes, CLASSES]),
        loss=cross_entropy,
        train=train,
        val=val,
        test=test,
    )


def digits_tiny() -> Workload:
    """A quarter of the digits and an MLP 64-16-10, split 256 / 128 / 128: for tests and first looks."""
    train, val, test = digits_splits()
    return Workload(
        name="digits_tiny",
        model=lambda: relu_net(PIXELS, [16, CLASSES]),
        loss=cross_entropy,
        train=_first(train, 256),
        val=_first(val, 128),
        test=_first(test, 128),
    )


def digits_splits() -> tuple[Split, Split, Split]:
    """Pixels in [0, 1], shape (n, 64) float32, and labels, of train, validation and test.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    data = load_digits()
    x: Tensor = data.images.reshape(-1, PIXELS).float() / _LARGEST_VALUE
    order = Order(n=len(x), seed=_SPLIT_SEED, epoch=0).take(0, len(x))
    cuts = np.split(order, [TRAIN, TRAIN + VAL])
    train, val, test = ((x[rows], data.labels[rows]) for rows in map(torch.as_tensor, cuts))
    return train, val, test


def _first(split: Split, count: int) -> Split:
    return split[0][:count].clone(), split[1][:count].clone()
