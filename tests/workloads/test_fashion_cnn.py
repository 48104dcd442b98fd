"""The small CNN of the long experiment."""

import pytest
import torch
from torch import nn

from shoal.workloads.fashion_cnn import SmallCNN, evaluate


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = SmallCNN(3), SmallCNN(3), SmallCNN(4)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)
    assert sum(p.numel() for p in one.parameters()) == 20_338


def test_evaluate_counts_every_sample_once() -> None:
    class Marked(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 100.0 * nn.functional.one_hot(images[:, 0, 0, 0].long(), 10).float()

    images = torch.zeros(2_500, 1, 28, 28)
    images[:, 0, 0, 0] = torch.arange(2_500) % 10
    labels = torch.arange(2_500) % 10
    labels[2_000:] = (labels[2_000:] + 1) % 10
    accuracy, loss = evaluate(Marked(), images, labels)
    assert accuracy == pytest.approx(80.0)
    assert loss == pytest.approx(0.2 * 100.0, rel=1e-4)
