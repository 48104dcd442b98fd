"""What a data set may be, and how samples are taken from it.

Three kinds: *columns* (tensors or numpy arrays with one row per sample, read by one gather without
a Python loop), *map-style* (anything with ``__getitem__`` and ``__len__``, read sample by sample,
each from its own random state), and what is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import default_collate as _collate  # pyright: ignore

from ..errors import UsageError
from .order import Indices
from .randomness import SampleRandomness

Collate: TypeAlias = Callable[[list[object]], object]
_Column: TypeAlias = Tensor | npt.NDArray[np.generic]

# A list this short, of longer tensors of one shape, is hardly a training set: most likely columns.
_FEW = 4


class Source(Protocol):
    """A data set as the loader sees it."""

    def __len__(self) -> int:
        """Samples in it now."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether a batch is one gather, which a loader process could only slow down."""
        ...

    def batch(self, samples: Indices, *, seed: int, epoch: int, restores: bool) -> object:
        """The batch of these samples, in this order.

        Args:
            samples: indices into the data set.
            seed: of the run, for the samples' randomness.
            epoch: of the samples, for their randomness.
            restores: whether to leave the global random generators as they were.
        """
        ...


class _Indexed(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def source_of(dataset: object, collate: Collate | None = None) -> Source:
    """The way to read a data set.

    Columns are: a tensor; a numpy array of numbers; a tuple, named tuple or dict of these; a
    ``TensorDataset``; a ``Subset`` of any of these; and a list of these that could not be a batch
    of samples, since they differ in dtype or dimensions. A batch of columns has the structure that
    torch's ``default_collate`` gives for the same samples (a list for a tuple). With a collate
    function of the user's own they too are read sample by sample.

    Args:
        dataset: what the user gave.
        collate: makes a batch of a list of samples; None for torch's default.

    Raises:
        TypeError: an iterable data set, a loader, something without ``__getitem__`` or
            ``__len__``, or a tuple or dict of tensors and other things.
        UsageError: no samples at all, columns of different lengths, or a short list of tensors of
            one kind, which could be columns as well as samples.
    """
    _refuse_by_name(dataset)
    if isinstance(dataset, list):
        dataset = _tuple_of_columns(cast("list[object]", dataset))
    source = _columns_of(dataset) if collate is None else None
    if source is None:
        source = _Samples(_indexed(dataset), collate)
    if len(source) == 0:
        raise UsageError(
            f"the data set ({_type_name(dataset)}) has no samples; training needs at least one. "
            "Check the path or the filter it was made with"
        )
    return source


class _Samples:
    """A map-style data set, read sample by sample."""

    in_memory = False

    def __init__(self, dataset: _Indexed, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = cast("Collate", _collate) if collate is None else collate

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, samples: Indices, *, seed: int, epoch: int, restores: bool) -> object:
        read: list[object] = []
        with SampleRandomness(seed, epoch, restores=restores) as randomness:
            for index in cast("list[int]", samples.tolist()):
                randomness.at(index)
                try:
                    read.append(self._dataset[index])
                except Exception as error:
                    error.add_note(f"raised by sample {index} of the data set in epoch {epoch}")
                    raise
            return self._collate(read)


class _Columns:
    """Equally long tensors or arrays; row i of each makes sample i."""

    in_memory = True

    def __init__(self, columns: Sequence[_Column], build: Callable[[list[Tensor]], object]) -> None:
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"tensors of {', '.join(map(str, lengths))} rows as one data set; row i of each "
                "makes sample i, so their first dimensions must be equal"
            )
        self._columns = tuple(columns)
        self._build = build

    def __len__(self) -> int:
        return len(self._columns[0])

    def batch(self, samples: Indices, *, seed: int, epoch: int, restores: bool) -> object:
        return self._build([_gather(column, samples) for column in self._columns])


class _Selected:
    """A ``Subset`` of columns: still one gather."""

    in_memory = True

    def __init__(self, columns: Source, subset: Subset[object]) -> None:
        self._columns = columns
        self._subset = subset
        self._rows = np.asarray(subset.indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._subset.indices)

    def batch(self, samples: Indices, *, seed: int, epoch: int, restores: bool) -> object:
        rows = self._rows[samples]
        return self._columns.batch(rows, seed=seed, epoch=epoch, restores=restores)


class _Rows:
    """A tuple or dict of columns as a map-style data set, for a collate function of the user's."""

    def __init__(self, columns: tuple[_Column, ...] | Mapping[object, _Column]) -> None:
        self._columns = columns
        members = list(columns.values()) if isinstance(columns, Mapping) else columns
        self._length = len(_Columns(members, list))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> object:
        if isinstance(self._columns, Mapping):
            return {name: column[index] for name, column in self._columns.items()}
        return _tuple_maker(self._columns)([column[index] for column in self._columns])


def _gather(column: _Column, rows: Indices) -> Tensor:
    if isinstance(column, Tensor):
        return column.index_select(0, torch.as_tensor(rows, device=column.device))
    return torch.as_tensor(np.take(column, rows, axis=0))


def _is_column(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0
    if not isinstance(value, np.ndarray):
        return False
    array = cast("npt.NDArray[np.generic]", value)
    return array.ndim > 0 and array.dtype.kind in "biufc"


def _tuple_maker(like: object) -> Callable[[Sequence[object]], object]:
    """Makes tuples of the type of ``like``, named tuples included."""
    return cast("Callable[[Sequence[object]], object]", getattr(type(like), "_make", tuple))


def _columns_of(dataset: object) -> Source | None:
    """The data set as columns, or None where it must be read sample by sample."""
    if type(dataset) is Subset:
        subset = cast("Subset[object]", dataset)
        inner = _columns_of(subset.dataset)
        return None if inner is None else _Selected(inner, subset)
    if isinstance(dataset, TensorDataset):
        # A subclass that reads in its own way, to augment for instance, must be asked.
        if type(dataset).__getitem__ is not TensorDataset.__getitem__:  # pyright: ignore
            return None
        dataset = cast("tuple[object, ...]", dataset.tensors)
    if _is_column(dataset):
        return _Columns([cast("_Column", dataset)], _only)
    if isinstance(dataset, Mapping):
        named = _all_columns(cast("Mapping[object, object]", dataset))
        return None if named is None else _Columns(list(named.values()), _Named(tuple(named)))
    if isinstance(dataset, tuple):
        members = _all_columns(dict(enumerate(cast("tuple[object, ...]", dataset))))
        if members is None:
            return None
        make = _tuple_maker(cast("object", dataset))
        return _Columns(list(members.values()), list if make is tuple else make)
    return None


def _all_columns(members: Mapping[object, object]) -> dict[object, _Column] | None:
    """The members if all are columns, None if none is."""
    columns = {name: cast("_Column", x) for name, x in members.items() if _is_column(x)}
    if columns and len(columns) < len(members):
        other = next(x for x in members.values() if not _is_column(x))
        raise TypeError(
            f"tensors and a {_type_name(other)} in one tuple or dict as a data set; all its "
            "members must be tensors or arrays of numbers with one row per sample. "
            "Convert it (torch.as_tensor), or give a Dataset with __getitem__ and __len__"
        )
    return columns or None


def _tuple_of_columns(members: list[object]) -> object:
    """A list as a tuple where its members can only be columns, else the list as it is."""
    if not members or not all(_is_column(member) for member in members):
        return members
    columns = cast("list[_Column]", members)
    if len({len(column) for column in columns}) > 1:
        return members
    if len({(column.ndim, str(column.dtype)) for column in columns}) > 1:
        return tuple(columns)
    if len(columns) <= _FEW and len(columns[0]) > len(columns):
        raise UsageError(
            f"a list of {len(columns)} tensors of {len(columns[0])} rows as a data set; it may "
            f"mean {len(columns)} samples or {len(columns)} columns. Give a tuple for columns, "
            "torch.stack(list) for samples"
        )
    return members


class _Named:
    """Puts gathered columns back under their names."""

    def __init__(self, names: tuple[object, ...]) -> None:
        self._names = names

    def __call__(self, columns: list[Tensor]) -> object:
        return dict(zip(self._names, columns, strict=True))


def _only(columns: list[Tensor]) -> object:
    return columns[0]


def _indexed(dataset: object) -> _Indexed:
    """The data set as a map-style one."""
    if isinstance(dataset, Mapping):
        columns = _all_columns(cast("Mapping[object, object]", dataset))
        if columns is not None:
            return _Rows(columns)
    elif isinstance(dataset, tuple):
        members = cast("tuple[object, ...]", dataset)
        if members and _all_columns(dict(enumerate(members))) is not None:
            return _Rows(cast("tuple[_Column, ...]", members))
        return cast("_Indexed", members)
    elif not isinstance(dataset, (str, bytes)) and _has_length(dataset):
        return cast("_Indexed", dataset)
    raise TypeError(
        f"the data set is a {_type_name(cast('object', dataset))}; it must have __getitem__ by "
        "position and __len__, or be a tensor, or a tuple or dict of tensors"
    )


def _type_name(value: object) -> str:
    return type(value).__name__


def _has_length(dataset: object) -> bool:
    if isinstance(dataset, Tensor):
        return dataset.ndim > 0
    if isinstance(dataset, np.ndarray):
        return cast("npt.NDArray[np.generic]", dataset).ndim > 0
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _refuse_by_name(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"the data set is an IterableDataset ({_type_name(cast('object', dataset))}); shoal "
            "draws samples by index, so that each is used exactly once whoever joins or leaves. "
            "Give a map-style Dataset with __getitem__ and __len__: list(dataset) where it fits in "
            "memory"
        )
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "the data set is a DataLoader; shoal draws, shards and batches the samples itself. "
            "Give its data set: loader.dataset"
        )
