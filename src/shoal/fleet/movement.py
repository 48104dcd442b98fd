"""Moving batches to the fleet's device, whatever the collate function returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``; other things are left as they are."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
