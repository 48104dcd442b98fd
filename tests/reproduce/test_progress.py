"""The line with the time left, on a made-up clock."""

import io

import pytest

from shoal.reproduce.progress import Progress, duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (125, "2 min 05 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_comes_from_work_that_took_time() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, stream=stream, clock=clock)
    assert progress.seconds_left is None
    assert "time left not known yet" in progress.line("start")
    progress.skip(60)
    assert progress.seconds_left is None
    clock.now += 30
    progress.advance(10, "piece")
    assert progress.seconds_left == pytest.approx(90)
    assert stream.getvalue() == ""
    progress.finish_piece("piece")
    assert stream.getvalue() == " 70%  piece  (30 s so far, about 1 min 30 s left)\n"


def test_a_terminal_gets_one_line_rewritten_at_most_twice_a_second() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(10, stream=stream, clock=clock)
    for _ in range(4):
        clock.now += 0.2
        progress.advance(1, "piece")
    assert stream.getvalue().count("\r") == 2
    assert "\n" not in stream.getvalue()
