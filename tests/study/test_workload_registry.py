"""The workloads with short names: their data, splits and sizes."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.data.image_tasks import ImageTask
from shoal.errors import UsageError
from shoal.study import load_workload
from shoal.workloads import study_fashion
from shoal.workloads.study_registry import REGISTRY


def _parameters(name: str, **settings: object) -> int:
    return sum(p.numel() for p in load_workload(name, settings).build(0).parameters())


def test_digits_are_split_without_overlap() -> None:
    workload = load_workload("digits_mlp")
    assert [workload.samples(s) for s in ("train", "val", "test")] == [1024, 386, 387]
    x = torch.cat([workload.split(s)[0] for s in ("train", "val", "test")])
    assert x.shape == (1797, 64) and x.dtype == torch.float32
    assert x.min() == 0 and x.max() == 1
    # All 1,797 pictures differ in the source, so as many must differ here.
    assert len(torch.unique(x, dim=0)) == 1797
    for split in ("train", "val", "test"):
        share = torch.bincount(workload.split(split)[1], minlength=10) / workload.samples(split)
        assert share.min() > 0.06 and share.max() < 0.14


def test_digits_models() -> None:
    assert _parameters("digits_mlp") == 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert _parameters("digits_mlp", widths=[8]) == 64 * 8 + 8 + 8 * 10 + 10
    assert _parameters("digits_tiny") == 64 * 16 + 16 + 16 * 10 + 10
    tiny = load_workload("digits_tiny")
    assert [tiny.samples(s) for s in ("train", "val", "test")] == [256, 128, 128]


def test_he_initialisation() -> None:
    net = load_workload("digits_mlp", {"widths": [2000]}).build(1)
    weights = net.state_dict()
    assert weights["0.weight"].std() == pytest.approx(math.sqrt(2 / 64), rel=0.02)
    assert weights["2.weight"].std() == pytest.approx(math.sqrt(2 / 2000), rel=0.03)
    assert not weights["0.bias"].any() and not weights["2.bias"].any()


@pytest.fixture
def few_clothes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random pictures in place of Fashion-MNIST, which is not on every machine."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 1, 28, 28, generator=generator), torch.arange(count) % 10

    task = ImageTask(
        name="fashion-mnist",
        train=part(40),
        validation=part(20),
        test=part(10),
        classes=10,
        note="",
    )
    monkeypatch.setattr(study_fashion, "image_task", lambda name: task)


@pytest.mark.usefixtures("few_clothes")
def test_fashion_models() -> None:
    assert _parameters("fashion_cnn") == 20_338
    small = 4 * 9 + 4 + 4 * 4 * 9 + 4 + 4 * 49 * 8 + 8 + 8 * 10 + 10
    assert _parameters("fashion_cnn", channels=[4, 4], hidden=8) == small
    assert _parameters("fashion_fc") == _parameters("fashion_fc_256") == 203_530
    assert _parameters("fashion_fc_64x3") == 784 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 10 + 10
    names = {name: load_workload(name).name for name in REGISTRY if name.startswith("fashion_fc_")}
    assert names["fashion_fc_64x3"] == "fashion_fc_64_64_64"
    assert len(set(names.values())) == len(names)


@pytest.mark.usefixtures("few_clothes")
def test_a_part_of_the_clothes() -> None:
    workload = load_workload("fashion_cnn", {"train_samples": 30, "val_samples": 5})
    assert [workload.samples(s) for s in ("train", "val", "test")] == [30, 5, 10]
    whole = load_workload("fashion_cnn")
    assert torch.equal(workload.split("train")[0], whole.split("train")[0][:30])
    assert workload.fingerprint != whole.fingerprint
    assert load_workload("fashion_fc").split("val")[0].shape == (20, 784)


@pytest.mark.usefixtures("few_clothes")
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"train_samples": 41}, "there are 40"),
        ({"val_samples": 0}, "there are 20"),
        ({"channels": [8]}, "two convolutions"),
        ({"hidden": 0}, "widths"),
    ],
)
def test_sizes_outside(parameters: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_workload("fashion_cnn", parameters)
