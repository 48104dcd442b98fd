"""The delivered model: one safetensors file that opens without shoal."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def write_weights(model: nn.Module, path: Path) -> None:
    """Write parameters and buffers of ``model`` to ``path``, whole or not at all.

    Tensors that share memory (tied weights) are written once for each of their names.
    """
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in model.state_dict().items()
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
