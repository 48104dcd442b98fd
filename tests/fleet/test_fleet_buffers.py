"""Buffers that are no BatchNorm statistics: equal on all workers after each step, as rank 0 has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_fleet import OPTIMIZERS, accuracy, classes, classifier, digest, train
from torch import Tensor, nn

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.testing.threads import Ended, ThreadScript, run_workers


class Counting(nn.Module):
    """Counts its forward passes, and keeps a moving average of what it sees through ``.data``."""

    calls: Tensor
    mean: Tensor
    odd: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = classifier(norm=True, seed=seed)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("replaced", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("constant", torch.arange(1000.0))
        self.register_buffer("cache", torch.zeros(seed + 1), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.odd.logical_not_()
        self.replaced = self.replaced + 1
        return self.inner(x - self.mean)


def life(
    world: Any, *, policy: str = "proportional", evaluate: bool = True, **init: Any
) -> tuple[str, dict[str, Tensor], list[str]]:
    """Train a :class:`Counting`; the whole state's hash, the buffers, and their hash at each commit."""
    model = Counting(getattr(world, "number", 0))
    fleet = shoal.init(
        model, OPTIMIZERS["sgd"](model.parameters()), world=world, batch_policy=policy, **init
    )
    trace: list[str] = []
    for _ in fleet.epochs(2):
        for x, y in fleet.batches(classes(36), local_batch=4, micro_batch=2):
            fleet.backward(F.cross_entropy(model(x), y))
            if fleet.step():
                trace.append(digest(dict(model.named_buffers())["calls"]))
        if evaluate:
            fleet.evaluate(classes(9), accuracy, local_batch=2)
    state = digest(fleet._replica.snapshot())
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    fleet.close()
    return state, buffers, trace


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("policy", ["proportional", "constant:4"])
def test_all_workers_hold_what_the_first_one_has_counted(workers: int, policy: str) -> None:
    """Evaluation does not count; a worker without samples follows."""
    results: list[Any] = run_workers(workers, lambda world: life(world, policy=policy))
    assert len({state for state, _, _ in results}) == 1
    buffers = results[0][1]
    steps = 2 * -(-36 // (4 * workers if policy == "proportional" else 4))
    pieces = {2: 18, 3: 12}[workers] if policy == "proportional" else steps
    assert int(buffers["calls"]) == pieces
    assert buffers["replaced"].tolist() == [float(pieces)] * 2
    assert buffers["odd"].tolist() == [bool(pieces % 2)] * 3
    assert torch.equal(buffers["constant"], torch.arange(1000.0))
    assert [len(r[1]["cache"]) for r in results] == list(range(1, workers + 1)), (
        "caches are their own"
    )


@pytest.mark.parametrize("policy", ["proportional", "constant:12"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_virtual_workers_are_like_real_ones(workers: int, policy: str) -> None:
    """Each of them begins a step with what was agreed, and the first one's values count."""
    _, virtual, _ = life(VirtualWorld(workers), policy=policy)
    real: list[Any] = run_workers(workers, lambda world: life(world, policy=policy))
    for name in ("calls", "odd", "replaced", "mean"):
        torch.testing.assert_close(virtual[name], real[0][1][name], rtol=1e-5, atol=1e-6)


def test_nothing_is_added_to_a_model_without_them() -> None:
    run = train(model=classifier(norm=True), close=False)
    assert run.fleet._stepper.buffers.slots == 0
    run.fleet.close()


def shapes(make: Callable[[int], nn.Module]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def worker(world: Any) -> None:
        reduce = world.all_reduce

        def all_reduce(tensor: Tensor) -> Any:
            if world.number == 0:
                seen.append((tuple(tensor.shape), tensor.dtype))
            return reduce(tensor)

        world.all_reduce = all_reduce
        train(world, model=make(world.number), data=classes(16), local_batch=8, epochs=1)

    run_workers(2, worker)
    return seen


class Constant(nn.Module):
    """A large buffer that nothing changes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = classifier(seed=seed)
        self.register_buffer("mask", torch.ones(1000, 100, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_buffer_that_does_not_change_does_not_travel() -> None:
    plain = shapes(lambda seed: classifier(seed=seed))
    constant = shapes(Constant)
    assert [kind for _, kind in plain] == [kind for _, kind in constant]
    assert constant[0][0][0] - plain[0][0][0] == 1, "one mark in the header"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    joins=st.dictionaries(st.integers(2, 3), st.integers(1, 12), max_size=2),
    failures=st.dictionaries(
        st.integers(0, 14), st.sets(st.integers(0, 3), min_size=1), max_size=4
    ),
    kill=st.none() | st.integers(1, 10),
    policy=st.sampled_from(["proportional", "constant:4"]),
)
def test_equal_under_joins_kills_and_failures(
    joins: dict[int, int], failures: dict[int, set[int]], kill: int | None, policy: str
) -> None:
    script = ThreadScript(joins=joins, failures=failures, kills={} if kill is None else {0: kill})
    results = run_workers(4, lambda world: life(world, policy=policy), script)
    ended: list[Any] = [r for r in results if not isinstance(r, Ended)]
    assert len({state for state, _, _ in ended}) == 1
    for name in ("calls", "mean", "odd", "replaced"):
        assert all(torch.equal(ended[0][1][name], other[1][name]) for other in ended)


def test_a_step_that_is_not_committed_is_not_counted() -> None:
    script = [VirtualEvent(kind="kill", at_step=2), VirtualEvent(kind="join", at_step=4)]
    _, buffers, trace = life(VirtualWorld(3, script), policy="constant:12")
    # Six micro-batches a step: rank 0 of three has two of them, of two three; step 2 is tried twice.
    assert int(buffers["calls"]) == 2 + 2 + 3 + 3 + 2 + 2
    assert len(trace) == 6


def test_a_checkpoint_holds_them(tmp_path: Path) -> None:
    whole = life(VirtualWorld(2))
    model = Counting()
    fleet = shoal.init(
        model, OPTIMIZERS["sgd"](model.parameters()), world=VirtualWorld(2), run_dir=tmp_path
    )
    for _ in fleet.epochs(2):
        for x, y in fleet.batches(classes(36), local_batch=4, micro_batch=2):
            fleet.backward(F.cross_entropy(model(x), y))
            fleet.step()
            if fleet.step_count == 3:
                break
    fleet.close()
    resumed = life(VirtualWorld(2), run_dir=tmp_path, resume=True)
    for name in ("calls", "mean", "odd", "replaced"):
        assert torch.equal(whole[1][name], resumed[1][name])


@pytest.mark.parametrize("who", [0, 1])
def test_what_the_loop_itself_changes_is_kept_or_made_good(who: int) -> None:
    """By one worker alone, between two steps: it counts where it is the first rank's, else it goes."""

    def worker(world: Any) -> list[float]:
        model = nn.Linear(6, 3)
        model.register_buffer("heat", torch.ones(()))
        fleet = shoal.init(model, OPTIMIZERS["sgd"](model.parameters()), world=world)
        seen: list[float] = []
        for _ in fleet.epochs(1):
            for x, y in fleet.batches(classes(24), local_batch=4):
                fleet.backward(F.cross_entropy(model(x), y))
                fleet.step()
                seen.append(float(model.get_buffer("heat")))
                if world.number == who:
                    model.get_buffer("heat").mul_(0.5)
        fleet.close()
        return seen

    expected = [1.0, 0.5, 0.25] if who == 0 else [1.0, 1.0, 1.0]
    assert run_workers(2, worker) == [expected] * 2


def test_a_buffer_that_changes_its_shape_is_left_alone_aloud(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Growing(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = classifier(seed=seed)
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x[:, 0].detach()])
            return self.inner(x)

    def worker(world: Any) -> int:
        return train(world, model=Growing(world.number), local_batch=4).fleet.samples_seen

    assert run_workers(2, worker) == [200, 200]
    lines = [line for line in capsys.readouterr().err.splitlines() if "seen" in line]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert lines[0].startswith("shoal: buffer seen = ") and "persistent=False" in lines[0]
