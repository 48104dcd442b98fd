"""What a data set may be: the batches of every kind, and what is refused by name."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from shoal.data import Draws
from shoal.data.sources import source_of
from shoal.errors import UsageError

Pair = namedtuple("Pair", "x y")
X = torch.arange(60.0).reshape(20, 3)
Y = torch.arange(20)


class Squares(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        assert type(index) is int
        return X[index], index * index


class Doubled(TensorDataset):
    """A TensorDataset that reads in its own way must be asked."""

    def __getitem__(self, index):
        return tuple(2 * t for t in super().__getitem__(index))


def batch(dataset: object, rows: list[int], collate=None) -> object:
    samples = np.array(rows, dtype=np.int64)
    return source_of(dataset, collate).batch(samples, seed=0, epoch=0, restores=True)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(
    ("dataset", "samples", "in_memory"),
    [
        (X, list(X), True),
        ((X, Y), list(zip(X, Y, strict=True)), True),
        ((X,), [(x,) for x in X], True),
        (Pair(X, Y), [Pair(x, y) for x, y in zip(X, Y, strict=True)], True),
        ({"x": X, "y": Y}, [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], True),
        ([X, Y], [list(p) for p in zip(X, Y, strict=True)], True),
        (TensorDataset(X, Y), list(zip(X, Y, strict=True)), True),
        (X.numpy(), list(X), True),
        ((X.numpy(), Y.numpy()), list(zip(X, Y, strict=True)), True),
        (Doubled(X, Y), [(2 * x, 2 * y) for x, y in zip(X, Y, strict=True)], False),
        (Squares(), [(X[i], i * i) for i in range(20)], False),
        (list(range(100, 120)), list(range(100, 120)), False),
        ([*X], list(X), False),
        (
            [(x, int(y)) for x, y in zip(X, Y, strict=True)],
            list(zip(X, Y.tolist(), strict=True)),
            False,
        ),
        (
            tuple((x, int(y)) for x, y in zip(X, Y, strict=True)),
            list(zip(X, Y.tolist(), strict=True)),
            False,
        ),
        (["a", "bc", "d"] * 7, ["a", "bc", "d"] * 7, False),
        (np.array(["a", "b"] * 10), list(np.array(["a", "b"] * 10)), False),
        (range(20), list(range(20)), False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else str(value),
)
def test_a_batch_is_what_default_collate_gives(dataset, samples, in_memory: bool) -> None:
    rows = [3, 0, 7, 7]
    got = batch(dataset, rows)
    assert same(got, default_collate([samples[i] for i in rows]))
    assert source_of(dataset).in_memory is in_memory
    assert len(source_of(dataset)) == len(samples)


def test_a_subset_of_tensors_is_still_one_gather() -> None:
    inner = Subset(TensorDataset(X, Y), [19, 4, 6, 0])
    outer = Subset(inner, [2, 0])
    source = source_of(outer)
    assert source.in_memory and len(source) == 2
    assert same(batch(outer, [0, 1]), [X[[6, 19]], Y[[6, 19]]])
    assert not source_of(Subset(Squares(), [1, 2])).in_memory
    assert same(batch(Subset(Squares(), [5, 2]), [1]), [X[[2]], torch.tensor([4])])


def test_a_batch_is_new_memory() -> None:
    for dataset in (X.clone(), X.clone().numpy()):
        got = batch(dataset, [0, 1])
        got.zero_()
        assert float(torch.as_tensor(dataset).sum()) == float(X.sum())


def test_read_only_arrays_are_fine() -> None:
    array = X.numpy().copy()
    array.setflags(write=False)
    assert same(batch(array, [1]), X[[1]])


@pytest.mark.parametrize(
    ("dataset", "first"),
    [
        (X, X[3]),
        ((X, Y), (X[3], Y[3])),
        (Pair(X, Y), Pair(X[3], Y[3])),
        ({"x": X, "y": Y}, {"x": X[3], "y": Y[3]}),
        (TensorDataset(X, Y), (X[3], Y[3])),
        (Squares(), (X[3], 9)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_collate_function_gets_samples(dataset, first) -> None:
    got = batch(dataset, [3, 1], collate=lambda samples: samples)
    assert len(got) == 2 and same(got[0], first)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Stream(), r"IterableDataset \(Stream\).*by index.*list\(dataset\)"),
        (DataLoader(Squares()), "a DataLoader.*loader.dataset"),
        ((i for i in range(3)), "a generator; it must have __getitem__"),
        (NoLength(), "a NoLength; it must have"),
        ({"a": "b"}, "a dict; it must have"),
        ("text", "a str; it must have"),
        (torch.tensor(1.0), "a Tensor; it must have"),
        (np.array(1.0), "a ndarray; it must have"),
        (None, "a NoneType; it must have"),
        ((X, Y.tolist()), "tensors and a list in one tuple or dict"),
        ({"x": X, "name": "train"}, "tensors and a str in one tuple or dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_set_is_a_type_error(dataset, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Draws(dataset, seed=0)
    with pytest.raises(TypeError, match=said):
        Draws(dataset, seed=0, collate=list)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([], r"the data set \(list\) has no samples"),
        ((), "no samples"),
        (torch.zeros(0, 3), "no samples"),
        (TensorDataset(torch.zeros(0)), "no samples"),
        (Subset(TensorDataset(X), []), "no samples"),
        ((X, Y[:5]), "tensors of 20, 5 rows"),
        ({"x": X, "y": Y[:5]}, "tensors of 20, 5 rows"),
        ([X, X + 1], "a list of 2 tensors of 20 rows.*tuple for columns.*torch.stack"),
        ([X], "a list of 1 tensors"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_sets_that_cannot_be_trained_on(dataset, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Draws(dataset, seed=0)
    if "a list" not in said or "no samples" in said:
        with pytest.raises(UsageError, match=said):
            Draws(dataset, seed=0, collate=list)
