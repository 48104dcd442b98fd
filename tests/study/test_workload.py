"""Workloads: what they refuse, what identifies them, and where they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study.workload import (
    Split,
    Workload,
    classification_error,
    cross_entropy,
    load_workload,
)

X = torch.arange(24.0).reshape(8, 3) / 24
Y = torch.arange(8) % 2


def _linear() -> nn.Module:
    return nn.Linear(3, 2)


def _workload(**changes: object) -> Workload:
    settings: dict[str, object] = {
        "name": "w",
        "model": _linear,
        "loss": cross_entropy,
        "train": (X, Y),
        "val": (X[:4], Y[:4]),
    }
    return Workload(**(settings | changes))  # pyright: ignore


def _mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def _elementwise(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).abs()


def _accuracy_gain(output: Tensor, target: Tensor) -> Tensor:
    return -torch.ones(len(target))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": _mean_loss}, r"loss = a result of shape \(\) .* reduction='none'"),
        ({"loss": lambda o, t: 0.3}, "needed per sample"),
        ({"loss": _elementwise}, r"shape \(2, 2\) for 2 samples.*mean\(1\)"),
        ({"metrics": {"error": _mean_loss}}, r"metrics\['error'\] .*reduction='none'"),
        ({"metrics": {"gain": _accuracy_gain}}, "never negative"),
        ({"metrics": {"val/error": classification_error}}, "without a slash"),
        ({"val": (X[:4], Y[:3])}, "4 inputs, 3 targets"),
        ({"val": (X[:0], Y[:0])}, "at least one"),
        ({"test": (torch.zeros(4, 5), Y[:4])}, r"test = inputs of shape \(5,\)"),
        ({"val": (X[:4].double(), Y[:4])}, "prepare all splits alike"),
        ({"val": (X, Y, Y)}, "tuple of 3"),
        ({"val": 3}, "val = int, which cannot be read"),
        ({"val": [(X[0], 1), (X[0, :2], 1)]}, "tensors of one shape"),
        ({"model": nn.ReLU}, "without trainable parameters"),
        ({"name": ""}, "give it a name"),
    ],
)
def test_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text) as refusal:
        _workload(**changes)
    assert "\n" not in str(refusal.value)


def test_default_metrics() -> None:
    assert list(_workload().metrics) == ["classification_error", "cross_entropy_error"]

    def squared(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target) ** 2

    assert _workload(loss=squared).metrics == {"loss": squared}
    given = {"miss": classification_error}
    assert _workload(metrics=given).metrics == given


def test_per_sample_functions() -> None:
    output = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    target = torch.tensor([0, 0, 0])
    assert classification_error(output, target).tolist() == [0.0, 0.0, 1.0]
    mean = nn.functional.cross_entropy(output, target)
    assert torch.allclose(cross_entropy(output, target).mean(), mean)


def test_a_map_dataset_is_read_into_tensors() -> None:
    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index >= 4:
                raise IndexError
            return X[index].double(), int(Y[index])

    x, y = _workload(val=Rows()).split("val")
    assert torch.equal(x, X[:4]) and x.dtype == torch.float32
    assert torch.equal(y, Y[:4]) and y.dtype == torch.int64


def test_splits() -> None:
    workload = _workload()
    assert workload.split("train")[0] is X and workload.samples("val") == 4
    for name in ("test", "loss"):
        with pytest.raises(UsageError, match="has train, val"):
            workload.split(name)


def test_weights_follow_the_seed_and_leave_torchs_generator_alone() -> None:
    workload = _workload()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a, b, c = (workload.build(seed).state_dict()["weight"] for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_larger_than_the_data() -> None:
    _workload().check_batches([1, 8])
    with pytest.raises(UsageError, match=r"global_batches = 16; .*has 8 samples.*at most 8"):
        _workload().check_batches([8, 16])


# -- identity ------------------------------------------------------------------------------------


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _relu() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _scaled(gain: float) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        net = nn.Linear(3, 2)
        nn.init.normal_(net.weight, std=gain)
        return net

    return model


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * 2


class _OwnToo(_Own):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * 3


_OwnToo.__name__ = "_Own"


def test_a_fingerprint_is_moved_by_what_decides_a_result() -> None:
    moved = X.clone()
    moved[7, 2] += 1e-6
    different = [
        _workload(),
        _workload(name="v"),
        _workload(train=(moved, Y)),
        _workload(val=(X[1:5], Y[:4])),
        _workload(test=(X[:4], Y[:4])),
        _workload(loss=lambda o, t: cross_entropy(o, t) * 1.1),
        _workload(metrics={"e": classification_error}),
        _workload(model=_wide),
        _workload(model=_relu),
        _workload(model=_tanh),
        _workload(model=_scaled(0.1)),
        _workload(model=_scaled(0.2)),
        _workload(model=lambda: _Own()),
        _workload(model=lambda: _OwnToo()),
    ]
    prints = [workload.fingerprint for workload in different]
    assert len(set(prints)) == len(prints)
    assert prints[0] == _workload(train=(X.clone(), Y.clone())).fingerprint
    assert _workload(model=_scaled(0.1)).fingerprint == prints[10]


# -- where they come from ------------------------------------------------------------------------

SOURCE = """
import torch
from torch import nn
from shoal.study import Workload, cross_entropy

def mine(*, width: int = 2):
    x, y = torch.rand(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
    return Workload(
        name="mine",
        model=lambda: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)),
        loss=cross_entropy, train=(x, y), val=(x, y),
    )

def nothing():
    return 3
"""


def test_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    workload = load_workload("task.py:mine", {"width": 5}, base=tmp_path)
    assert workload.name == "mine"
    assert workload.build(0).state_dict()["0.weight"].shape == (5, 3)
    again = load_workload("task.py:mine", {"width": 5}, base=tmp_path)
    other = load_workload("task.py:mine", {"width": 6}, base=tmp_path)
    assert again.fingerprint == workload.fingerprint != other.fingerprint


def test_a_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_users_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_workload("a_users_module:mine").samples("train") == 16


@pytest.mark.parametrize(
    ("reference", "parameters", "text"),
    [
        ("digit_mlp", {}, "did you mean digits_mlp"),
        ("cifar", {}, "known are digits_mlp, .*fashion_cnn"),
        ("no_such_module:mine", {}, "cannot be imported"),
        ("missing.py:mine", {}, "no such file"),
        ("task.py:mime", {}, "did you mean mine"),
        ("task.py:nothing", {}, "which returned int"),
        ("task.py:mine", {"widths": 3}, "takes width"),
        ("digits_mlp", {"widths": [0]}, "widths = "),
        ("digits_mlp", {"width": 3}, "takes widths"),
        ("digits_mlp", {"widths": "32"}, "widths = '32'"),
    ],
)
def test_refused_references(
    tmp_path: Path, reference: str, parameters: dict[str, object], text: str
) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    with pytest.raises(UsageError, match=text) as refusal:
        load_workload(reference, parameters, base=tmp_path)
    assert "\n" not in str(refusal.value)


def test_an_error_in_a_users_file_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise RuntimeError('mine')")
    with pytest.raises(UsageError, match=r"RuntimeError \(mine\) at bad\.py, line 1") as caught:
        load_workload("bad.py:f", base=tmp_path)
    # From Python the error itself, with its traceback, is at hand.
    assert isinstance(caught.value.__cause__, RuntimeError)
    (tmp_path / "bad.py").write_text(SOURCE)
    assert load_workload("bad.py:mine", base=tmp_path).name == "mine"


def test_a_workload_is_compared_by_identity() -> None:
    a = _workload()
    assert a == a and a != dataclasses.replace(a)


def test_splits_type() -> None:
    split: Split = _workload().split("train")
    assert len(split) == 2
