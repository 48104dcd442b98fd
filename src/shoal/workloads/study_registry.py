"""The workloads of a study that have a short name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import cast

from shoal.workloads.study_workload import Workload

_DIGITS = "shoal.workloads.study_digits"
_FASHION = "shoal.workloads.study_fashion"

_FC_WIDTHS: Mapping[str, list[int]] = {
    "fashion_fc_256": [256],
    "fashion_fc_1024": [1024],
    "fashion_fc_64x3": [64, 64, 64],
    "fashion_fc_128x3": [128, 128, 128],
    "fashion_fc_256x3": [256, 256, 256],
}

REGISTRY: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "digits_mlp": (_DIGITS, "digits_mlp", {}),
    "digits_tiny": (_DIGITS, "digits_tiny", {}),
    "fashion_cnn": (_FASHION, "fashion_cnn", {}),
    "fashion_fc": (_FASHION, "fashion_fc", {}),
    **{name: (_FASHION, "fashion_fc", {"widths": widths}) for name, widths in _FC_WIDTHS.items()},
}
"""By name: module, factory and what it is called with before the study's own parameters."""


def registered_factory(name: str) -> tuple[Callable[..., Workload], dict[str, object]]:
    """The factory of a registered workload and its preset arguments.

    Raises:
        KeyError: there is none of that name.
    """
    module, function, preset = REGISTRY[name]
    factory = getattr(importlib.import_module(module), function)
    return cast(Callable[..., Workload], factory), dict(preset)
