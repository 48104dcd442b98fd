"""Rounds of both triggers, against a count of steps one by one."""

import heapq
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from shoal.errors import UsageError
from shoal.world.virtual.clock import Pace, WorkerClock
from shoal.world.virtual.triggers import Running, fixed, total_count


def workers_of(slowdowns, *, pace, starts=None, until=None):
    return {
        n: Running(
            clock=WorkerClock(pace, worker=n, slowdown=slowdown),
            start=(starts or {}).get(n, 0.0),
            done=0,
            until=(until or {}).get(n, math.inf),
        )
        for n, slowdown in enumerate(slowdowns)
    }


def counted_one_by_one(workers, target):
    """The same rule with a queue of single steps."""
    queue, done, killed = [], dict.fromkeys(workers, 0), set()
    ends = {n: w.clock.ends(w.start, first=w.done, steps=4000).tolist() for n, w in workers.items()}
    for n in workers:
        heapq.heappush(queue, (ends[n][0], n))
    total, due = 0, None
    while queue:
        time, n = heapq.heappop(queue)
        if due is not None and time > due:
            heapq.heappush(queue, (time, n))
            break
        if time > workers[n].until:
            killed.add(n)
            continue
        done[n] += 1
        total += 1
        if total == target:
            due = time
        heapq.heappush(queue, (ends[n][done[n]], n))
    for n, w in workers.items():
        at_rest = done[n] and ends[n][done[n] - 1] == due
        if n not in killed and not at_rest:
            if ends[n][done[n]] > w.until:
                killed.add(n)
            else:
                done[n] += 1
    return done, killed


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    slowdowns=st.lists(st.sampled_from([0.25, 1.0, 1.0, 4.0]), min_size=1, max_size=6),
    jitter=st.sampled_from([0.0, 0.1]),
    target=st.integers(1, 90),
    until=st.dictionaries(st.integers(0, 5), st.floats(0.1, 60.0), max_size=3),
)
def test_total_count_is_what_counting_steps_one_by_one_gives(slowdowns, jitter, target, until):
    workers = workers_of(slowdowns, pace=Pace(step_seconds=1.0, jitter=jitter), until=until)
    hypothesis.assume(any(w.until == math.inf for w in workers.values()))
    found = total_count(workers, target)
    done, killed = counted_one_by_one(workers, target)
    assert {n: s.steps for n, s in found.items()} == done
    assert {n for n, s in found.items() if s.killed} == killed


def test_total_count_waits_for_the_running_batch_only():
    found = total_count(workers_of([1.0, 1.0, 10.0], pace=Pace(step_seconds=1.0, jitter=0.0)), 15)
    assert [found[n].steps for n in range(3)] == [8, 8, 1]
    assert [found[n].stop for n in range(3)] == [8.0, 8.0, 10.0]


def test_equal_workers_without_jitter_do_exactly_the_period():
    found = total_count(workers_of([1.0] * 4, pace=Pace(step_seconds=1.0, jitter=0.0)), 4 * 16)
    assert {s.steps for s in found.values()} == {16}


def test_fixed_gives_everyone_its_own_steps_and_a_killed_one_those_it_lived_for():
    pace = Pace(step_seconds=1.0, jitter=0.0)
    found = fixed(workers_of([1.0, 3.0, 1.0], pace=pace, until={2: 2.5}), 4)
    assert [found[n].steps for n in range(3)] == [4, 4, 2]
    assert [found[n].stop for n in range(3)] == [4.0, 12.0, 2.5]
    assert [found[n].killed for n in range(3)] == [False, False, True]


def test_a_fleet_that_dies_before_its_target_is_told():
    workers = workers_of([1.0], pace=Pace(step_seconds=1.0, jitter=0.0), until={0: 3.5})
    with pytest.raises(UsageError, match="killed after 3"):
        total_count(workers, 10)


@pytest.mark.parametrize("slowdown", [1.0, 2.0, 4.0])
def test_idle_shares_are_those_of_the_notes(slowdown):
    """16 workers, period 64, 50 ms steps, one slow: fixed .024/.465/.701, total-count .008/.011/.021."""
    expected = {1.0: (0.024, 0.008), 2.0: (0.465, 0.011), 4.0: (0.701, 0.021)}[slowdown]
    for which, rule in enumerate(("fixed", "total-count")):
        waited = worked = 0.0
        workers = workers_of([1.0] * 15 + [slowdown], pace=Pace(step_seconds=0.05, seed=3))
        carried = 0
        for _ in range(12):
            if rule == "fixed":
                found = fixed(workers, 64)
            else:
                found = total_count(workers, 16 * 64 - carried)
                carried += sum(s.steps for s in found.values()) - 16 * 64
            over = max(s.stop for s in found.values())
            waited += sum(over - s.stop for s in found.values())
            worked += sum(s.stop - workers[n].start for n, s in found.items())
            workers = {
                n: Running(clock=w.clock, start=over, done=w.done + found[n].steps)
                for n, w in workers.items()
            }
        assert waited / (waited + worked) == pytest.approx(expected[which], abs=0.006)
