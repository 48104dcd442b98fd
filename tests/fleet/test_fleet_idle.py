"""Workers that a batch policy leaves without samples are spoken of, with what would give them some."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_fleet import classes, classifier, train

from shoal import VirtualEvent, VirtualWorld
from shoal.data.shares import shares
from shoal.fleet.batch_policy import idle_workers, micro_batch_for_all
from shoal.fleet.training_checks import batch_checks
from shoal.testing.threads import run_workers


def idle_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "no share" in line]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_how_many_are_idle_and_what_helps(batch: int, micro: int, workers: int) -> None:
    def idle(size: int) -> int:
        return sum(not pieces for pieces in shares(batch, size, workers))

    assert idle_workers(batch, micro, workers) == idle(micro)
    helps = micro_batch_for_all(batch, workers)
    assert (helps == 0) == (batch < workers)
    if helps:
        assert idle(helps) == 0
        assert workers == 1 or helps == batch or idle(helps + 1) > 0


@pytest.mark.parametrize("policy", ["constant:16", "capped:16"])
def test_a_line_for_those_without_a_share(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """16 samples in micro-batches of 8 are two shares for three workers; said once, by one of them."""

    def worker(world: Any) -> int:
        model = classifier(seed=world.number)
        return train(world, model=model, batch_policy=policy, local_batch=8).fleet.samples_seen

    assert run_workers(3, worker) == [200] * 3
    (line,) = idle_lines(capsys.readouterr().err)
    assert line == (
        "shoal: 1 of 3 workers has no share of a step; a global batch of 16 samples is 2 micro-batches "
        "of at most 8; pass micro_batch=7 or smaller to fleet.batches to give all workers a share"
    )
    run_workers(2, worker)
    assert idle_lines(capsys.readouterr().err) == []


def test_a_short_last_step_is_nothing_to_speak_of(capsys: pytest.CaptureFixture[str]) -> None:
    train(VirtualWorld(4), data=classes(33), local_batch=8, micro_batch=8)
    assert idle_lines(capsys.readouterr().err) == []


def test_it_is_said_again_for_another_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """Not for one that has been spoken of; below one sample a worker no micro-batch helps."""
    script = [
        VirtualEvent(kind="join", workers=2, at_step=2),
        VirtualEvent(kind="leave", workers=2, at_step=4),
        VirtualEvent(kind="join", workers=2, at_step=6),
        VirtualEvent(kind="join", workers=1, at_step=8),
    ]
    train(VirtualWorld(2, script), batch_policy="constant:4", local_batch=2)
    first, second = idle_lines(capsys.readouterr().err)
    assert first.startswith("shoal: 2 of 4 workers have no share")
    assert first.endswith("pass micro_batch=1 to fleet.batches to give all workers a share")
    assert second.startswith("shoal: 3 of 5 workers have no share")
    assert second.endswith(
        "run at most 4 workers with micro_batch=1, or pass a larger global batch"
    )


def test_the_doctor_says_it_too() -> None:
    config = {
        "local_batch": 8,
        "micro_batch": 8,
        "workers": 3,
        "samples": 100,
        "batch_policy": {"name": "constant", "samples": 16},
    }
    (found,) = [c for c in batch_checks(config) if c.name == "samples per worker"]
    assert found.value == "1 of 3 workers have none"
    assert found.fix == "pass micro_batch=7 or smaller to fleet.batches to give all workers a share"
    few = {**config, "workers": 20}
    (found,) = [c for c in batch_checks(few) if c.name == "samples per worker"]
    assert found.fix == "run at most 16 workers with micro_batch=1, or pass a larger global batch"
