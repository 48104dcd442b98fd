"""The step before the first one leaves no trace."""

from __future__ import annotations

import torch

from shoal.fleet.warm_up import warm_up


def test_it_touches_neither_generators_nor_gradient_mode() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        warm_up(torch.device("cpu"))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
