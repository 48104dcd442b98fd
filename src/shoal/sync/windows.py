"""The last losses of each row, however many there are."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sync.choice import window_score


def noted(
    windows: Tensor, filled: Tensor, losses: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Windows after one more loss of each row that had samples.

    Args:
        windows: ``[rows, length]`` float64, used as a ring.
        filled: ``[rows]`` int64, losses ever written.
        losses: ``[rows]``.
        counts: ``[rows]``, samples behind each; a row with none writes nothing. None: all have some.

    Returns:
        (windows, filled), new tensors.
    """
    place = (filled % windows.shape[1]).unsqueeze(1)
    value = losses.detach().to(device=windows.device, dtype=windows.dtype).unsqueeze(1)
    if counts is None:
        return windows.scatter(1, place, value), filled + 1
    has_some = (counts > 0).to(windows.device)
    value = torch.where(has_some.unsqueeze(1), value, windows.gather(1, place))
    return windows.scatter(1, place, value), filled + has_some.to(filled.dtype)


def window_scores(windows: Tensor, filled: Tensor) -> list[float]:
    """Each row's mean over the losses it really has; not a number without any.

    Args:
        windows: ``[rows, length]``.
        filled: ``[rows]``.
    """
    length = windows.shape[1]
    rows: list[list[float]] = windows.tolist()
    counts: list[int] = filled.tolist()
    return [
        window_score(row[: min(count, length)]) for row, count in zip(rows, counts, strict=True)
    ]
