"""Whether an engine trains this model as the plain loop does, and each trial for itself.

An engine is accepted for a workload, an optimizer and a batch size only after it was held, on the machine
it is to run on, against the plain loop over a few steps: parameters and buffers within 1e-5. Later steps say
nothing: training is chaotic, and the smallest difference grows. And it is asked, bit for bit, whether a
trial's weights or outputs depend on its row or on how many rows a call takes; only sizes of which they do
not are used.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.study.engines.block import NotStackable
from shoal.study.engines.build import Candidate, build_engine
from shoal.study.engines.contract import Engine
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.records import SearchKey, Trial

TOLERANCE = 1e-5
"""Largest relative difference from the plain loop's parameters and buffers."""
STEPS = 3
"""After which an engine is compared."""
COMPARED = 3
"""Trials that are."""

_PROBED = 256  # samples, as many as an evaluation always takes
_OUTPUTS = "outputs()"
_REASON = 200  # characters; torch's own explanations run to paragraphs
_GOLDEN, _SILVER = 0.7548776662466927, 0.5698402909980532
"""Steps of a low-discrepancy sequence in two dimensions."""


@dataclass(frozen=True)
class Refused:
    """An engine that was not accepted.

    Args:
        reason: one line.
    """

    reason: str


def accepted(task: Task, candidate: Candidate) -> Candidate | Refused:
    """The candidate with the sizes it may use, or why it was refused.

    Args:
        task: what is to be trained.
        candidate: engine and slots; its sizes are found here.
    """
    sizes = sizes_of(candidate.slots)
    try:
        trials = trials_of(task, candidate.slots, reach=0.5)
        engine = build_engine(task, replace(candidate, sizes=(candidate.slots,)))
        full = _with_outputs(task, engine, trained(engine, trials, STEPS))
        reason = _unlike_plain(task, trials[:COMPARED], full)
        if reason is not None:
            return Refused(reason)
        # Each smaller stack is filled from behind, so that every trial also changes its row.
        same = [size for size in sizes if _keeps_bits(task, candidate, size, trials, full)]
    except NotStackable as error:
        return Refused(str(error))
    except Exception as error:  # whatever a user's model raises under another engine
        lines = str(error).strip().splitlines() or ["no text"]
        return Refused(textwrap.shorten(f"{type(error).__name__}: {lines[0]}", _REASON))
    if candidate.slots not in same:
        return Refused("a trial's bits depend on its row")
    return replace(candidate, sizes=tuple(same))


def sizes_of(slots: int) -> list[int]:
    """Numbers of rows worth a size of their own: all small ones, then a third apart, and ``slots``."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(max(sizes[-1] + 1, sizes[-1] * 4 // 3))
    return sorted({min(size, slots) for size in sizes})


def _unlike_plain(
    task: Task, trials: Sequence[Trial], ours: Mapping[int, Mapping[str, Tensor]]
) -> str | None:
    plain = trained(PoolEngine(task), trials, STEPS)
    for number, weights in plain.items():
        outputs = {n: t for n, t in ours[number].items() if n == _OUTPUTS}
        if outputs:
            weights |= {_OUTPUTS: _module_outputs(task, ours[number])}
        difference, name = largest_difference(ours[number], weights)
        if not difference <= TOLERANCE:
            parts = dict.fromkeys(dict(task.initial(0).named_buffers()), "buffer ")
            kind = parts.get(name, "" if name == _OUTPUTS else "parameter ")
            return (
                f"{kind}{name} differs from the plain loop's by {difference:.1e} after {STEPS} steps; "
                f"at most {TOLERANCE:g} is accepted"
            )
    return None


def _keeps_bits(
    task: Task,
    candidate: Candidate,
    size: int,
    trials: Sequence[Trial],
    full: Mapping[int, Mapping[str, Tensor]],
) -> bool:
    engine = build_engine(task, replace(candidate, sizes=tuple(sorted({size, candidate.slots}))))
    few = _with_outputs(task, engine, trained(engine, list(reversed(trials))[:size], STEPS))
    return all(same_bits(weights, full[number]) for number, weights in few.items())


def _with_outputs(
    task: Task, engine: Engine, weights: dict[int, dict[str, Tensor]]
) -> dict[int, dict[str, Tensor]]:
    """Each trial's weights, and its outputs on some samples where the engine gives them."""
    found = engine.outputs(list(weights), task.inputs[:_PROBED])
    if found is not None:
        for (number, row), output in zip(weights.items(), found.unbind(0), strict=True):
            weights[number] = row | {_OUTPUTS: output.clone()}
    return weights


@torch.no_grad()
def _module_outputs(task: Task, weights: Mapping[str, Tensor]) -> Tensor:
    named = {name: tensor for name, tensor in weights.items() if name != _OUTPUTS}
    inputs = task.inputs[:_PROBED]
    return functional_call(task.initial(0).eval(), named, (inputs,))


# -- trying trials ------------------------------------------------------------------------------------------


def trials_of(task: Task, count: int, *, first: int = 0, reach: float = 1.0) -> list[Trial]:
    """Trials spread over the task's search space, each with its own seed.

    Args:
        task: whose space it is.
        count: how many.
        first: id of the first.
        reach: share of each range from its lower end, in (0, 1]; less keeps away from divergence.
    """
    space = task.curve.space_at(task.global_batch)
    shifts = [_GOLDEN, _SILVER] * len(space)
    found: list[Trial] = []
    for number in range(first, first + count):
        unit = tuple(reach * ((0.5 + (number + 1) * shift) % 1) for shift in shifts[: len(space)])
        found.append(
            Trial(
                search=SearchKey(curve="trying", global_batch=task.global_batch, repeat=0),
                id=number,
                unit=unit,
                parameters=task.curve.parameters(task.global_batch, unit),
                seed=7_000_001 * (number + 1),
                address=f"{number:016x}",
            )
        )
    return found


def trained(engine: Engine, trials: Iterable[Trial], steps: int) -> dict[int, dict[str, Tensor]]:
    """Admit trials, train them to ``steps`` in one call, and copy their weights."""
    numbers: list[int] = []
    for trial in trials:
        engine.admit(trial)
        numbers.append(trial.id)
    engine.advance(dict.fromkeys(numbers, steps))
    return {number: copied(engine.weights(number)) for number in numbers}


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later calls of the engine do not touch."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def largest_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Over all tensors the norm of the difference relative to that of ``theirs``, and where it is largest.

    Infinite where one is missing; numbers that are not finite must be so in both.
    """
    missing = ours.keys() ^ theirs.keys()
    if missing:
        return math.inf, min(missing)
    worst, where = 0.0, ""
    for name, tensor in theirs.items():
        a, b = ours[name].detach().double(), tensor.detach().double()
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return math.inf, name
        a, b = a[b.isfinite()], b[b.isfinite()]
        difference, size = float((a - b).norm()), float(b.norm())
        relative = difference / size if size else difference
        if relative >= worst:
            worst, where = relative, name
    return worst, where


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are equal; NaN equals NaN."""
    return ours.keys() == theirs.keys() and all(
        mine.shape == theirs[name].shape
        and torch.equal(mine.isnan(), theirs[name].isnan())
        and torch.equal(mine.nan_to_num(), theirs[name].nan_to_num())
        for name, mine in ours.items()
    )
