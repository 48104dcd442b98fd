"""How a state travels between workers: a JSON skeleton and the tensors' raw bytes.

    8 bytes   b"SHOALST1"
    8 bytes   length of the skeleton, little-endian
    ...       skeleton, JSON: {"tensors": [[dtype, [sizes]], ...], "tree": ...}
    ...       the bytes of each tensor, in that order, contiguous, without padding

In the tree ``["x", i]`` is tensor i, ``["l", ...]`` a list, ``["t", ...]`` a tuple and
``["d", [key, value], ...]`` a dict, whose integer keys thus stay integers. Nothing is unpickled, and
all lengths are checked against the skeleton before memory is taken. Bytes are in the machine's
order, which is the same on all workers of a run (the elastic world checks it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.world.contract import Tree

_MAGIC = b"SHOALST1"
_PREFIX_BYTES = 16
# A skeleton has some tens of bytes per tensor: this admits millions of them and no absurd claim.
_SKELETON_LIMIT_BYTES = 256 * 2**20

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

# Fills a buffer's beginning and returns how many bytes it wrote; 0 means that no more will come.
ReadInto = Callable[[memoryview], int]


class TransferError(ShoalError):
    """A state that was cut off, malformed, refused or unreachable; nothing of it is used."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A tree made ready to be sent; it refers to the tree's tensors and copies none of them.

    Args:
        head: prefix and skeleton.
        tensors: what follows, in order.
        length_bytes: length of the whole.
    """

    head: bytes
    tensors: tuple[Tensor, ...]
    length_bytes: int

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes to send, piece by piece.

        A tensor on another device, or not contiguous, is copied when its turn comes and freed
        before the next one.
        """
        yield self.head
        for tensor in self.tensors:
            if tensor.numel():
                yield _view(tensor.detach().to("cpu").contiguous())


def encode(tree: Tree) -> Payload:
    """Make ``tree`` ready to be sent.

    Args:
        tree: tensors, numbers, strings, None, and lists, tuples and dicts of them; keys are strings
            or integers.

    Returns:
        The payload; changing a tensor of the tree before it is sent changes what is sent.

    Raises:
        TypeError: something else is in the tree; the text says where.
    """
    tensors: list[Tensor] = []
    packed = _pack(tree, tensors, "state")
    described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    skeleton = json.dumps({"tensors": described, "tree": packed}, separators=(",", ":")).encode()
    head = _MAGIC + len(skeleton).to_bytes(8, "little") + skeleton
    raw = sum(t.numel() * t.element_size() for t in tensors)
    return Payload(head=head, tensors=tuple(tensors), length_bytes=len(head) + raw)


def decode(read_into: ReadInto, length_bytes: int) -> Tree:
    """Read one payload.

    Args:
        read_into: where its bytes come from.
        length_bytes: the length the sender announced.

    Returns:
        The tree; its tensors are on the CPU, writable and own their memory.

    Raises:
        TransferError: the bytes ended early, or contradict the skeleton or the length announced.
    """
    if length_bytes < _PREFIX_BYTES:
        raise TransferError(f"a state of {length_bytes} bytes is announced; it has at least 16")
    prefix = _take(read_into, _PREFIX_BYTES)
    if prefix[:8] != _MAGIC:
        raise TransferError(f"a state begins with {bytes(prefix[:8])!r}; {_MAGIC!r} is expected")
    size = int.from_bytes(prefix[8:], "little")
    if size > min(length_bytes - _PREFIX_BYTES, _SKELETON_LIMIT_BYTES):
        raise TransferError(f"a skeleton of {size} bytes does not fit into {length_bytes} bytes")
    described, packed = _skeleton(bytes(_take(read_into, size)))
    raw = sum(prod(shape) * dtype.itemsize for dtype, shape in described)
    if _PREFIX_BYTES + size + raw != length_bytes:
        raise TransferError(
            f"the skeleton announces {_PREFIX_BYTES + size + raw} bytes, the sender {length_bytes}"
        )
    tensors: list[Tensor | None] = []
    for dtype, shape in described:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            _fill(read_into, _view(tensor))
        tensors.append(tensor)
    tree = _unpack(packed, tensors)
    if any(tensor is not None for tensor in tensors):
        raise TransferError("the state holds tensors that its tree does not mention")
    return tree


def state_hash(tree: Tree) -> str:
    """A digest of a tree: equal exactly when structure, dtypes, shapes and all bytes are equal.

    Args:
        tree: as for :func:`encode`. The order of a dict's keys counts.

    Returns:
        32 hexadecimal digits (BLAKE2b, 128 bits).
    """
    digest = hashlib.blake2b(digest_size=16)
    for chunk in encode(tree).chunks():
        digest.update(chunk)
    return digest.hexdigest()


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor with at least one element, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore


def _pack(tree: Tree, tensors: list[Tensor], where: str) -> object:
    """The JSON form of a tree; its tensors are appended to ``tensors``."""
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or str(tree.dtype).removeprefix("torch.") not in _DTYPES:
            raise TypeError(
                f"{where} is a {tree.layout} tensor of {tree.dtype}; a state holds dense tensors "
                f"of {', '.join(_DTYPES)}; convert it before registering it"
            )
        tensors.append(tree.resolve_conj().resolve_neg())
        return ["x", len(tensors) - 1]
    if isinstance(tree, Mapping):
        pairs: list[object] = ["d"]
        for key, value in tree.items():
            if type(key) not in (str, int):
                raise TypeError(
                    f"{where} has the key {key!r}; keys of a state are strings or integers"
                )
            pairs.append([key, _pack(value, tensors, f"{where}[{key!r}]")])
        return pairs
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, bytearray, memoryview)):
        mark = "t" if isinstance(tree, tuple) else "l"
        return [mark, *(_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(tree))]
    raise TypeError(
        f"{where} is a {type(tree).__name__}; a state holds tensors, numbers, strings, None, and "
        "lists and dicts of them; convert it (NumPy arrays: torch.from_numpy, scalars: .item())"
    )


def _unpack(packed: object, tensors: list[Tensor | None]) -> Tree:
    """The tree of a JSON form; each tensor is handed out once."""
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    match packed:
        case ["x", int(index)] if 0 <= index < len(tensors):
            tensor, tensors[index] = tensors[index], None
            if tensor is not None:
                return tensor
        case ["l", *items]:
            return [_unpack(item, tensors) for item in items]
        case ["t", *items]:
            return tuple(_unpack(item, tensors) for item in items)
        case ["d", *pairs]:
            unpacked: dict[str | int, Tree] = {}
            for pair in pairs:
                match pair:
                    case [str() | int() as key, value]:
                        unpacked[key] = _unpack(value, tensors)
                    case _:
                        raise TransferError("the skeleton of a state has a malformed dict")
            return unpacked  # pyright: ignore[reportReturnType] - keys of one kind in practice
        case _:
            pass
    raise TransferError("the skeleton of a state is malformed")


def _skeleton(text: bytes) -> tuple[list[tuple[torch.dtype, list[int]]], object]:
    """Dtype and shape of each tensor, and the packed tree."""
    try:
        document = json.loads(text)
        described: list[tuple[torch.dtype, list[int]]] = []
        for name, shape in document["tensors"]:
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"shape {shape}")
            described.append((_DTYPES[name], shape))
        return described, document["tree"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransferError(f"the skeleton of a state is malformed: {error}") from error


def _take(read_into: ReadInto, size: int) -> bytearray:
    buffer = bytearray(size)
    _fill(read_into, memoryview(buffer))
    return buffer


def _fill(read_into: ReadInto, view: memoryview) -> None:
    """Fill ``view`` to its end, or raise TransferError."""
    done = 0
    while done < len(view):
        got = read_into(view[done:])
        if got <= 0:
            raise TransferError(f"a state was cut off {len(view) - done} bytes too early")
        done += got
