"""The three models that are delivered."""

from math import inf, nan

import pytest
import torch

from shoal.errors import DivergedError, UsageError
from shoal.sync import Stacked
from shoal.sync.delivered import deliver


def test_leader_mean_and_mean_of_the_near() -> None:
    x = torch.tensor([[4.0, 0.0], [0.0, 4.0], [2.0, 2.0], [90.0, 90.0]])
    before = x.clone()
    found = deliver(x, [0.5, 0.25, 0.26, 7.0], Stacked(4), margin=0.25, step=1)
    assert found.leader.tolist() == [[0.0, 4.0]]
    assert found.mean.tolist() == [[24.0, 24.0]]
    assert found.near.tolist() == [[2.0, 2.0]]
    assert (found.leader_rank, found.near_ranks) == (1, (0, 1, 2))
    assert torch.equal(x, before)


def test_weights_that_are_not_finite_spoil_none_of_them() -> None:
    x = torch.tensor([[nan], [1.0], [3.0], [8.0]])
    found = deliver(x, [0.0, 0.5, 0.5, nan], Stacked(4), step=1)
    assert found.leader.tolist() == [[1.0]]
    assert found.mean.tolist() == [[4.0]]  # of 1, 3 and 8: a bad score leaves the mean
    assert found.near.tolist() == [[2.0]]


def test_with_one_worker_all_three_are_that_worker() -> None:
    x = torch.tensor([[1.5, -0.25]])
    found = deliver(x, [0.5], Stacked(1), step=1)
    assert torch.equal(found.leader, x)
    assert torch.equal(found.mean, x) and torch.equal(found.near, x)


def test_no_good_worker_is_an_error_with_the_step() -> None:
    with pytest.raises(DivergedError, match="at step 12"):
        deliver(torch.tensor([[nan], [1.0]]), [0.1, inf], Stacked(2), step=12)
    with pytest.raises(UsageError, match="margin = -1"):
        deliver(torch.zeros(1, 1), [0.0], Stacked(1), margin=-1, step=1)
