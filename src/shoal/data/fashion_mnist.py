"""Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28x28, ten classes.

Read from ``$SHOAL_DATA``, where Debian's package ``dataset-fashion-mnist`` puts it, or the user's
cache folder; fetched into that cache when it is nowhere. Debian's files are compressed differently
from the published ones, so it is always the decompressed bytes whose sums are checked.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import struct
import subprocess
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ShoalError, UsageError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"

# Over HTTPS, the authors' own repository first, then the copy that Keras reads.
MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)

# MD5 of the decompressed files; they guard against damage, not against an adversary.
SUMS = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
_LARGEST_BYTES = 64 * 2**20


class DataMissing(ShoalError):
    """Fashion-MNIST is nowhere and could not be had; the text says what was tried."""


@dataclass(frozen=True, kw_only=True)
class FashionMnist:
    """The whole set, in the published order.

    Args:
        train_images: uint8 [60000, 28, 28].
        train_labels: int64 [60000], 0 to 9.
        test_images: uint8 [10000, 28, 28].
        test_labels: int64 [10000], 0 to 9.
        source: the folder it was read from.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str


def load_fashion_mnist(folder: str | os.PathLike[str] | None = None) -> FashionMnist:
    """Read Fashion-MNIST and check its sums; nothing is fetched.

    Args:
        folder: where the four files are, compressed or not, in it or in ``fashion-mnist`` below it.
            None: the first of ``$SHOAL_DATA``, Debian's folder and the cache that has them.

    Raises:
        DataMissing: none of the places has them.
        UsageError: ``folder`` lacks them, a place has only some of them, or a file is damaged; the
            file is named.

    Source:
        Xiao, Rasul, Vollgraf 2017, "Fashion-MNIST", MIT licence.
    """
    found = find_fashion_mnist(folder)
    arrays = {name: _array(path, name) for name, path in found.items()}
    return FashionMnist(
        train_images=torch.as_tensor(arrays["train-images-idx3-ubyte"]),
        train_labels=torch.as_tensor(arrays["train-labels-idx1-ubyte"].astype(np.int64)),
        test_images=torch.as_tensor(arrays["t10k-images-idx3-ubyte"]),
        test_labels=torch.as_tensor(arrays["t10k-labels-idx1-ubyte"].astype(np.int64)),
        source=str(found["train-images-idx3-ubyte"].parent),
    )


def find_fashion_mnist(folder: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """The path of each of the four files; see :func:`load_fashion_mnist`."""
    if folder is not None:
        files = _complete(Path(folder), f"folder = {folder}")
        if files is None:
            raise UsageError(
                f"folder = {folder}; the four Fashion-MNIST files ({', '.join(SUMS)}, each also as "
                ".gz) are neither there nor in fashion-mnist below it"
            )
        return files
    told = os.environ.get("SHOAL_DATA")
    files = _complete(Path(told), f"SHOAL_DATA = {told}") if told else None
    for place in (DEBIAN_FOLDER, cache_folder()):
        files = files or _complete(place, str(place))
    if files is None:
        raise DataMissing(
            f"Fashion-MNIST is not in {f'SHOAL_DATA = {told}, ' if told else ''}{DEBIAN_FOLDER} or "
            f"{cache_folder()}"
        )
    return files


def _complete(place: Path, named: str) -> dict[str, Path] | None:
    """The four files in ``place`` or in ``fashion-mnist`` below it; None for none of them."""
    for folder in (place, place / "fashion-mnist"):
        files, missing = _files_in(folder)
        if not missing:
            return files
        if files:
            raise UsageError(
                f"{named} has some of the Fashion-MNIST files but not {missing[0]} (or .gz); put "
                "all four there, or none"
            )
    return None


def cache_folder() -> Path:
    """Where fetched files are kept: below ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal" / "fashion-mnist"


def fetch_fashion_mnist(
    dest: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MIRRORS,
    use_apt: bool = True,
    limit_seconds: float = 120.0,
) -> Path:
    """Fetch the four files into a folder of the user's, never into a system folder.

    First Debian's package, downloaded and unpacked without installing it (no root needed), then
    each mirror over the network. Nothing is left behind in ``dest`` unless all four files are
    whole.

    Args:
        dest: folder to put the files in; None for the cache.
        mirrors: addresses to which the files' names (with .gz) are appended.
        use_apt: whether to try Debian's package first.
        limit_seconds: for each of the ways tried.

    Returns:
        The folder that now has the files.

    Raises:
        DataMissing: every way failed; the text has the reason of each.
    """
    folder = Path(dest) if dest is not None else cache_folder()
    if not _files_in(folder)[1]:
        return folder
    ways: list[tuple[str, Callable[[Path], Path]]] = []
    if use_apt:
        ways.append((f"apt ({DEBIAN_PACKAGE})", lambda at: _from_debian(at, limit_seconds)))
    for mirror in mirrors:
        ways.append((mirror, lambda at, mirror=mirror: _from_mirror(at, mirror, limit_seconds)))
    reasons: list[str] = []
    for name, way in ways:
        try:
            with _scratch_beside(folder) as scratch:
                unpacked = way(scratch)
                for file, path in find_fashion_mnist(unpacked).items():
                    _array(path, file)
                folder.mkdir(parents=True, exist_ok=True)
                for path in find_fashion_mnist(unpacked).values():
                    os.replace(path, folder / path.name)
            return folder
        except (OSError, HTTPException, ShoalError, subprocess.SubprocessError) as error:
            reasons.append(f"{name}: {_one_line(error)}")
    raise DataMissing("Fashion-MNIST could not be fetched. " + "; ".join(reasons))


def _from_debian(scratch: Path, limit_seconds: float) -> Path:
    """Download and unpack the package in ``scratch``; it is not installed."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataMissing(f"there is no {tool} here")
    _run(["apt-get", "download", DEBIAN_PACKAGE], scratch, limit_seconds)
    packages = sorted(scratch.glob("*.deb"))
    if not packages:
        raise DataMissing("apt-get download left no package")
    unpacked = scratch / "unpacked"
    _run(["dpkg-deb", "-x", str(packages[-1]), str(unpacked)], scratch, limit_seconds)
    return unpacked / DEBIAN_FOLDER.relative_to("/")


def _run(command: list[str], folder: Path, limit_seconds: float) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        timeout=limit_seconds,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise DataMissing(f"{command[0]} ended with {done.returncode} ({last})")


def _from_mirror(scratch: Path, mirror: str, limit_seconds: float) -> Path:
    # A connection that trickles is cut by the total, one that stands still by the timeout.
    until = time.monotonic() + limit_seconds
    for name in SUMS:
        address = f"{mirror}{name}.gz"
        with (
            urllib.request.urlopen(address, timeout=min(15.0, limit_seconds)) as answer,
            open(scratch / f"{name}.gz", "wb") as file,
        ):
            while block := answer.read(2**18):
                file.write(block)
                if time.monotonic() > until or file.tell() > _LARGEST_BYTES:
                    raise DataMissing(
                        f"{name}.gz is no file of {_LARGEST_BYTES} bytes or less within "
                        f"{limit_seconds:g} s"
                    )
    return scratch


@contextmanager
def _scratch_beside(folder: Path) -> Generator[Path, None, None]:
    """A temporary folder on the same file system, so that moving files out of it is atomic."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as name:
        yield Path(name)


def _files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Of the four files, those in ``folder`` and the names of those that are not."""
    files: dict[str, Path] = {}
    for name in SUMS:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                files[name] = path
                break
    return files, [name for name in SUMS if name not in files]


def _array(path: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The array in an idx file, after its sum was checked."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({_one_line(error)}); {_REMEDY}") from error
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != SUMS[name]:
        raise UsageError(
            f"{path} is damaged: its decompressed MD5 is {found}, not {SUMS[name]}; {_REMEDY}"
        )
    dimensions = data[3]
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions)
    assert values.size == math.prod(shape)
    return values.reshape(shape).copy()


_REMEDY = "remove it and fetch it anew, or set SHOAL_DATA to a folder with whole files"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
