"""The order of an epoch: a bijection, well mixed, the same for ever, and small in memory."""

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Order, order
from shoal.data.order import MAX_SAMPLES

SMALL = [1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 255, 256, 257, 1000, 1023, 1024]
NETWORK = [1025, 1026, 1089, 1090, 2047, 2048, 2049, 4097, 10_007, 60_000, 2**16 + 1, 300_007]
HUGE = [2**31 - 1, 2**32 + 1, 2**39 + 1, 2**40 - 3, 2**40]


def chi_square_limit(freedom: int, z: float = 4.0) -> float:
    """What a chi-square of this freedom exceeds as rarely as a normal exceeds z."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", SMALL + NETWORK)
@pytest.mark.parametrize("epoch", [0, 5])
def test_order_is_a_bijection(n: int, epoch: int) -> None:
    samples = Order(n=n, seed=3, epoch=epoch).take(0, n)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(n))


@given(
    n=st.integers(1, 5000),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_order_is_a_bijection_for_any_key(n: int, seed: int, epoch: int) -> None:
    one = Order(n=n, seed=seed, epoch=epoch)
    samples = one.take(0, n)
    assert np.array_equal(np.sort(samples), np.arange(n))
    assert np.array_equal(one.positions(samples), np.arange(n))


@given(
    n=st.integers(2**20, MAX_SAMPLES),
    seed=st.integers(0, 2**64 - 1),
    at=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50),
)
@settings(max_examples=100, deadline=None)
def test_large_orders_stay_in_range_and_can_be_undone(n: int, seed: int, at: list[float]) -> None:
    positions = np.unique(np.array([min(int(x * n), n - 1) for x in at], dtype=np.int64))
    one = Order(n=n, seed=seed, epoch=1)
    samples = one[positions]
    assert samples.min() >= 0 and samples.max() < n
    assert np.unique(samples).size == positions.size
    assert np.array_equal(one.positions(samples), positions)
    assert np.array_equal(one[one.positions(positions)], positions)


@pytest.mark.parametrize("n", HUGE)
def test_both_ends_of_a_huge_order(n: int) -> None:
    one = Order(n=n, seed=0, epoch=0)
    positions = np.concatenate([np.arange(20_000), np.arange(n - 20_000, n)])
    samples = one[positions]
    assert samples.min() >= 0 and samples.max() < n
    assert np.unique(samples).size == positions.size
    assert np.array_equal(one.positions(samples), positions)


@pytest.mark.parametrize("n", [5, 1000, 60_000, 2**40 - 3])
def test_the_answer_does_not_depend_on_what_else_is_asked(n: int) -> None:
    one = Order(n=n, seed=9, epoch=2)
    stop = min(n, 20_000)
    whole = one.take(0, stop)
    pieces = [one.take(i, min(i + 777, stop)) for i in range(0, stop, 777)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(one[np.arange(stop)[::-1]], whole[::-1])
    assert np.array_equal(one[np.arange(stop)[::3]], whole[::3])
    for position in (0, 1, stop - 1):
        alone = order(position, n=n, seed=9, epoch=2)
        assert type(alone) is int and alone == one[position] == whole[position]
    assert np.array_equal(order(np.arange(3), n=n, seed=9, epoch=2), whole[:3])
    assert type(order(np.int64(1), n=n, seed=9, epoch=2)) is int


def test_shape_and_input_are_kept() -> None:
    one = Order(n=60_000, seed=0, epoch=0)
    positions = np.arange(12).reshape(3, 4)
    assert one[positions].shape == (3, 4)
    assert np.array_equal(one[positions].ravel(), one.take(0, 12))
    assert np.array_equal(positions.ravel(), np.arange(12))
    assert one[np.zeros(0, dtype=np.int64)].shape == (0,)
    assert one.take(7, 7).shape == (0,)
    assert np.array_equal(one[np.arange(5, dtype=np.uint8)], one.take(0, 5))


@pytest.mark.parametrize("n", [50, 1000, 1025, 60_000, 2**40 - 3])
def test_epochs_seeds_and_lengths_have_unrelated_orders(n: int) -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0), (0, 2**63)]
    m = min(n, 5000)
    orders = [Order(n=n, seed=seed, epoch=epoch).take(0, m) for seed, epoch in keys]
    orders.append(Order(n=n + 1, seed=0, epoch=0).take(0, m))
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # Two unrelated orders agree in one place on average when all of them are looked at.
            assert int((first == second).sum()) <= 10


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "samples"),
    [
        (10, 0, 0, [4, 3, 8, 6, 7]),
        (1000, 7, 3, [717, 896, 711, 678, 531]),
        (60_000, 0, 0, [35224, 6373, 56808, 32897, 14952]),
        (60_000, 0, 1, [15779, 3272, 12981, 49796, 2045]),
        (2**16 + 1, 1, 0, [26624, 34412, 3635, 55027, 46483]),
        (
            2**40 - 3,
            12345,
            6,
            [335641218305, 549113019636, 915082163024, 49633951792, 443917996926],
        ),
    ],
)
def test_orders_are_frozen(n: int, seed: int, epoch: int, samples: list[int]) -> None:
    """A change here changes what every resumed run trains on: it needs a new format version."""
    assert Order(n=n, seed=seed, epoch=epoch).take(0, 5).tolist() == samples


@pytest.mark.parametrize("n", [101, 1009, 1025, 10_007, 2**14 + 1, 2**40 - 3])
@pytest.mark.parametrize("lag", [1, 2, "stride"])
def test_neighbours_are_uncorrelated(n: int, lag: int | str) -> None:
    """Over seeds, r * sqrt(m) of position i with position i + lag is standard normal."""
    seeds = 200
    step = round(n**0.5) if lag == "stride" else int(lag)  # the network's halves change at sqrt(n)
    if n > 2**20 and lag == "stride":
        first = np.arange(4000)
        second = first + 2**20
    else:
        first = np.arange(min(n, 10_000) - step)
        second = first + step
    scores = []
    for seed in range(seeds):
        one = Order(n=n, seed=seed, epoch=0)
        a, b = one[first].astype(float), one[second].astype(float)
        mean, deviation = (n - 1) / 2, ((n * n - 1) / 12) ** 0.5
        r = float(((a - mean) * (b - mean)).mean()) / deviation**2
        scores.append((r + 1 / (n - 1)) * first.size**0.5)  # without replacement: -1 / (n - 1)
    z = np.array(scores)
    assert abs(z.mean()) < 4 / seeds**0.5
    assert 0.6 < z.var() < 1.5


@pytest.mark.parametrize("n", [7, 1024, 1025, 60_000, 2**40 - 3])
@pytest.mark.parametrize("over", ["seeds", "epochs"])
def test_every_position_and_every_sample_is_uniform(n: int, over: str) -> None:
    keys = 2000
    bins = min(n, 20)
    where = np.array([0, 1, n // 3, n // 2, n - 1], dtype=np.int64)
    counts = np.zeros((2, where.size, bins))
    for key in range(keys):
        one = Order(n=n, seed=key, epoch=0) if over == "seeds" else Order(n=n, seed=0, epoch=key)
        for k, values in enumerate((one[where], one.positions(where))):
            counts[k, np.arange(where.size), (values.astype(object) * bins // n).astype(int)] += 1
    # Where the bins do not divide n they are of slightly different size.
    sizes = np.bincount([i * bins // n for i in range(n)]) if n <= 60_000 else np.ones(bins)
    expected = keys * sizes / sizes.sum()
    statistics = ((counts - expected) ** 2 / expected).sum(-1)
    assert statistics.max() < chi_square_limit(bins - 1, z=4.5)


@pytest.mark.parametrize("n", [1025, 60_000, 2**40 - 3])
@pytest.mark.parametrize("gap", [1, "half", "row"])
def test_pairs_of_positions_are_uniform(n: int, gap: int | str) -> None:
    """Positions that share a half of the network are no more alike than any others."""
    other = {"half": n // 2, "row": -(-n // round(n**0.5 + 0.5))}.get(str(gap), 1)
    keys, bins = 4000, 5
    counts = np.zeros((bins, bins))
    pair = np.array([0, other], dtype=np.int64)
    for seed in range(keys):
        first, second = Order(n=n, seed=seed, epoch=7)[pair].tolist()
        counts[first * bins // n, second * bins // n] += 1
    assert chi_square(counts) < chi_square_limit(bins * bins - 1)


def test_all_orders_of_four_come_equally_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        key = tuple(Order(n=4, seed=seed, epoch=0))
        seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 24
    assert chi_square(np.array(list(seen.values()))) < chi_square_limit(23)


def peak_bytes(n: int, asked: int) -> int:
    tracemalloc.start()
    try:
        Order(n=n, seed=1, epoch=1).take(0, asked)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_n() -> None:
    peak_bytes(60_000, 1000)
    for asked in (1000, 50_000):
        small, large = peak_bytes(60_000, asked), peak_bytes(2**40 - 3, asked)
        assert large <= 1.1 * small + 4096
        assert large <= 8 * asked + 5 * 8 * min(asked, 8192) + 16384


def test_an_order_is_a_value() -> None:
    one, same = Order(n=2000, seed=1, epoch=2), Order(n=2000, seed=1, epoch=2)
    assert one == same and hash(one) == hash(same) and one != Order(n=2000, seed=1, epoch=3)
    assert repr(one) == "Order(n=2000, seed=1, epoch=2)"
    assert len(one) == 2000
    assert np.array_equal(pickle.loads(pickle.dumps(one)).take(0, 9), one.take(0, 9))
    assert list(one) == one.take(0, 2000).tolist()
    small = Order(n=10, seed=0, epoch=0)
    small.take(0, 10)[:] = 0
    small[np.arange(10)][:] = 0
    assert sorted(small.take(0, 10)) == list(range(10))


@pytest.mark.parametrize("n", [10, 60_000])
def test_positions_outside_are_refused(n: int) -> None:
    one = Order(n=n, seed=0, epoch=0)
    for bad in (-1, n, n + 5):
        with pytest.raises(IndexError, match=f"position = {bad} of an epoch of {n} samples"):
            one[bad]
        with pytest.raises(IndexError, match=f"position = {bad} "):
            one[np.array([0, bad, 1])]
        with pytest.raises(IndexError, match=f"sample = {bad} "):
            one.positions(np.array([bad]))
    for start, stop in ((-1, 2), (3, 2), (0, n + 1)):
        with pytest.raises(IndexError, match="0 <= start <= stop <= n"):
            one.take(start, stop)
    with pytest.raises(TypeError, match="float64"):
        one[np.array([0.0])]
    with pytest.raises(TypeError):
        one[1.5]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"n": 0}, "n = 0"),
        ({"n": 2**40 + 1}, "1 to 2\\*\\*40"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = "),
        ({"epoch": -1}, "epoch = -1"),
    ],
)
def test_keys_outside_are_refused(bad: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Order(**({"n": 5, "seed": 0, "epoch": 0} | bad))
