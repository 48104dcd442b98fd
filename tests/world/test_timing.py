"""Time limits, and waiting for reductions that may never end."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from shoal.errors import ExchangeFailed, UsageError
from shoal.world.elastic import enrolment, nccl, timing
from shoal.world.elastic.enrolment import Patience
from shoal.world.elastic.nccl import NcclPending, is_wanted
from shoal.world.elastic.reductions import DONE, LostReduction, Reduction
from shoal.world.elastic.timing import Pace, Timing


class Clock:
    """A clock that moves only when told to, or when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        for module in (timing, nccl, enrolment):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(nccl, "sleep", self.pass_seconds)

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def commits(pace: Pace, clock: Clock, *seconds: float) -> None:
    for step in seconds:
        clock.pass_seconds(step)
        pace.committed()


def test_the_limit_follows_the_longest_recent_step(clock: Clock) -> None:
    pace = Pace(
        Timing(exchange_floor_seconds=1.0, exchange_factor=20.0, first_exchange_seconds=9.0)
    )
    assert pace.limit_seconds == 9.0
    commits(pace, clock, 50.0, 1.0, 1.0, 1.0)
    assert pace.limit_seconds == 9.0, "too few steps are known"
    commits(pace, clock, 1.0)
    assert pace.limit_seconds == pytest.approx(20.0)
    commits(pace, clock, 3.0)
    assert pace.limit_seconds == pytest.approx(60.0)
    commits(pace, clock, *[0.01] * 64)
    assert pace.limit_seconds == pytest.approx(1.0), "the floor"


def test_time_spent_otherwise_is_no_step(clock: Clock) -> None:
    pace = Pace(Timing(exchange_floor_seconds=1.0))
    commits(pace, clock, *[0.01] * 6)
    pace.interrupted()
    commits(pace, clock, 500.0, 0.01)
    assert pace.limit_seconds == pytest.approx(1.0)


def test_running_out_of_time_doubles_the_limit(clock: Clock) -> None:
    pace = Pace(Timing(exchange_floor_seconds=1.0))
    commits(pace, clock, *[0.01] * 6)
    pace.timed_out()
    pace.timed_out()
    assert pace.limit_seconds == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("patience_seconds", 0.0, "patience_seconds = 0.0; .* above 0; .* default of 60"),
        ("quorum_every", -1, "quorum_every = -1"),
        ("heartbeat_timeout_seconds", 0.06, "twice heartbeat_seconds = 0.05"),
        ("form_seconds", float("nan"), "form_seconds = nan"),
    ],
)
def test_impossible_times_are_refused(field: str, value: float, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Timing(**{field: value})


def test_patience_lasts_while_waiting_is_sure_to_end_well(clock: Clock) -> None:
    sure = [True]
    patience = Patience(60.0, lambda: sure[0])
    for _ in range(10):
        clock.pass_seconds(59.0)
        assert not patience.is_over()
    sure[0] = False
    clock.pass_seconds(59.0)
    assert not patience.is_over()
    clock.pass_seconds(1.0)
    assert patience.is_over()


class Stream:
    """An event of a stream, passed after some looks at it."""

    def __init__(self, looks: int):
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_reduction_on_a_stream_ends_when_the_stream_has_passed_it(clock: Clock) -> None:
    pending = NcclPending(Stream(5), lambda: False, clock.now + 10)
    pending.wait(timedelta(seconds=1))
    assert pending.is_completed()


def test_a_reduction_on_a_stream_can_be_waited_for_again(clock: Clock) -> None:
    pending = NcclPending(Stream(10**6), lambda: False, clock.now + 10)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="did not end in time"):
            pending.wait(timedelta(seconds=1))
        assert not pending.is_completed()
    assert clock.now == pytest.approx(103.0, abs=0.1)
    with pytest.raises(RuntimeError):
        pending.wait(timedelta(seconds=60))
    assert clock.now == pytest.approx(110.0, abs=0.1), "its own time limit"
    assert pending.is_completed()


def test_what_an_aborted_communicator_leaves_is_no_sum(clock: Clock) -> None:
    aborted = [False]
    pending = NcclPending(Stream(0), lambda: aborted[0], clock.now + 10)
    aborted[0] = True
    assert pending.is_completed()
    with pytest.raises(RuntimeError, match="aborted"):
        pending.wait(timedelta(seconds=1))


def test_the_cpu_needs_no_nccl() -> None:
    assert not is_wanted(torch.device("cpu"))


class Stuck:
    """A reduction that never ends, as Gloo's does that was about to send when its peer went."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class Connections:
    """Connections that break at some time."""

    def __init__(self, lasts: int):
        self.lasts = lasts

    def broken(self) -> bool:
        self.lasts -= 1
        return self.lasts < 0


def test_a_stuck_reduction_is_left_when_its_connections_are_gone() -> None:
    pending = Stuck()
    reduction = Reduction(pending, Connections(7), lambda e: ExchangeFailed(str(e)))  # type: ignore
    with pytest.raises(ExchangeFailed):
        reduction.wait()
    assert pending.waits == 9, "seven looks at good connections, and a last chance"


def test_trivial_reductions() -> None:
    DONE.wait()
    with pytest.raises(ExchangeFailed, match="gone"):
        LostReduction(RuntimeError("gone")).wait()
