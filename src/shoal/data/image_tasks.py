"""A picture-classification task that is always at hand: Fashion-MNIST, else the digits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from .digits import load_digits
from .fashion_mnist import DataMissing, fetch_fashion_mnist, load_fashion_mnist
from .order import Order

# The split is part of the task: it depends on nothing that a run can set.
_SPLIT_SEED = 20190426
_FASHION_VALIDATION_SAMPLES = 5_000
_DIGITS_VALIDATION_SAMPLES = 180
_DIGITS_TEST_SAMPLES = 360


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """Pictures and labels in three parts, ready to train on.

    Args:
        name: ``"fashion-mnist"`` or ``"digits"``.
        train: float32 [n, 1, height, width], normalised by the training part's mean and deviation,
            and int64 labels [n].
        validation: the same, for choosing.
        test: the same, for the figure that is reported.
        classes: number of classes.
        note: where the data came from and, for a stand-in, why.
    """

    name: str
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    note: str


def image_task(name: str = "auto", *, may_fetch: bool = True) -> ImageTask:
    """The task, from wherever its data can be had.

    Fashion-MNIST: 55,000 / 5,000 / 10,000, the validation part a fixed subset of the published
    60,000 training samples. Digits: 1,257 / 180 / 360, a fixed split.

    Args:
        name: ``"fashion-mnist"``, ``"digits"``, or ``"auto"`` for the first of the two that can be
            had, with one line on stderr if it is not the first.
        may_fetch: whether Fashion-MNIST may be fetched into the user's cache when it is nowhere.

    Raises:
        UsageError: another name; a damaged file; a ``$SHOAL_DATA`` without the files.
        DataMissing: ``"fashion-mnist"`` was asked for and cannot be had.
    """
    if name == "digits":
        return _digits("bundled with scikit-learn")
    if name not in ("auto", "fashion-mnist"):
        raise UsageError(f"name = {name!r}; use 'auto', 'fashion-mnist' or 'digits'")
    try:
        return _fashion(may_fetch)
    except DataMissing as error:
        if name != "auto":
            raise
        task = _digits(f"instead of Fashion-MNIST: {error}")
    print(
        f"shoal: training on scikit-learn's digits {task.note}. To train on Fashion-MNIST, "
        "apt-get install dataset-fashion-mnist, or set SHOAL_DATA to a folder with its four files",
        file=sys.stderr,
    )
    return task


def _fashion(may_fetch: bool) -> ImageTask:
    try:
        data = load_fashion_mnist()
    except DataMissing:
        if not may_fetch:
            raise
        data = load_fashion_mnist(fetch_fashion_mnist())
    total = len(data.train_labels)
    train, validation = _split(total, [total - _FASHION_VALIDATION_SAMPLES])
    return _task(
        "fashion-mnist",
        train=(data.train_images[train], data.train_labels[train]),
        validation=(data.train_images[validation], data.train_labels[validation]),
        test=(data.test_images, data.test_labels),
        note=f"from {data.source}",
    )


def _digits(note: str) -> ImageTask:
    data = load_digits()
    total = len(data.labels)
    before_test = total - _DIGITS_TEST_SAMPLES
    parts = _split(total, [before_test - _DIGITS_VALIDATION_SAMPLES, before_test])
    train, validation, test = ((data.images[rows], data.labels[rows]) for rows in parts)
    return _task("digits", train=train, validation=validation, test=test, note=note)


def _split(total: int, cuts: list[int]) -> list[Tensor]:
    """Disjoint sorted rows that together are 0 to total - 1, cut out of a fixed random order."""
    order = Order(n=total, seed=_SPLIT_SEED, epoch=0).take(0, total)
    return [torch.as_tensor(np.sort(rows)) for rows in np.split(order, cuts)]


def _task(
    name: str,
    *,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    note: str,
) -> ImageTask:
    values = train[0].to(torch.float32)
    mean, deviation = values.mean(), values.std(correction=0)

    def normalised(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return part[0].to(torch.float32).sub_(mean).div_(deviation).unsqueeze(1), part[1]

    return ImageTask(
        name=name,
        train=normalised(train),
        validation=normalised(validation),
        test=normalised(test),
        classes=10,
        note=note,
    )
