"""Checkpoints on disk through torch DCP: whole or not there, free of world size, off the step path.

``RUN/checkpoints/step-000001234/`` holds DCP's own files (every tensor under a readable name such as
``model.0.weight``), ``state.json`` (everything that is not a tensor, with the places of the tensors) and
``manifest.json`` (sizes and SHA-256 sums of the others). A checkpoint is written beside its place under
a name of this process, synced, and renamed; one that a kill has cut never has its final name, and one
that was damaged later is noticed by its sums and passed over for the one before.

Only the fleet's primary writes. DCP's metadata file is a pickle: load checkpoints you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.fleet.state import Progress

KEPT = 3


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: ``RUN/checkpoints``; made when the first one is written.
        every_seconds: least time between two of them, > 0.
    """

    def __init__(self, directory: Path, *, every_seconds: float) -> None:
        self._directory = directory
        self._every = every_seconds
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._refused: set[Path] = set()
        self.written: list[int] = []

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint, -1 if there is none."""
        found = self._complete()
        return _step_of(found[-1]) if found else -1

    def load_newest(self) -> dict[str, Any]:
        """State of the newest checkpoint; of the one before, said aloud, if that is damaged.

        Raises:
            UsageError: none can be read.
        """
        for path in reversed(self._complete()):
            try:
                return _read(path)
            except (OSError, ValueError, KeyError, RuntimeError, EOFError) as error:
                self._refused.add(path)
                print(
                    f"shoal: checkpoint {path.name} is damaged ({error}); falling back to the one before",
                    file=sys.stderr,
                    flush=True,
                )
        raise UsageError(
            f"resume = no checkpoint in {self._directory} can be read; one of them must be whole; restore "
            "one from a copy, or start a new run with another run directory"
        )

    def maybe_write(self, snapshot: Callable[[], Mapping[str, Any]], step: int) -> bool:
        """Write one if it is time and the last one is done; returns at once after the copy."""
        if time.monotonic() - self._last < self._every:
            return False
        if self._thread is not None and self._thread.is_alive():
            return False
        self.write(snapshot, step, wait=False)
        return True

    def write(self, snapshot: Callable[[], Mapping[str, Any]], step: int, *, wait: bool) -> None:
        """Copy the state now and write it in a thread; with ``wait``, until it is on disk."""
        self._join()
        self._last = time.monotonic()
        tree = snapshot()
        if _stands(self._directory / _name(step), tree):
            return
        self._thread = threading.Thread(
            target=self._write, args=(tree, step), name="shoal-checkpoint", daemon=False
        )
        self._thread.start()
        if wait:
            self._join()

    def close(self) -> None:
        """Wait for a checkpoint under way."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _complete(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return sorted(
            path
            for path in self._directory.glob("step-*")
            if path.name[5:].isdigit()
            and path not in self._refused
            and (path / "manifest.json").is_file()
        )

    def _tidy(self, newest: Path) -> None:
        """Remove older checkpoints, and what killed writers have left of theirs."""
        old = self._complete()[:-KEPT]
        for kind in (".", ".old-"):
            parts = self._directory.glob(f"{kind}step-*.part")
            old += [path for path in parts if path.name.removeprefix(kind) < newest.name]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)

    def _part(self, step: int) -> Path:
        return self._directory / f".{_name(step)}.{os.getpid()}.part"

    def _write(self, tree: Mapping[str, Any], step: int) -> None:
        try:
            if not _finite(tree):
                print(
                    f"shoal: no checkpoint at step {step}: the state is not finite; the last good one stays",
                    file=sys.stderr,
                    flush=True,
                )
                return
            final = self._directory / _name(step)
            part = self._part(step)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _save(tree, part)
            if _stands(final, tree):
                shutil.rmtree(part)
                return
            # What is there was damaged, or written before the end of the epoch's body.
            old = part.with_name(f".old-{part.name[1:]}")
            if final.exists():
                os.replace(final, old)
            os.replace(part, final)
            shutil.rmtree(old, ignore_errors=True)
            self._refused.discard(final)
            _sync(self._directory)
            self.written.append(step)
            self._tidy(final)
        except Exception as error:
            # What was written of it would keep a full disk full.
            shutil.rmtree(self._part(step), ignore_errors=True)
            if (self._directory / _name(step) / "manifest.json").is_file():
                return  # another worker has written the same one
            print(
                f"shoal: checkpoint at step {step} was not written ({error}); training goes on",
                file=sys.stderr,
                flush=True,
            )


def _name(step: int) -> str:
    return f"step-{step:012d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _save(tree: Mapping[str, Any], part: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors: dict[str, Tensor] = {}
    plain = _split(tree, "", tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(tensors), checkpoint_id=str(part), no_dist=True)
    (part / "state.json").write_text(json.dumps({"tree": plain}, allow_nan=True))
    sums = {}
    for path in sorted(part.iterdir()):
        sums[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        _sync(path)
    (part / "manifest.json").write_text(json.dumps({"format": 1, "files": sums}, indent=1))
    _sync(part / "manifest.json")


def _read(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict_loader import load

    _check_files(path)
    plain = json.loads((path / "state.json").read_text())["tree"]
    tensors: dict[str, Tensor] = {}
    _allocate(plain, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tensors, checkpoint_id=str(path), no_dist=True)
    return _join(plain, tensors)


def _check_files(path: Path) -> None:
    """Raise ValueError, or OSError, unless all files of a checkpoint are as they were written."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{name} is missing or cut short")
        if _digest(file) != facts["sha256"]:
            raise ValueError(f"{name} has another checksum")


def _intact(path: Path) -> bool:
    """Whether a whole checkpoint lies at ``path``."""
    try:
        _check_files(path)
    except (OSError, ValueError, KeyError):
        return False
    return True


def _stands(path: Path, tree: Mapping[str, Any]) -> bool:
    """Whether a whole checkpoint lies at ``path``, and ``tree``, of the same step, says no more.

    Steps have one checkpoint each, but the body of an epoch can come to its end after its last step.
    """
    if not _intact(path):
        return False
    entries = json.loads((path / "state.json").read_text())["tree"]["dict"]
    stored = {key: _join(value, {}) for key, value in entries if key == "progress"}
    return _bodies(stored) >= _bodies(tree)


def _bodies(tree: Mapping[str, Any]) -> int:
    progress = Progress()
    if "progress" in tree:
        progress.load_state_dict(dict(tree["progress"]))
    return progress.bodies


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors go into ``tensors`` under their path."""
    if isinstance(value, Tensor):
        while name in tensors:
            name += "'"
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name, "dtype": str(value.dtype)[6:], "shape": list(value.shape)}
    if isinstance(value, Mapping):
        items = [
            [key, _split(item, f"{name}.{key}" if name else str(key), tensors)]
            for key, item in value.items()
        ]
        return {"dict": items}
    if isinstance(value, list | tuple):
        return {"list": [_split(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ValueError(
        f"{name} = {type(value).__name__}; a state holds tensors, numbers, strings, None, and lists and "
        "dicts of them; convert it in state_dict()"
    )


def _allocate(packed: Any, tensors: dict[str, Tensor]) -> None:
    if "tensor" in packed:
        dtype = getattr(torch, packed["dtype"])
        tensors[packed["tensor"]] = torch.empty(packed["shape"], dtype=dtype)
    for _, item in packed.get("dict", ()):
        _allocate(item, tensors)
    for item in packed.get("list", ()):
        _allocate(item, tensors)


def _join(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if "tensor" in packed:
        return tensors[packed["tensor"]]
    if "dict" in packed:
        return {key: _join(item, tensors) for key, item in packed["dict"]}
    if "list" in packed:
        return [_join(item, tensors) for item in packed["list"]]
    return packed["value"]


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(_finite(value[key]) for key in value)
    if isinstance(value, list | tuple):
        return all(_finite(item) for item in value)
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
