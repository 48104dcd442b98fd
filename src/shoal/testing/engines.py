"""A conformance suite for engines: hand it your own engine before you train a study with it.

    from shoal.testing.engines import check_engine

    def test_my_engine() -> None:
        check_engine(MyEngine, task)

It holds the engine to ``shoal.study.engines.contract``: a trial's weights are those of the plain loop, and
bit for bit a function of that trial alone. Each check is also callable on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.study.engines.contract import Engine, SavedTrial
from shoal.study.engines.equality import (
    TOLERANCE,
    copied,
    largest_difference,
    same_bits,
    trained,
    trials_of,
)
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.records import Trial

MakeEngine = Callable[[Task], Engine]

STEPS = 4
"""After which they are compared: training is chaotic, and later the smallest difference has grown."""


def check_engine(make: MakeEngine, task: Task, *, trials: int = 5) -> None:
    """All checks.

    Args:
        make: builds an engine for a task; called several times.
        task: on which it is tried.
        trials: how many, >= 2; more than a stack's rows exercises the exchange.

    Raises:
        AssertionError: the engine breaks the contract; the text says where.
    """
    check_names_and_refusals(make, task)
    check_equals_plain_loop(make, task, trials_of(task, trials))
    check_outputs(make, task, trials_of(task, trials))
    check_cut_of_calls(make, task, trials_of(task, trials))
    check_company(make, task, trials_of(task, trials))
    check_save_and_restore(make, task, trials_of(task, trials))
    check_diverging_neighbour(make, task, trials_of(task, trials))
    check_uneven_lengths(make, task, trials_of(task, trials))


def check_names_and_refusals(make: MakeEngine, task: Task) -> None:
    """Names are the module's, weights at step 0 the seed's, and a trial is admitted once."""
    engine, (trial, other) = make(task), trials_of(task, 2)
    engine.admit(trial)
    model = task.initial(trial.seed)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    assert same_bits(engine.weights(trial.id), copied(expected)), (
        "weights at step 0 differ from a model built from the seed"
    )
    assert engine.step(trial.id) == 0 and all(map(math.isnan, engine.losses(trial.id)))
    try:
        engine.admit(trial)
    except ValueError:
        pass
    else:
        raise AssertionError("a trial was admitted twice; ValueError is due")
    engine.advance({trial.id: 0})
    assert engine.step(trial.id) == 0, "advance to where a trial is must leave it alone"
    engine.admit(other)
    portions = engine.portions([trial.id, other.id])
    assert sorted(n for portion in portions for n in portion) == sorted([trial.id, other.id]), (
        "portions must hold each trial once"
    )


def check_equals_plain_loop(
    make: MakeEngine, task: Task, trials: Sequence[Trial], *, steps: int = STEPS
) -> None:
    """Parameters, buffers and losses are the plain loop's up to rounding."""
    engine, plain = make(task), PoolEngine(task)
    ours, theirs = trained(engine, trials, steps), trained(plain, trials, steps)
    for number, weights in theirs.items():
        difference, name = largest_difference(ours[number], weights)
        assert difference <= TOLERANCE, (
            f"{name} of trial {number} differs from the plain loop by {difference:.1e} after {steps} steps"
        )
        assert engine.step(number) == steps
        for mine, plains in zip(engine.losses(number), plain.losses(number), strict=True):
            close = math.isclose(mine, plains, rel_tol=1e-4, abs_tol=1e-6)
            assert close or not (math.isfinite(mine) or math.isfinite(plains)), (
                f"trial {number} has the losses {engine.losses(number)}, not {plain.losses(number)}"
            )


def check_outputs(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """Outputs, where the engine gives them, are the models', whoever else is asked, and leave no trace."""
    engine = make(task)
    weights = trained(engine, trials, STEPS)
    inputs = task.workload.split("val")[0].to(task.device)
    for asked in (list(weights), [trials[-1].id], [trial.id for trial in reversed(trials)][:2]):
        found = engine.outputs(asked, inputs)
        if found is None:
            continue
        for number, output in zip(asked, found.unbind(0), strict=True):
            model = task.initial(0).eval()
            with torch.no_grad():
                expected = torch.func.functional_call(model, weights[number], (inputs,))
            difference, _ = largest_difference({"outputs": output}, {"outputs": expected})
            assert difference <= TOLERANCE, f"outputs of trial {number} differ by {difference:.1e}"
    for trial in trials:
        assert same_bits(engine.weights(trial.id), weights[trial.id]), (
            f"asking for outputs touched trial {trial.id}"
        )


def check_cut_of_calls(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """One call of nine steps equals nine of one, and others in between."""
    whole = trained(make(task), trials, 9)
    for cuts in (range(1, 10), (2, 9), (5, 6, 9)):
        engine = make(task)
        for trial in trials:
            engine.admit(trial)
        for step in cuts:
            engine.advance({trial.id: step for trial in trials})
        for trial in trials:
            assert same_bits(engine.weights(trial.id), whole[trial.id]), (
                f"trial {trial.id} depends on how its steps were cut into calls, here {list(cuts)}"
            )


def check_company(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """A trial's bits do not depend on its slot, its neighbours, or how many there are."""
    together = trained(make(task), trials, STEPS)
    backwards = trained(make(task), list(reversed(trials)), STEPS)
    for number, weights in together.items():
        assert same_bits(backwards[number], weights), f"trial {number} depends on its slot"
    for count in range(1, len(trials)):
        fewer = trained(make(task), trials[:count], STEPS)
        for number, weights in fewer.items():
            assert same_bits(weights, together[number]), (
                f"trial {number} depends on its company: {count} trials or {len(trials)}"
            )
    one_by_one = make(task)
    for trial in trials:
        one_by_one.admit(trial)
    for trial in reversed(trials):
        one_by_one.advance({trial.id: STEPS})
    for trial in trials:
        assert same_bits(one_by_one.weights(trial.id), together[trial.id]), (
            f"trial {trial.id} was touched while others were advanced, or depends on them"
        )


def check_save_and_restore(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """A trial that was saved, and goes on in another engine and slot, ends bit for bit the same."""
    straight = make(task)
    final = trained(straight, trials, 8)
    for pause in (0, 3):
        first = make(task)
        trained(first, trials, pause)
        saved = {trial.id: first.save(trial.id) for trial in trials}
        kept = {n: copied(s.tensors) for n, s in saved.items()}
        first.advance({trial.id: 8 for trial in trials})
        second = make(task)
        for trial in reversed(trials):
            _check_saved(saved[trial.id], kept[trial.id], pause)
            second.admit(trial, saved[trial.id])
            assert second.step(trial.id) == pause
            assert _same_numbers(
                second.losses(trial.id), (saved[trial.id].first_loss, saved[trial.id].recent_loss)
            ), "losses are not restored"
        second.advance({trial.id: 8 for trial in trials})
        for trial in trials:
            for engine, what in ((first, "saving"), (second, "restoring")):
                assert same_bits(engine.weights(trial.id), final[trial.id]), (
                    f"{what} trial {trial.id} at step {pause} changed what followed"
                )
            assert _same_numbers(second.losses(trial.id)[:1], straight.losses(trial.id)[:1])


def _check_saved(saved: SavedTrial, kept: Mapping[str, Tensor], step: int) -> None:
    assert saved.step == step
    for name, tensor in saved.tensors.items():
        assert name.startswith(("p/", "b/", "o/")), f"{name} is not named p/, b/ or o/"
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a view, not a copy"
    assert same_bits(saved.tensors, kept), "a saved trial changed when training went on"


def _same_numbers(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))


def check_diverging_neighbour(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """A trial whose numbers overflow is seen by its losses and touches no other trial."""
    alone = trained(make(task), trials, STEPS)
    wild = Trial(
        search=trials[0].search,
        id=1 + max(trial.id for trial in trials),
        unit=trials[0].unit,
        parameters={**trials[0].parameters, "lr": 1e35},
        seed=1,
        address="f" * 16,
    )
    engine = make(task)
    middle = len(trials) // 2
    beside = trained(engine, [*trials[:middle], wild, *trials[middle:]], STEPS)
    assert not math.isfinite(engine.losses(wild.id)[1]), (
        f"a learning rate of 1e35 left the loss at {engine.losses(wild.id)[1]}"
    )
    assert math.isfinite(engine.losses(wild.id)[0])
    for trial in trials:
        assert same_bits(beside[trial.id], alone[trial.id]), (
            f"trial {trial.id} was touched by a neighbour that diverged"
        )
    engine.release(wild.id)
    engine.admit(wild)
    model = task.initial(wild.seed)
    again = engine.weights(wild.id)
    assert same_bits(
        {n: again[n] for n, _ in model.named_parameters()}, copied(dict(model.named_parameters()))
    ), "a released slot was not cleaned"


def check_uneven_lengths(make: MakeEngine, task: Task, trials: Sequence[Trial]) -> None:
    """Trials that end at different steps, leave and are followed by others, all get their own result."""
    lengths = {trial.id: 1 + 3 * (trial.id % 3) + trial.id // 3 for trial in trials}
    expected = {t.id: trained(make(task), [t], lengths[t.id])[t.id] for t in trials}
    engine = make(task)
    for trial in trials:
        engine.admit(trial)
    engine.advance(lengths)
    for trial in trials:
        assert same_bits(engine.weights(trial.id), expected[trial.id]), (
            f"trial {trial.id} of {lengths[trial.id]} steps among uneven ones"
        )
    late = trials_of(task, len(trials), first=100)
    engine = make(task)
    for trial in trials:
        engine.admit(trial)
    for number, (old, new) in enumerate(zip(trials, late, strict=True)):
        engine.advance({old.id: lengths[old.id]})
        assert same_bits(engine.weights(old.id), expected[old.id])
        engine.release(old.id)
        engine.admit(new)
        engine.advance({entry.id: 2 for entry in late[: number + 1]})
    followed = trained(make(task), late, 2)
    for trial in late:
        assert same_bits(engine.weights(trial.id), followed[trial.id]), (
            f"trial {trial.id} took a slot over and differs"
        )
