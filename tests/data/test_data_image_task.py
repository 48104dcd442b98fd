"""The picture task that is always at hand, and the digits it falls back to."""

from pathlib import Path

import pytest
import torch

from shoal.data import fashion_mnist as fm
from shoal.data import image_task, image_tasks, load_digits
from shoal.errors import UsageError


def test_digits_are_the_bundled_ones() -> None:
    data = load_digits()
    assert data.images.shape == (1797, 8, 8) and data.images.dtype == torch.uint8
    assert int(data.images.max()) == 16
    assert data.labels.dtype == torch.int64
    assert data.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.labels[:4].tolist() == [0, 1, 2, 3]


def test_the_digits_task_is_a_fixed_split() -> None:
    task, again = image_task("digits"), image_task("digits")
    assert (task.name, task.classes) == ("digits", 10)
    parts = (task.train, task.validation, task.test)
    assert [len(y) for _, y in parts] == [1257, 180, 360]
    assert [tuple(x.shape[1:]) for x, _ in parts] == [(1, 8, 8)] * 3
    assert all(x.dtype == torch.float32 and y.dtype == torch.int64 for x, y in parts)
    labels = torch.cat([y for _, y in parts]).bincount()
    assert torch.equal(labels, load_digits().labels.bincount())
    assert float(task.train[0].mean()) == pytest.approx(0, abs=1e-5)
    assert float(task.train[0].std()) == pytest.approx(1, abs=1e-3)
    assert all(len(y.unique()) == 10 for _, y in parts)
    assert torch.equal(task.train[0], again.train[0]) and torch.equal(task.test[1], again.test[1])


def test_the_split_is_frozen() -> None:
    """Figures of different runs compare only on the same parts."""
    train, validation, test = image_tasks._split(1797, [1257, 1437])
    assert sorted(torch.cat([train, validation, test]).tolist()) == list(range(1797))
    assert validation[:5].tolist() == [9, 41, 46, 48, 61]
    assert test[:5].tolist() == [21, 31, 42, 43, 45]


def test_another_name_is_refused() -> None:
    with pytest.raises(UsageError, match="name = 'mnist'; use 'auto'"):
        image_task("mnist")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fm, "DEBIAN_FOLDER", tmp_path / "debian")


def test_digits_stand_in_with_one_line(nowhere, capsys, monkeypatch) -> None:
    def fails() -> Path:
        raise fm.DataMissing("Fashion-MNIST could not be fetched. no network here")

    monkeypatch.setattr(image_tasks, "fetch_fashion_mnist", fails)
    task = image_task()
    assert task.name == "digits" and "no network here" in task.note
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "digits" in err and "no network here" in err and "SHOAL_DATA" in err
    with pytest.raises(fm.DataMissing, match="no network here"):
        image_task("fashion-mnist")


def test_nothing_is_fetched_unless_allowed(nowhere, capsys, monkeypatch) -> None:
    def never() -> Path:
        raise AssertionError("fetched")

    monkeypatch.setattr(image_tasks, "fetch_fashion_mnist", never)
    assert image_task(may_fetch=False).name == "digits"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_set_is_an_error_and_not_a_reason_for_digits(nowhere) -> None:
    fm.DEBIAN_FOLDER.mkdir()
    for name in fm.SUMS:
        (fm.DEBIAN_FOLDER / name).write_bytes(b"\0\0\x08\x01\0\0\0\0")
    with pytest.raises(UsageError, match="is damaged"):
        image_task()


@pytest.mark.skipif(
    not (fm.DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").exists(),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_fashion_mnist_is_taken_when_it_is_there(capsys) -> None:
    task = image_task()
    assert task.name == "fashion-mnist" and task.note.startswith("from ")
    parts = (task.train, task.validation, task.test)
    assert [len(y) for _, y in parts] == [55_000, 5_000, 10_000]
    assert all(x.shape[1:] == (1, 28, 28) for x, _ in parts)
    assert (task.train[1].bincount() + task.validation[1].bincount()).tolist() == [6000] * 10
    assert float(task.train[0].mean()) == pytest.approx(0, abs=1e-4)
    assert float(task.train[0].std()) == pytest.approx(1, abs=1e-3)
    assert capsys.readouterr() == ("", "")
