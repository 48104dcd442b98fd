import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from shoal.data import Order
from shoal.errors import UsageError
from shoal.world.virtual.leases import Leases, Shards

MOVES = st.lists(
    st.tuples(st.sampled_from(["draw", "settle", "drop"]), st.integers(0, 4), st.integers(0, 9)),
    max_size=60,
)


@hypothesis.given(moves=MOVES, lost=st.sampled_from(["discard", "lease again"]))
def test_every_sample_drawn_is_used_or_discarded_or_waits_for_its_round(moves, lost):
    leases = Leases(samples=37, seed=1, block=4, lost=lost)
    for move, worker, count in moves:
        if move == "draw":
            assert len(leases.draw(worker, count)) == count
        elif move == "settle":
            leases.settle([worker])
        else:
            leases.drop(worker)
        assert leases.drawn == leases.used + leases.discarded + leases.pending
    for worker in range(5):
        leases.drop(worker)
    assert leases.drawn == leases.used + leases.discarded


def test_an_epoch_is_seen_once_by_whoever_draws_it():
    leases = Leases(samples=40, seed=3, block=5)
    seen = [leases.draw(worker, 5) for _ in range(2) for worker in (0, 1, 2, 3)]
    assert sorted(np.concatenate(seen).tolist()) == list(range(40))
    assert np.array_equal(seen[0], Order(n=40, seed=3, epoch=0).take(0, 5))


def test_what_a_dead_worker_leased_but_never_drew_goes_to_the_next_one():
    leases = Leases(samples=100, seed=0, block=8)
    leases.draw(0, 3)
    leases.drop(0)
    order = Order(n=100, seed=0, epoch=0)
    assert np.array_equal(leases.draw(1, 5), order.take(3, 8))
    assert (leases.drawn, leases.discarded) == (8, 3)


def test_lost_samples_are_leased_again_if_asked():
    leases = Leases(samples=100, seed=0, block=4, lost="lease again")
    lost = leases.draw(0, 4)
    leases.drop(0)
    assert np.array_equal(leases.draw(1, 4), lost)
    assert (leases.drawn, leases.discarded, leases.pending) == (8, 4, 4)


def test_fixed_shards_are_disjoint_and_each_is_shuffled_anew_every_pass():
    shards = Shards(samples=11, seed=5, workers=3)
    parts = [set(shards.draw(worker, 8).tolist()) for worker in range(3)]
    assert sorted(map(len, parts)) == [3, 4, 4]
    assert set.union(*parts) == set(range(11))
    passes = shards.draw(0, 4), shards.draw(0, 4)
    assert set(passes[0].tolist()) == set(passes[1].tolist()) == parts[0]
    shards.settle([0, 1])
    shards.drop(2)
    assert (shards.drawn, shards.used, shards.discarded, shards.pending) == (32, 24, 8, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Leases(samples=0, seed=0, block=1), "samples, block = 0, 1"),
        (lambda: Leases(samples=1, seed=0, block=1, lost="keep"), "lost = 'keep'"),
        (lambda: Shards(samples=2, seed=0, workers=3), "of 2 samples for 3 workers"),
    ],
)
def test_a_number_out_of_range_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()
