"""The fork server that process tests stand on."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from shoal.testing import processes
from shoal.testing.processes import ChildFailed, Herd

pytestmark = pytest.mark.processes


def doubled(number: int) -> int:
    print("doubling", number)
    return 2 * number


def refuses() -> None:
    raise ValueError("no thanks")


def echoes() -> None:
    while (heard := processes.hear(20)) != "end":
        processes.tell(heard)


def sleeps() -> None:
    processes.tell(os.getpid())
    time.sleep(60)


def exits() -> None:
    raise SystemExit(75)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def test_result_log_and_status(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        child = herd.start(doubled, 21, name="d")
        assert child.result(30) == 42
        assert child.wait(10) == 0
        assert "doubling 21" in child.log


def test_an_exception_carries_its_text_and_the_log(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        child = herd.start(refuses)
        with pytest.raises(ChildFailed, match="no thanks"):
            child.result(30)
        assert child.wait(10) == 1
        assert "ValueError" in child.log


def test_messages_go_both_ways(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        child = herd.start(echoes)
        child.send({"a": 1})
        child.send([2])
        assert child.message(30) == {"a": 1}
        assert child.message(30) == [2]
        child.send("end")
        assert child.result(30) is None


def test_kill_is_seen_and_is_final(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        child = herd.start(sleeps)
        assert child.message(30) == child.pid
        child.kill()
        assert child.exitcode == -signal.SIGKILL
        with pytest.raises(ChildFailed, match="died"):
            child.result(5)


def test_a_silent_child_is_a_failure(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        child = herd.start(sleeps)
        child.message(30)
        with pytest.raises(ChildFailed, match="in vain"):
            child.message(0.05)
    assert not child.alive


def test_exit_status_and_environment(tmp_path: Path) -> None:
    with Herd(tmp_path, {"SHOAL_TEST_WORD": "fish"}) as herd:
        assert herd.start(environment, "SHOAL_TEST_WORD").result(30) == "fish"
        assert herd.start(exits).wait(30) == 75
        with pytest.raises(ValueError, match="taken"):
            herd.start(exits, name="exits-1")


def imported() -> list[str]:
    return [name for name in (*processes.PRELOAD, "torch.optim") if name not in sys.modules]


def test_a_child_has_everything_imported_that_training_needs(tmp_path: Path) -> None:
    with Herd(tmp_path) as herd:
        assert herd.start(imported).result(30) == []
