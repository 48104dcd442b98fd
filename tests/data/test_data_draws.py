"""The loader in the training process: the right samples, in the right order, once each."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from shoal.data import Draws, Order, sample_generator, share, step_span
from shoal.errors import UsageError


class Noisy:
    """Each sample with a number from every generator that a data set may use."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor(
            [
                float(torch.rand(())),
                float(np.random.random()),
                random.random(),
                float(torch.rand((), generator=sample_generator())),
            ],
            dtype=torch.float64,
        )


def test_positions_follow_the_order_through_the_epochs() -> None:
    x = torch.arange(100, 110)
    draws = Draws(x, seed=4)
    assert draws.n == 10
    for epoch in range(3):
        order = Order(n=10, seed=4, epoch=epoch)
        got = torch.cat([draws.fetch(epoch * 10 + a, epoch * 10 + b) for a, b in ((0, 4), (4, 10))])
        assert (got - 100).tolist() == order.take(0, 10).tolist()


def test_any_span_anywhere_is_cut_from_the_same_order() -> None:
    n = 10_001
    draws = Draws(torch.arange(n), seed=4)
    orders = [Order(n=n, seed=4, epoch=epoch).take(0, n) for epoch in range(2)]
    chance = random.Random(0)
    spans = [(0, 0, n), (0, 4095, 4097), (0, 0, 1), (1, n - 1, n), (0, n - 1, n), (1, 8191, 8193)]
    for _ in range(200):
        start = chance.randrange(n)
        spans.append((chance.randrange(2), start, min(n, start + chance.choice((1, 64, 6000)))))
    for epoch, start, stop in spans:
        got = draws.fetch(epoch * n + start, epoch * n + stop)
        assert np.array_equal(got.numpy(), orders[epoch][start:stop])


def test_evaluation_reads_in_the_data_sets_own_order() -> None:
    for dataset in (torch.arange(10), list(range(10))):
        draws = Draws(dataset, seed=4, shuffled=False)
        assert draws.fetch(3, 10).tolist() == list(range(3, 10))
        assert draws.fetch(13, 15).tolist() == [3, 4]


def test_the_kind_of_data_set_does_not_change_the_samples() -> None:
    x = torch.arange(50)
    expected = Draws(x, seed=1).fetch(50, 63)
    for dataset in (x.tolist(), x.numpy(), range(50)):
        assert torch.equal(Draws(dataset, seed=1).fetch(50, 63), expected)
    assert torch.equal(Draws(TensorDataset(x), seed=1).fetch(50, 63)[0], expected)
    assert Draws(x, seed=1, collate=list).fetch(50, 63) == list(expected)


def test_a_sample_is_augmented_alike_in_any_company_and_otherwise_in_another_epoch() -> None:
    draws = Draws(Noisy(12), seed=3)
    seen = {}
    for start, stop in ((0, 12), (0, 5), (5, 6), (6, 12)):
        for index, noise in zip(*draws.fetch(start, stop), strict=True):
            noise = tuple(noise.tolist())
            assert seen.setdefault(int(index), noise) == noise
    later = {int(i): tuple(v.tolist()) for i, v in zip(*draws.fetch(12, 24), strict=True)}
    assert all(a != b for i in seen for a, b in zip(seen[i], later[i], strict=True))


def test_reading_leaves_the_training_process_random_state_alone() -> None:
    draws = Draws(Noisy(12), seed=3)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = float(torch.rand(())), float(np.random.random()), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    draws.fetch(0, 6)
    assert (float(torch.rand(())), float(np.random.random()), random.random()) == expected


@given(
    n=st.integers(1, 80),
    micro_batch=st.integers(1, 7),
    script=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.booleans()), min_size=1, max_size=40
    ),
)
@settings(max_examples=80, deadline=None)
def test_every_sample_once_an_epoch_whoever_comes_and_goes(n, micro_batch, script) -> None:
    """Any script of (workers, global batch, committed): what was committed is each sample once."""
    x = torch.arange(n)
    draws = [Draws(x if rank % 2 else x.tolist(), seed=1) for rank in range(5)]
    cursor, used, step = 0, [], 0
    while cursor < 2 * n:
        workers, global_batch, committed = script[step % len(script)]
        committed = committed or step > 3 * len(script)
        span = step_span(cursor, n, global_batch)
        drawn = [
            draws[rank].fetch(span.start + m.start, span.start + m.stop)
            for rank in range(workers)
            for m in share(len(span), micro_batch, workers, rank)
        ]
        step += 1
        if committed:
            used += torch.cat(drawn).tolist()
            cursor = span.stop
    for epoch in range(2):
        assert (
            used[epoch * n : (epoch + 1) * n] == Order(n=n, seed=1, epoch=epoch).take(0, n).tolist()
        )


def test_the_data_sets_own_error_names_the_sample() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int):
            if index == 7:
                raise OSError(5, "unreadable")
            return super().__getitem__(index)

    draws = Draws(Broken(12), seed=0)
    with pytest.raises(OSError, match="unreadable") as caught:
        draws.fetch(12, 24)
    assert caught.value.errno == 5
    assert caught.value.__notes__ == ["raised by sample 7 of the data set in epoch 1"]
    with pytest.raises(RuntimeError, match="outside of a read"):
        sample_generator()


def test_a_data_set_that_changes_its_length_is_noticed() -> None:
    items = list(range(10))
    draws = Draws(items, seed=0)
    draws.check_length()
    items.append(10)
    with pytest.raises(UsageError, match="has 11 samples, but had 10 when the run began"):
        draws.check_length()
    with pytest.raises(UsageError, match="has 11 samples, but had 10"):
        Draws(items, seed=0, n=10)


@pytest.mark.parametrize("span", [(0, 0), (5, 3), (-1, 2), (8, 11), (0, 20)])
def test_spans_that_are_none_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="lies within one epoch"):
        Draws(torch.arange(10), seed=0).fetch(*span)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": -1}, "num_workers = -1"),
        ({"prefetch": 0}, "prefetch = 0"),
        ({"seed": -1}, "seed = -1"),
        (
            {"num_workers": 1, "multiprocessing_context": "thread"},
            "multiprocessing_context = 'thread'",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Draws([1, 2, 3], **({"seed": 0} | options))


def test_settings_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="num_workers = 2 has no effect on a data set of tensors"):
        Draws(torch.arange(10), seed=0, num_workers=2).fetch(0, 5)
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory = True has no effect"):
            Draws(torch.arange(10), seed=0, pin_memory=True).fetch(0, 5)


def test_closed_draws_say_so() -> None:
    with Draws(torch.arange(10), seed=0) as draws:
        draws.fetch(0, 3)
    draws.close()
    with pytest.raises(ValueError, match="closed"):
        draws.fetch(3, 6)
