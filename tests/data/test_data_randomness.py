"""Per-sample randomness: a function of (seed, epoch, index), and no trace in the training
process."""

import random

import numpy as np
import pytest
import torch

from shoal.data import sample_generator, sample_seed
from shoal.data.randomness import SampleRandomness


def drawn() -> tuple[float, float, float, float, float]:
    """One number from each generator a data set may use."""
    return (
        float(torch.rand(())),
        float(np.random.random()),
        random.random(),
        float(torch.rand((), generator=sample_generator())),
        float(torch.rand((), generator=sample_generator())),
    )


def read(seed: int, epoch: int, index: int) -> tuple[float, ...]:
    with SampleRandomness(seed, epoch) as randomness:
        randomness.at(index)
        return drawn()


def test_a_sample_draws_the_same_whatever_was_read_before() -> None:
    alone = read(5, 2, 17)
    with SampleRandomness(5, 2) as randomness:
        for index in (3, 17, 4, 17):
            randomness.at(index)
            values = drawn()
            assert (values == alone) == (index == 17)


def test_every_part_of_the_key_matters() -> None:
    values = [read(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for column in zip(*values, strict=True):
        assert len(set(column)) == 4


def test_torch_and_numpy_are_seeded_apart() -> None:
    """They run the same algorithm, so equal seeds would give both the same bits."""
    with SampleRandomness(0, 0) as randomness:
        for index in range(100):
            randomness.at(index)
            key = np.random.get_state()[1]
            assert torch.initial_seed() != int(key[0])


def test_the_generators_of_one_read_are_independent() -> None:
    values = torch.tensor([read(0, 0, index) for index in range(2000)], dtype=torch.float64)
    correlation = torch.corrcoef(values.T) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 4.5 / 2000**0.5
    assert (values.mean(0) - 0.5).abs().max() < 4.5 * (1 / 12 / 2000) ** 0.5


def test_nothing_is_left_behind_even_after_an_error() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = float(torch.rand(())), float(np.random.random()), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with pytest.raises(KeyError), SampleRandomness(0, 0) as randomness:
        randomness.at(3)
        drawn()
        raise KeyError("the data set failed")
    assert (float(torch.rand(())), float(np.random.random()), random.random()) == expected
    with pytest.raises(RuntimeError, match="outside of a read"):
        sample_generator()


def test_a_read_within_a_read_gives_way_again() -> None:
    """A data set that itself reads another one through shoal."""
    with SampleRandomness(0, 0) as outer:
        outer.at(1)
        first = sample_generator().initial_seed()
        with SampleRandomness(0, 0) as inner:
            inner.at(9)
            assert sample_generator().initial_seed() == sample_seed(0, 0, 9, 1)
        assert first == sample_seed(0, 0, 1, 1)
        assert sample_generator().initial_seed() == sample_seed(0, 0, 1, 2)


def test_sample_generator_outside_of_a_read() -> None:
    with pytest.raises(RuntimeError, match=r"sample_generator\(\) outside of a read"):
        sample_generator()
    with (
        SampleRandomness(0, 0),
        pytest.raises(RuntimeError, match="no sample is being read yet"),
    ):
        sample_generator()


def test_seeds_are_frozen_and_spread() -> None:
    assert sample_seed(0, 0, 0) == 10009200704270882996
    assert sample_seed(1, 2, 3) == 1130975841211963838
    assert sample_seed(1, 2, 3, 1) == 17506954071052567414
    assert sample_seed(2**64 - 1, 2**64 - 1, 2**64 - 1) == 5711702096124588488
    seeds = {
        sample_seed(s, e, i, k)
        for s in range(8)
        for e in range(8)
        for i in range(32)
        for k in (0, 1)
    }
    assert len(seeds) == 8 * 8 * 32 * 2
    bits = np.array([[seed >> b & 1 for b in range(64)] for seed in seeds])
    assert abs(bits.mean(0) - 0.5).max() < 4.5 * 0.5 / len(seeds) ** 0.5


@pytest.mark.parametrize("bad", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**64, 0, 0), (0, 0, 1.5)])
def test_seeds_refuse(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="from 0 to"):
        sample_seed(*bad)
