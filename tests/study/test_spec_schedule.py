"""The linear decay in steps, alone and for many trials at once, and what is said about its range."""

from __future__ import annotations

import pytest
import torch

from shoal.study.schedule import Decay, linear_decay, lr_factor


def test_linear_decay_by_hand() -> None:
    # 1 - 0.9 t / 100 up to t = 100, then 0.1.
    assert [linear_decay(t, 100, 0.1) for t in (0, 50, 100, 5_000)] == pytest.approx(
        [1.0, 0.55, 0.1, 0.1]
    )
    parameters = {"decay_steps": 100.0, "end_factor": 0.1}
    assert lr_factor("linear_decay", 50, parameters) == pytest.approx(0.55)
    assert lr_factor("constant", 50, parameters) == 1.0


def test_per_trial_tensors_equal_the_numbers() -> None:
    steps, lengths = [0, 7, 300, 999], [10.0, 12.5, 200.0, 5_000.0]
    ends = [0.0, 0.1, 0.5, 1e-3]
    many = linear_decay(
        torch.tensor(steps),
        torch.tensor(lengths, dtype=torch.float64),
        torch.tensor(ends, dtype=torch.float64),
    )
    alone = [linear_decay(t, T, a) for t, T, a in zip(steps, lengths, ends, strict=True)]
    assert many.tolist() == pytest.approx(alone, rel=1e-15)


def test_a_range_tied_to_the_budget_is_called_out() -> None:
    uniform = Decay(low=500, high=1_000, is_log=False)
    lines = uniform.warnings(1_000)
    assert any("drawn uniformly" in line for line in lines)
    assert any("below 1000 they are void" in line for line in lines)
    assert Decay(low=20, high=1_000, is_log=True).warnings(1_000) == []
    assert "fixed at 700" in Decay(low=700, high=700, is_log=False, is_fixed=True).warnings(9)[0]
