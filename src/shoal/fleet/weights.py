"""The delivered model: one safetensors file that opens without shoal."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def bare(model: nn.Module) -> nn.Module:
    """The module that torch.compile has wrapped, so that names are the same with and without it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def write_weights(model: nn.Module, path: Path) -> None:
    """Write parameters and buffers of ``model`` to ``path``, whole or not at all.

    Tensors that share memory (tied weights) are written once for each of their names.
    """
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in bare(model).state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
