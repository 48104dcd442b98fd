"""Cursor and shares: who takes which positions, with the known answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import (
    MicroBatch,
    epoch_end,
    epoch_of,
    offset_of,
    share,
    shares,
    step_span,
    steps_left,
)


@pytest.mark.parametrize(
    ("samples", "micro_batch", "workers", "expected"),
    [
        (16, 4, 1, [16]),
        (16, 4, 2, [8, 8]),
        (16, 4, 3, [8, 4, 4]),
        (16, 4, 4, [4, 4, 4, 4]),
        (10, 4, 2, [8, 2]),
        (10, 4, 4, [4, 4, 2, 0]),
        (0, 4, 3, [0, 0, 0]),
        (1, 4, 2, [1, 0]),
        (3, 1, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_known_shares(samples: int, micro_batch: int, workers: int, expected: list[int]) -> None:
    dealt = shares(samples, micro_batch, workers)
    assert [sum(len(m) for m in one) for one in dealt] == expected


def test_the_short_micro_batch_is_the_last() -> None:
    assert shares(10, 4, 2) == [[MicroBatch(0, 4), MicroBatch(4, 8)], [MicroBatch(8, 10)]]


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 12))
def test_shares_cover_once_in_order(samples: int, micro_batch: int, workers: int) -> None:
    dealt = shares(samples, micro_batch, workers)
    assert len(dealt) == workers
    flat = [m for one in dealt for m in one]
    assert [i for m in flat for i in range(m.start, m.stop)] == list(range(samples))
    assert all(len(m) == micro_batch for m in flat[:-1])
    assert all(1 <= len(m) <= micro_batch for m in flat)
    numbers = [len(one) for one in dealt]
    assert max(numbers) - min(numbers) <= 1
    assert numbers == sorted(numbers, reverse=True)
    assert dealt == [share(samples, micro_batch, workers, rank) for rank in range(workers)]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12))
def test_micro_batches_do_not_depend_on_the_workers(
    samples: int, micro_batch: int, workers: int
) -> None:
    flat = [m for one in shares(samples, micro_batch, workers) for m in one]
    assert flat == shares(samples, micro_batch, 1)[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1, 4, 2, 0), "samples = -1"),
        ((4, 0, 2, 0), "micro_batch = 0"),
        ((4, 4, 0, 0), "workers = 0"),
        ((4, 4, 2, 2), "rank = 2"),
        ((4, 4, 2, -1), "rank = -1"),
    ],
)
def test_shares_refuse(arguments: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        share(*arguments)


@given(st.integers(1, 200), st.data())
def test_steps_walk_through_the_epochs(n: int, data: st.DataObject) -> None:
    """Whatever the global batch of each step, positions come once each, epoch by epoch."""
    cursor, taken = 0, []
    while cursor < 3 * n:
        global_batch = data.draw(st.integers(max(1, n // 5), 2 * n))
        left = steps_left(cursor, n, global_batch)
        span = step_span(cursor, n, global_batch)
        assert span.start == cursor and 1 <= len(span) <= global_batch
        assert epoch_of(span[-1], n) == epoch_of(cursor, n)
        assert len(span) == global_batch or span.stop == epoch_end(cursor, n)
        assert cursor == epoch_of(cursor, n) * n + offset_of(cursor, n)
        assert (left == 1) == (span.stop == epoch_end(cursor, n))
        taken += list(span)
        cursor = span.stop
    assert taken == list(range(3 * n))


def test_steps_left_counts_the_short_one() -> None:
    assert steps_left(0, 10, 4) == 3
    assert steps_left(10, 10, 5) == 2
    assert steps_left(19, 10, 5) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: epoch_of(-1, 5), "cursor = -1"),
        (lambda: offset_of(0, 0), "n = 0"),
        (lambda: epoch_end(0, -2), "n = -2"),
        (lambda: step_span(0, 5, 0), "global_batch = 0"),
        (lambda: steps_left(0, 5, 0), "global_batch = 0"),
        (lambda: step_span(-3, 5, 1), "cursor = -3"),
    ],
)
def test_cursor_refuses(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
