"""All members make the same reductions in an exchange, whoever is new, idle, leaving or retrying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_fleet import OPTIMIZERS, accuracy, classes, classifier, digest

import shoal
from shoal.fleet.batch_policy import Constant
from shoal.fleet.plan import Batching
from shoal.testing.threads import Ended, ThreadScript, run_workers
from shoal.world.contract import Membership

Sent = dict[int, dict[int, list[tuple[tuple[int, ...], torch.dtype]]]]


def listening(world: Any, sent: Sent) -> Any:
    """``world``, whose reductions are noted in ``sent``: exchange -> worker -> shapes and dtypes."""
    reduce = world.all_reduce

    def all_reduce(tensor: torch.Tensor) -> Any:
        work = reduce(tensor)
        row = sent.setdefault(world.exchange, {}).setdefault(world.number, [])
        row.append((tuple(tensor.shape), tensor.dtype))
        return work

    world.all_reduce = all_reduce
    return world


def life(world: Any, sent: Sent, breaks: tuple[int, int] | None = None) -> tuple[str, int]:
    """Train with clipping on a batch of two micro-batches; ``breaks``: (worker, step) of a break."""
    model = classifier(norm=True, seed=world.number)
    fleet = shoal.init(
        model,
        OPTIMIZERS["heavy_ball"](model.parameters()),
        world=listening(world, sent),
        batch_policy="constant:4",
    )
    for _ in fleet.epochs(2):
        for x, y in fleet.batches(classes(22), local_batch=4, micro_batch=2):
            if breaks == (world.number, fleet.step_count):
                break
            fleet.backward(F.cross_entropy(model(x), y))
            fleet.clip_grad_norm_(0.1)
            fleet.step()
        fleet.evaluate(classes(9), accuracy, local_batch=2)
    seen, state = fleet.samples_seen, digest(dict(model.state_dict()))
    fleet.close()
    return state, seen


def check_alike(sent: Sent, failed: set[int]) -> None:
    """Members that saw no failure made the same reductions, in number, shape and type."""
    for exchange, rows in sent.items():
        if exchange not in failed:
            assert len({tuple(row) for row in rows.values()}) == 1, (exchange, rows)


def test_a_void_step_is_void_for_those_who_clip() -> None:
    """One breaks; the others have asked for the clipped gradient before they commit, or are idle."""
    sent: Sent = {}
    results: list[Any] = run_workers(3, lambda world: life(world, sent, breaks=(1, 2)))
    check_alike(sent, set())
    assert results[0] == results[2] and results[0][1] == 44
    assert results[1][1] == 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    joins=st.dictionaries(st.integers(2, 3), st.integers(1, 20), max_size=2),
    failures=st.dictionaries(
        st.integers(0, 24), st.sets(st.integers(0, 3), min_size=1), max_size=4
    ),
    leave=st.none() | st.integers(1, 20),
)
def test_joins_retries_and_leaves_agree_on_every_reduction(
    joins: dict[int, int], failures: dict[int, set[int]], leave: int | None
) -> None:
    """The reduction about clipping among them, which only steps with an idle worker have."""
    script = ThreadScript(
        joins=joins, failures=failures, leaves={} if leave is None else {0: leave}
    )
    sent: Sent = {}
    results = run_workers(4, lambda world: life(world, sent), script)
    check_alike(sent, set(failures))
    ended = [r for r in results if not isinstance(r, Ended)]
    assert len(set(ended)) == 1 and ended[0][1] == 44


@given(
    cursor=st.integers(0, 200),
    workers=st.integers(1, 9),
    micro=st.integers(1, 5),
    batch=st.integers(1, 40),
)
def test_whether_somebody_is_idle_does_not_depend_on_who_asks(
    cursor: int, workers: int, micro: int, batch: int
) -> None:
    cut = Batching(policy=Constant(batch), samples=37, local_batch=5, micro_batch=micro)
    names = tuple(f"w{i}" for i in range(workers))
    plans = [cut.plan(cursor, Membership(names, (rank,), "t")) for rank in range(workers)]
    common = {(p.start, p.stop, p.nominal, p.rounds, p.someone_idle) for p in plans}
    assert len(common) == 1
    assert plans[0].someone_idle == any(not p.pieces for p in plans)
    assert plans[0].pieces, "the first rank has samples in every step"


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {1, 2}])
def test_the_reduction_about_clipping_fails_for_some(failing: set[int]) -> None:
    """In exchange 2, just after worker 2 has come in: those that commit heal the others."""
    sent: Sent = {}
    script = ThreadScript(joins={2: 2}, failures={2: failing})
    results = run_workers(3, lambda world: life(world, sent), script)
    check_alike(sent, {2})
    assert len(set(results)) == 1 and results[0][1] == 44  # type: ignore[index]
