"""Every sample is trained exactly once an epoch, read from what was learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small_fleet import Counted, Step, check_counts, count

import shoal
from shoal import VirtualEvent, VirtualWorld
from shoal.scaling.contract import At
from shoal.testing.threads import Ended, ThreadScript, run_workers

RULES = [
    shoal.scaling.Unscaled(reference_batch=4),
    shoal.scaling.Linear(reference_batch=4),
    shoal.scaling.SquareRoot(reference_batch=4),
    shoal.scaling.Dynamic(reference_batch=4),
    shoal.scaling.Dynamic(reference_batch=7, ramp_steps=3),
]


def check_rates(run: Counted, rule: Any, policy: Any, local_batch: int, samples: int) -> None:
    """The learning rate of every step is the rule's own, asked of nothing but the committed steps."""
    state: Any = None
    for number in range(1, len(run.steps) + 1):
        seen = run.steps[number]
        at = At(
            step=number - 1,
            samples=seen.start,
            global_batch=policy.global_batch(local_batch, seen.workers),
            momentum=0.0,
            epoch_samples=samples,
        )
        state = rule.advance(rule.init(at) if state is None else state, at)
        assert seen.lr == rule.multiplier(state, at)
        state = rule.commit(state, at, None)


events = st.builds(
    lambda kind, workers, at, by_step: VirtualEvent(
        kind=kind,
        workers=workers,
        at_step=at if by_step else None,
        at_samples=None if by_step else 3 * at,
    ),
    st.sampled_from(["join", "join", "leave", "kill"]),
    st.integers(1, 3),
    st.integers(0, 40),
    st.booleans(),
)
policies = st.one_of(
    st.just(shoal.Proportional()),
    st.integers(1, 40).map(shoal.Constant),
    st.integers(1, 40).map(shoal.Capped),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    samples=st.integers(1, 200),
    workers=st.integers(1, 5),
    local_batch=st.integers(4, 20),
    micro_batch=st.integers(2, 20),
    epochs=st.integers(1, 2),
    script=st.lists(events, max_size=6),
    policy=policies,
    rule=st.sampled_from(RULES),
)
def test_virtual_scripts(
    samples: int,
    workers: int,
    local_batch: int,
    micro_batch: int,
    epochs: int,
    script: list[VirtualEvent],
    policy: Any,
    rule: Any,
) -> None:
    run = count(
        VirtualWorld(workers, script),
        samples=samples,
        epochs=epochs,
        local_batch=local_batch,
        micro_batch=min(micro_batch, local_batch),
        policy=policy,
        scaling=rule,
    )
    check_counts(run, samples)
    check_rates(run, rule, policy, local_batch, samples)
    removed = sum(e.workers for e in script if e.kind != "join")
    if removed < workers:
        assert run.seen == samples * epochs


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    samples=st.integers(1, 60),
    workers=st.integers(2, 4),
    local_batch=st.integers(3, 12),
    micro_batch=st.integers(1, 12),
    policy=policies,
    rule=st.sampled_from(RULES),
    failures=st.dictionaries(
        st.integers(0, 12), st.sets(st.integers(0, 3), min_size=1), max_size=4
    ),
    leave=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 8)),
    kill=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 8)),
    join=st.none() | st.integers(1, 6),
    evaluate=st.booleans(),
)
def test_threads(
    samples: int,
    workers: int,
    local_batch: int,
    micro_batch: int,
    policy: Any,
    rule: Any,
    failures: dict[int, set[int]],
    leave: tuple[int, int] | None,
    kill: tuple[int, int] | None,
    join: int | None,
    evaluate: bool,
) -> None:
    """Real exchanges with failures that one member sees, leaves, kills and joiners."""
    script = ThreadScript(
        failures=failures,
        leaves=dict([leave]) if leave else {},
        kills=dict([kill]) if kill and kill[0] != 0 else {},
        joins={workers: join} if join else {},
    )

    # A step that a worker committed and left with, and the others saw fail, is made again without it.
    lasting: dict[int, Step] = {}
    leaving: dict[int, Step] = {}

    def worker(world: Any) -> Counted:
        goes = world.number in script.leaves or world.number in script.kills
        return count(
            world,
            samples=samples,
            epochs=2,
            local_batch=local_batch,
            micro_batch=min(micro_batch, local_batch),
            policy=policy,
            scaling=rule,
            evaluate=evaluate,
            steps=leaving if goes else lasting,
        )

    results = run_workers(workers + bool(join), worker, script, timeout_seconds=20)
    runs = [result for result in results if not isinstance(result, Ended)]
    assert runs or (script.leaves and script.kills)
    steps = {**leaving, **lasting}
    for run in runs:
        run.steps = dict(sorted(steps.items()))
        assert run.seen == 2 * samples
        check_counts(run, samples)
        check_rates(run, rule, policy, local_batch, samples)
        assert torch.equal(run.weights, runs[0].weights)


def test_resume_with_other_workers_draws_exactly_the_rest() -> None:
    """16 samples, local 4: one step with 1 worker, then 2 workers."""
    run = count(VirtualWorld(1, [VirtualEvent(kind="join", at_step=1)]), samples=16, local_batch=4)
    assert [s.stop for s in run.steps.values()] == [4, 12, 16]
    check_counts(run, 16)


def test_after_a_leave_the_next_draw_starts_at_the_committed_cursor() -> None:
    """2 workers, local 2, one leaves after 4 committed steps: the next draw starts at position 16."""
    run = count(VirtualWorld(2, [VirtualEvent(kind="leave", at_step=4)]), samples=20, local_batch=2)
    assert [s.stop for s in run.steps.values()] == [4, 8, 12, 16, 18, 20]
    check_counts(run, 20)


@pytest.mark.parametrize(
    ("policy", "batches"),
    [("constant:24", {24}), ("proportional", {24, 16})],
)
def test_global_batch_under_a_script(policy: str, batches: set[int]) -> None:
    """Workers 3, 2, 3 from steps 0, 40 and 80: constant keeps 24, proportional goes 24, 16, 24."""
    world = VirtualWorld(
        3, [VirtualEvent(kind="leave", at_step=40), VirtualEvent(kind="join", at_step=80)]
    )
    run = count(world, samples=24 * 200, local_batch=8, policy=policy, until=100)
    sizes = [step.stop - step.start for step in run.steps.values()]
    assert set(sizes) == batches
    if policy == "proportional":
        assert sizes[:40] == [24] * 40 and sizes[40:80] == [16] * 40 and sizes[80:] == [24] * 20


def test_multiplier_is_the_same_bits_at_equal_workers() -> None:
    """Workers 4, 2, 8, 4, and a start at 2 that goes to 4, once the ramps have ended."""
    rule = shoal.scaling.Dynamic(reference_batch=3)
    script = [
        VirtualEvent(kind="leave", workers=2, at_step=5),
        VirtualEvent(kind="join", workers=6, at_step=40),
        VirtualEvent(kind="leave", workers=4, at_step=90),
    ]
    run = count(VirtualWorld(4, script), samples=4000, local_batch=5, scaling=rule, until=140)
    other = count(
        VirtualWorld(2, [VirtualEvent(kind="join", workers=2, at_step=3)]),
        samples=4000,
        local_batch=5,
        scaling=rule,
        until=60,
    )
    assert run.steps[3].lr == run.steps[140].lr == other.steps[60].lr == 20 / 3


def test_a_schedule_counts_samples() -> None:
    """Cosine over 6,400 samples, local 8: equal lr at sample 3,200 for 1 and 4 workers."""
    at: dict[int, dict[int, float]] = {}
    for workers in (1, 4):
        run = count(
            VirtualWorld(workers),
            samples=3200,
            epochs=2,
            local_batch=8,
            schedule=shoal.schedules.cosine(floor=0.01),
        )
        at[workers] = {step.start: step.lr for step in run.steps.values()}
    assert at[1][3200] == at[4][3200] == pytest.approx(0.505)
    assert at[1][6400 - 8] == pytest.approx(0.01, abs=1e-4)
    assert at[4][6400 - 32] == pytest.approx(0.01, abs=1e-4)
