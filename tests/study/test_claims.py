"""Claims: one owner at a time, whoever is killed where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.study.claims import ClaimLost, Claims


def test_one_of_many_gets_the_work(tmp_path: Path) -> None:
    claims = [Claims(tmp_path, runner=f"r{i}") for i in range(8)]
    start = threading.Barrier(8)
    got: list[object] = []

    def take(i: int) -> None:
        start.wait()
        got.append(claims[i].take("sgd-b8-r0"))

    threads = [threading.Thread(target=take, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claim is not None for claim in got) == 1


def test_names_that_begin_alike_are_apart(tmp_path: Path) -> None:
    claims = Claims(tmp_path, runner="r")
    assert claims.take("sgd-b1-r1") is not None
    assert claims.take("sgd-b1-r10") is not None
    assert claims.holder("sgd-b1-r100").number == -1


def test_given_back_work_is_taken_under_the_next_number(tmp_path: Path) -> None:
    claims = Claims(tmp_path, runner="r")
    first = claims.take("a")
    assert first is not None and first.number == 0
    assert claims.take("a") is None
    first.release()
    first.release()
    second = claims.take("a")
    assert second is not None and second.number == 1


def test_work_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from shoal.study.claims import Claims\n"
        "assert Claims(Path(sys.argv[1]), runner='killed').take('a')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    claims = Claims(tmp_path, runner="next")
    assert not claims.holder("a").alive
    claim = claims.take("a")
    assert claim is not None and claim.number == 1


def test_a_killed_owner_that_is_not_reaped_counts_as_dead(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.study.claims import Claims\n"
        "assert Claims(Path(sys.argv[1]), runner='killed').take('a')\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "taken\n"
    claims = Claims(tmp_path, runner="next")
    assert claims.take("a") is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert claims.take("a") is not None
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("content", ["", '{"runner": "x", "ho', None])
def test_a_foreign_or_unfinished_claim_ends_with_its_lease(
    tmp_path: Path, content: str | None
) -> None:
    if content is None:
        content = json.dumps(
            {"runner": "x", "host": "elsewhere", "boot": "b", "pid": 1, "born": "2"}
        )
    (tmp_path / "a.0").write_text(content)
    claims = Claims(tmp_path, runner="r", lease_seconds=100)
    assert claims.take("a") is None
    os.utime(tmp_path / "a.0", (0, 0))
    assert claims.take("a") is not None


def test_an_owner_that_was_replaced_finds_out(tmp_path: Path) -> None:
    claims = Claims(tmp_path, runner="r")
    claim = claims.take("a")
    assert claim is not None
    claim.check()
    (tmp_path / "a.1").write_text("{}")
    with pytest.raises(ClaimLost, match="taken over"):
        claim.check()
    claim.release()
    assert (tmp_path / "a.0").exists()


def test_the_lease_is_kept_fresh(tmp_path: Path) -> None:
    claims = Claims(tmp_path, runner="r", lease_seconds=0.2)
    claim = claims.take("a")
    assert claim is not None
    path = tmp_path / "a.0"
    os.utime(path, (0, 0))
    waited = threading.Event()
    for _ in range(200):
        if path.stat().st_mtime > 0:
            break
        waited.wait(0.05)
    assert path.stat().st_mtime > 0
    claim.release()
