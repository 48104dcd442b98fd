"""A rough mark of a training set's values, to notice that a resumed run was given another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.sources import source_of

_ROWS = 16


def data_mark(dataset: Any) -> list[float]:
    """Mean and spread of every tensor of ``dataset`` over a few rows spread over it.

    Only of tensors and arrays in memory, where it costs one gather. A map-style data set may be slow to
    read or random by itself; its mark is empty, which agrees with every other.
    """
    source = source_of(dataset)
    if not source.in_memory:
        return []
    # Not np.unique: its first call imports numpy.ma, tens of milliseconds for which a fleet would wait.
    spread = np.linspace(0, len(source) - 1, _ROWS).astype(np.int64)
    rows = np.array(sorted(set(spread.tolist())), dtype=np.int64)
    values: list[float] = []
    for tensor in _tensors(source.batch(rows, seed=0, epoch=0, restores=True)):
        wide = tensor.detach().abs().double() if tensor.is_complex() else tensor.detach().double()
        values += [float(wide.mean()), float(wide.std(correction=0))]
    return [value if math.isfinite(value) else 0.0 for value in values]


def marks_agree(one: list[float], other: list[float]) -> bool:
    """Whether two marks may belong to one data set, prepared on different machines perhaps."""
    if not one or not other:
        return True
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(one, other, strict=True)
    )


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.numel() else []
    members = batch.values() if isinstance(batch, Mapping) else batch
    return [tensor for member in members for tensor in _tensors(member)]
