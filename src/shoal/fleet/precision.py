"""Mixed precision: the model's forward pass runs under autocast, everything else in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError

PRECISIONS = ("fp32", "bf16")


def check_precision(precision: str) -> None:
    """Raise UsageError unless ``precision`` is ``"fp32"`` or ``"bf16"``."""
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision = {precision!r}; known are {', '.join(PRECISIONS)}; float16 is refused because "
            "it needs a loss scale that every worker would have to agree on: use bf16"
        )


def install_autocast(model: nn.Module, precision: str, device_type: str) -> None:
    """Run ``model``'s forward under bfloat16 autocast and hand its outputs back in float32.

    Parameters, gradients and the reduction stay in float32, so workers agree as they do without it.
    """
    if precision == "fp32":
        return
    running: list[torch.autocast] = []

    def enter(module: nn.Module, args: Any) -> None:
        context = torch.autocast(device_type, dtype=torch.bfloat16)
        context.__enter__()
        running.append(context)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if running:
            running.pop().__exit__(None, None, None)
        return _float32(output)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_float32(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_float32(item) for item in value)
    if isinstance(value, dict):
        return {key: _float32(item) for key, item in value.items()}
    return value
