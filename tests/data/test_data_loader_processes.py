"""The loader with real loader processes: reading ahead never loses or repeats a sample."""

import contextlib
import multiprocessing
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from shoal.data import Draws, Order, sample_generator, share, step_span

pytestmark = pytest.mark.processes


class Recorded:
    """Samples with noise and the process that read them; every read appends its index to a file."""

    def __init__(self, n: int, log: Path | None = None) -> None:
        self.n = n
        self.log = log

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, object]:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        noise = [
            float(torch.rand(())),
            float(np.random.random()),
            random.random(),
            float(torch.rand((), generator=sample_generator())),
        ]
        return {
            "index": index,
            "noise": torch.tensor(noise, dtype=torch.float64),
            "reader": os.getpid(),
        }


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    left = [child for child in multiprocessing.active_children() if child.pid not in before]
    assert left == []


def children() -> set[int]:
    """All child processes of this one, zombies too."""
    me = str(os.getpid())
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] == me:
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


def run_script(draws: list[Draws], n: int, script: list[tuple[int, int, bool]], micro_batch: int):
    """Train two epochs by a script of (workers, global batch, committed), every rank predicting on."""
    cursor, used, step = 0, [], 0
    while cursor < 2 * n:
        workers, global_batch, committed = script[step % len(script)]
        committed = committed or step > 2 * len(script)
        span = step_span(cursor, n, global_batch)
        drawn = []
        for rank in range(workers):
            spans = micro_batches(cursor, n, global_batch, micro_batch, workers, rank)
            for _ in share(len(span), micro_batch, workers, rank):
                here = next(spans)
                rest = list(spans)
                drawn.append(draws[rank].fetch(*here, lambda rest=rest: rest))
                spans = iter(rest)
        step += 1
        if committed:
            used += [
                (int(i), tuple(v.tolist()))
                for b in drawn
                for i, v in zip(b["index"], b["noise"], strict=True)
            ]
            cursor = span.stop
    return used


def micro_batches(cursor, n, global_batch, micro_batch, workers, rank):
    """This rank's micro-batches from the cursor on, three steps far, if nothing changes."""
    for _ in range(3):
        span = step_span(cursor, n, global_batch)
        for m in share(len(span), micro_batch, workers, rank):
            yield span.start + m.start, span.start + m.stop
        cursor = span.stop


def test_every_sample_once_and_augmented_alike_under_random_scripts() -> None:
    n = 61
    background = [Draws(Recorded(n), seed=1, num_workers=2) for _ in range(3)]
    at_once = [Draws(Recorded(n), seed=1) for _ in range(3)]
    for trial in range(4):
        chance = random.Random(trial)
        script = [
            (chance.randint(1, 3), chance.randint(3, 20), chance.random() < 0.7) for _ in range(30)
        ]
        used = run_script(background, n, script, micro_batch=3)
        assert used == run_script(at_once, n, script, micro_batch=3)
        for epoch in range(2):
            indices = [index for index, _ in used[epoch * n : (epoch + 1) * n]]
            assert indices == Order(n=n, seed=1, epoch=epoch).take(0, n).tolist()
    started = [{p.pid for p in draws._background._children} for draws in background]
    assert all(len(pids) == 2 for pids in started)
    for draws in background:
        draws.close()


def test_the_same_processes_go_on_through_changes_and_epochs() -> None:
    draws = Draws(Recorded(40), seed=0, num_workers=2)
    readers = set()
    for start, stop, ahead in (
        (0, 4, [(4, 8), (8, 12), (12, 16), (16, 20)]),
        (2, 4, [(6, 8), (10, 12)]),  # another membership: nothing that was read ahead fits
        (2, 4, [(6, 8), (10, 12)]),  # not committed, drawn again
        (6, 8, []),  # the end of what can be foretold
        (30, 40, [(40, 44), (44, 48)]),
        (40, 44, [(44, 48)]),  # the next epoch
    ):
        batch = draws.fetch(start, stop, lambda ahead=ahead: ahead)
        epoch = start // 40
        expected = Order(n=40, seed=0, epoch=epoch).take(start - 40 * epoch, stop - 40 * epoch)
        assert batch["index"].tolist() == expected.tolist()
        readers |= set(batch["reader"].tolist())
    assert len(readers) == 2 and os.getpid() not in readers
    draws.close()
    draws.close()


def test_what_was_read_ahead_is_used(tmp_path: Path) -> None:
    """In a steady run, and when a step is drawn again, only what must be is read twice."""
    log = tmp_path / "reads"
    n = 200
    draws = Draws(Recorded(n, log), seed=0, num_workers=2, prefetch=2)
    spans = [(i, i + 5) for i in range(0, n, 5)]
    for k, span in enumerate(spans):
        draws.fetch(*span, lambda k=k: iter(spans[k + 1 :]))
    assert sorted(map(int, log.read_text().split())) == list(range(n))
    draws.close()

    log.unlink()
    draws = Draws(Recorded(n, log), seed=0, num_workers=2, prefetch=2)
    for k in (0, 1, 2, 2, 3, 4, 5):
        draws.fetch(*spans[k], lambda k=k: iter(spans[k + 1 : 6]))
    draws.close()
    order = Order(n=n, seed=0, epoch=0)
    reads = [order.positions(np.array([int(i)]))[0] // 5 for i in log.read_text().split()]
    assert [reads.count(k) // 5 for k in range(6)] == [1, 1, 2, 1, 1, 1]


def test_without_a_forecast_each_batch_still_comes() -> None:
    with Draws(Recorded(30), seed=0, num_workers=2) as draws:
        got = [i for a in range(0, 30, 7) for i in draws.fetch(a, min(a + 7, 30))["index"].tolist()]
    assert got == Order(n=30, seed=0, epoch=0).take(0, 30).tolist()


class Broken(Recorded):
    def __getitem__(self, index: int):
        if index == 3:
            raise OSError(5, "unreadable")
        if index == 4:
            raise Stubborn("cannot", "travel")
        return super().__getitem__(index)


class Stubborn(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def test_the_data_sets_own_error_comes_when_its_turn_comes() -> None:
    n = 12
    order = Order(n=n, seed=0, epoch=0)
    bad, worse = order.positions(np.array([3, 4])).tolist()
    fine = [p for p in range(n) if p not in (bad, worse)]
    with Draws(Broken(n), seed=0, num_workers=2) as draws:
        everything = [(p, p + 1) for p in range(n)]
        for p in fine:  # the bad ones are read ahead and never asked for
            batch = draws.fetch(p, p + 1, lambda p=p: everything[p + 1 :])
            assert batch["index"].tolist() == [order[p]]
        for _ in range(2):
            with pytest.raises(OSError, match="unreadable") as caught:
                draws.fetch(bad, bad + 1)
            assert caught.value.errno == 5
            assert "raised by sample 3 of the data set in epoch 0" in caught.value.__notes__
            assert "__getitem__" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match="cannot be sent") as caught_other:
            draws.fetch(worse, worse + 1)
        assert "Stubborn: cannot" in str(caught_other.value.__cause__)
        assert draws.fetch(fine[0], fine[0] + 1)["index"].tolist() == [order[fine[0]]]


def test_loader_processes_end_with_close_and_leave_no_zombies() -> None:
    before = children()
    draws = Draws(Recorded(30), seed=0, num_workers=2)
    assert children() == before  # nothing starts before it is needed
    draws.fetch(0, 5, lambda: [(5, 10), (10, 15)])
    assert len(children() - before) == 2
    draws.close()
    assert children() - before == set()


def test_dropping_the_loader_ends_its_processes() -> None:
    before = children()
    draws = Draws(Recorded(30), seed=0, num_workers=1)
    draws.fetch(0, 5)
    assert len(children() - before) == 1
    del draws
    assert children() - before == set()


def test_the_training_process_random_state_is_left_alone() -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = float(torch.rand(())), float(np.random.random()), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with Draws(Recorded(30), seed=0, num_workers=2) as draws:
        draws.fetch(0, 5)
    assert (float(torch.rand(())), float(np.random.random()), random.random()) == expected


def test_a_killed_loader_process_is_an_error_and_the_next_fetch_starts_afresh() -> None:
    draws = Draws(Recorded(100), seed=0, num_workers=1)
    reader = int(draws.fetch(0, 5)["reader"][0])
    with pytest.raises(RuntimeError, match=f"pid.*{reader}"):
        # torch raises wherever the training process happens to be when the signal reaches it.
        os.kill(reader, signal.SIGKILL)
        while True:
            draws.fetch(5, 10)
    with contextlib.suppress(RuntimeError):
        draws.fetch(5, 10)  # so the loader itself may only notice now
    batch = draws.fetch(5, 10)
    assert batch["index"].tolist() == Order(n=100, seed=0, epoch=0).take(5, 10).tolist()
    assert reader not in batch["reader"].tolist()
    draws.close()


class Sockets(Recorded):
    """Each sample says how many internet sockets its reader holds."""

    def __getitem__(self, index: int):
        held = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as view:
                    held += view.family == socket.AF_INET
            except OSError:
                continue
        return index, held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux")
def test_a_closed_connection_ends_for_the_peer_though_loader_processes_were_forked() -> None:
    """Else other workers would not notice that this one left its process group, or was killed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs, Draws(Sockets(30), seed=0, num_workers=2) as draws:
            stop = threading.Event()
            bystander = threading.Thread(target=stop.wait)  # forking among threads, as in a fleet
            bystander.start()
            try:
                assert draws.fetch(0, 5, lambda: [(5, 10)])[1].tolist() == [0] * 5
                assert draws.fetch(5, 10)[1].tolist() == [0] * 5
            finally:
                stop.set()
                bystander.join()
            ours.close()
            theirs.settimeout(5)
            assert theirs.recv(1) == b""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's promise is Linux's")
def test_loader_processes_die_with_a_killed_training_process() -> None:
    program = textwrap.dedent(
        """
        import os, time
        from shoal.data import Draws

        class Pids:
            def __len__(self): return 40
            def __getitem__(self, index): return os.getpid()

        draws = Draws(Pids(), seed=0, num_workers=2)
        pids = {p for a in range(0, 40, 4) for p in draws.fetch(a, a + 4).tolist()}
        print(*pids, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        ends = {os.pidfd_open(pid): pid for pid in pids}
        run.kill()
        started = time.monotonic()
        while ends and time.monotonic() - started < 4:  # torch's own watchdog looks every 5 s
            for descriptor in select.select(list(ends), [], [], 0.5)[0]:
                os.close(descriptor)
                del ends[descriptor]
    assert not ends


def first_item(number: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == number
    os.environ["SHOAL_TEST_NUMBER"] = str(number + 1)


class Numbered(Recorded):
    def __getitem__(self, index: int) -> int:
        return int(os.environ.get("SHOAL_TEST_NUMBER", 0))


def test_the_users_own_set_up_runs_in_each_loader_process() -> None:
    with Draws(Numbered(40), seed=0, num_workers=2, worker_init=first_item) as draws:
        got = {v for a in range(0, 40, 4) for v in draws.fetch(a, a + 4).tolist()}
    assert got == {1, 2}


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_other_start_methods(context: str) -> None:
    with Draws(Recorded(20), seed=0, num_workers=1, multiprocessing_context=context) as draws:
        assert (
            draws.fetch(0, 20)["noise"].tolist()
            == Draws(Recorded(20), seed=0).fetch(0, 20)["noise"].tolist()
        )
