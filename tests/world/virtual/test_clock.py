import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.world.virtual.clock import LEAST_FACTOR, EventQueue, Pace, Stall, WorkerClock


def even(**changes):
    return WorkerClock(Pace(step_seconds=1.0, jitter=0.0), worker=0, **changes)


def test_events_come_in_the_order_of_time_and_then_of_putting():
    queue = EventQueue()
    for time, event in [(3.0, "c"), (1.0, "a"), (3.0, "d"), (2.0, "b"), (1.0, "a2")]:
        queue.put(time, event)
    assert [queue.take()[1] for _ in range(5)] == ["a", "a2", "b", "c", "d"]
    assert len(queue) == 0


def test_a_step_takes_as_long_whatever_was_asked_before():
    pace = Pace(step_seconds=0.05, jitter=0.1, seed=7)
    at_once = WorkerClock(pace, worker=2).durations(0, 3000)
    clock = WorkerClock(pace, worker=2)
    pieces = [clock.durations(first, 7).copy() for first in range(0, 2996, 7)]
    assert np.array_equal(np.concatenate(pieces), at_once[: 7 * len(pieces)])
    assert np.array_equal(clock.durations(5, 3), at_once[5:8])


def test_jitter_is_that_of_the_notes_and_each_worker_has_its_own():
    pace = Pace(step_seconds=0.05, jitter=0.1, seed=1)
    drawn = WorkerClock(pace, worker=0, slowdown=4.0).durations(0, 20000) / (0.05 * 4)
    assert abs(drawn.mean() - 1) < 0.005
    assert abs(drawn.std() - 0.1) < 0.005
    other = WorkerClock(pace, worker=1, slowdown=4.0).durations(0, 20000) / (0.05 * 4)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.05
    wide = WorkerClock(Pace(step_seconds=1.0, jitter=2.0), worker=0).durations(0, 1000)
    assert wide.min() == LEAST_FACTOR


def test_a_stall_stretches_the_step_that_runs_through_it_and_delays_one_that_would_begin_in_it():
    clock = even(stalls=[Stall(at_seconds=2.5, seconds=10.0)])
    assert clock.ends(0.0, first=0, steps=4).tolist() == [1.0, 2.0, 13.0, 14.0]
    assert clock.ends(5.0, first=0, steps=2).tolist() == [13.5, 14.5]
    assert clock.ends(12.5, first=0, steps=2).tolist() == [13.5, 14.5]


def test_stalls_add_up():
    stalls = [Stall(at_seconds=3.5, seconds=2.0), Stall(at_seconds=1.5, seconds=1.0)]
    assert even(stalls=stalls).ends(0.0, first=0, steps=3).tolist() == [1.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pace(step_seconds=0.0), "step_seconds = 0"),
        (lambda: Pace(jitter=-0.1), "jitter = -0.1"),
        (lambda: Pace(seed=-1), "seed = -1"),
        (lambda: even(slowdown=0.0), "slowdown = 0"),
        (lambda: Stall(at_seconds=-1.0, seconds=1.0), "stall at_seconds = -1"),
        (lambda: Stall(at_seconds=0.0, seconds=0.0), "seconds = 0"),
    ],
)
def test_a_number_out_of_range_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()
