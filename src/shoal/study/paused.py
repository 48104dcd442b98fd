"""A search put aside: everything it needs to go on, in one file that is there whole or not at all.

Each owner writes files of its own, numbered by its claim's segment, so two processes never write one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Paused:
    """What was put aside.

    Args:
        segment: of the owner that wrote it.
        facts: JSON values.
        tensors: by name.
    """

    segment: int
    facts: Mapping[str, object]
    tensors: Mapping[str, Tensor]


def put_aside(directory: Path, paused: Paused) -> Path:
    """Write ``paused``, then remove what it replaces.

    Args:
        directory: the search's own; made when missing.

    Raises:
        OSError: the disk is full; what was there before still is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{paused.segment}{_SUFFIX}"
    fresh = path.with_suffix(".writing")
    metadata = {"format": str(FORMAT), "facts": json.dumps(paused.facts)}
    tensors = {name: tensor.contiguous() for name, tensor in paused.tensors.items()}
    # The format wants at least one tensor.
    tensors["_"] = torch.zeros(0)
    try:
        try:
            save_file(tensors, fresh, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{fresh}: {error}") from error
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    for number, other in _files(directory):
        if number < paused.segment:
            with contextlib.suppress(OSError):
                other.unlink()
    return path


def take_up(directory: Path) -> Paused | None:
    """The newest one that can be read; None if there is none. A damaged file counts as absent."""
    for number, path in sorted(_files(directory), reverse=True):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                if metadata.get("format") != str(FORMAT):
                    continue
                facts = json.loads(metadata["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys() if name != "_"}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError):
            continue
        return Paused(segment=number, facts=facts, tensors=tensors)
    return None


def clear(directory: Path) -> None:
    """Remove what was put aside; the search is done."""
    for _, path in _files(directory):
        with contextlib.suppress(OSError):
            path.unlink()


def _files(directory: Path) -> list[tuple[int, Path]]:
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        if path.stem.isdecimal():
            found.append((int(path.stem), path))
    return found
