"""The handwritten digits that scikit-learn brings along: 1,797 pictures of 8x8, ten classes.

Small enough for tests that finish in a second, and at hand without a network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Digits:
    """The whole set, in scikit-learn's order.

    Args:
        images: uint8 [1797, 8, 8], values 0 to 16.
        labels: int64 [1797], 0 to 9.
    """

    images: Tensor
    labels: Tensor


def load_digits() -> Digits:
    """Read the digits bundled in scikit-learn (which is imported here, on use).

    Raises:
        UsageError: scikit-learn is not installed.

    Source:
        UCI "Optical Recognition of Handwritten Digits", test part, as distributed by scikit-learn.
    """
    try:
        from sklearn import datasets  # pyright: ignore
    except ImportError as error:
        raise UsageError(
            "the digits come with scikit-learn, which is not installed; "
            "pip install scikit-learn, or pip install 'shoal[examples]'"
        ) from error
    bunch: dict[str, npt.NDArray[np.float64]] = datasets.load_digits()  # pyright: ignore
    images = bunch["images"].astype(np.uint8)
    labels = bunch["target"].astype(np.int64)
    return Digits(images=torch.as_tensor(images), labels=torch.as_tensor(labels))
