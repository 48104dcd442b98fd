"""What a round does to what is not a parameter: momentum buffers and BatchNorm statistics.

A rule moves weights and says how in ``Outcome.pulls``. These functions let the rest follow. Tensors are
``[rows, ...]``, as weights are.

Momentum, of the rows that a pull has moved:

    keep         as it was (the paper); of a row that was replaced whole: zero, since its own is worthless
    reset        zero
    interpolate  moved as the weights were: as far toward the source's, the mean, or its own past

Statistics:

    own          each its own; of a row that was replaced whole: the leader's
    leader       the leader's, for the rows that a pull has moved
    mean         those of all workers' inputs together
    recompute    left alone here; see :func:`recomputed`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from shoal.errors import UsageError
from shoal.sync.contract import Exchange, Outcome, Pull, SyncRule
from shoal.sync.pulling import toward

Tensors: TypeAlias = Mapping[str, Tensor]

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, kw_only=True, eq=False)
class Carried:
    """Everything beside the weights that a worker carries through rounds.

    Args:
        momentum: the optimizer's buffers by name. An entry whose name ends in ``step`` counts steps: it
            is reset, but never interpolated.
        statistics: BatchNorm's by name, as in ``state_dict``.
        slow_momentum: momentum after the last look back, for a rule that pulls toward a row's own
            past; empty: zero.
    """

    momentum: Tensors = field(default_factory=dict[str, Tensor])
    statistics: Tensors = field(default_factory=dict[str, Tensor])
    slow_momentum: Tensors = field(default_factory=dict[str, Tensor])


# The state's type is of no concern here.
def carry(
    rule: SyncRule[Any], outcome: Outcome[Any], carried: Carried, exchange: Exchange
) -> Carried:
    """Let momentum and statistics follow the weights, by the rule's policies.

    Args:
        rule: whose ``momentum_policy`` and ``statistics_policy`` hold.
        outcome: of the step.
        carried: before the step's round.
        exchange: the workers of the round.

    Returns:
        What is carried on; the very same if no weights were moved.
    """
    for pull in outcome.pulls:
        if pull.toward == "past":
            carried = _look_back(rule.momentum_policy, carried, pull)
        else:
            momentum = merge_momentum(rule.momentum_policy, carried.momentum, pull, exchange)
            carried = replace(carried, momentum=momentum)
        if rule.statistics_policy != "mean":
            statistics = merge_statistics(
                rule.statistics_policy, carried.statistics, pull, exchange
            )
            carried = replace(carried, statistics=statistics)
    if rule.statistics_policy == "mean" and outcome.pulls:
        # Once is enough: after the first time all workers' are equal.
        last = outcome.pulls[-1]
        statistics = merge_statistics("mean", carried.statistics, last, exchange)
        carried = replace(carried, statistics=statistics)
    return carried


def merge_momentum(policy: str, buffers: Tensors, pull: Pull, exchange: Exchange) -> Tensors:
    """Momentum buffers after a pull toward workers or their mean.

    Args:
        policy: ``"keep"``, ``"reset"`` or ``"interpolate"``.
        buffers: ``[rows, ...]`` by name.
        pull: what was done to the weights.
        exchange: the workers; asked for buffers only to interpolate.
    """
    if not buffers:
        return buffers
    if policy != "interpolate":
        rows = pull.rows if policy == "reset" else pull.replaced
        return (
            {name: _zeroed(buffer, rows) for name, buffer in buffers.items()} if rows else buffers
        )
    moving = {name: buffer for name, buffer in buffers.items() if not name.endswith("step")}
    sources = _received(moving, pull, exchange)
    return {
        name: _moved(buffer, sources[name], pull) if name in sources else buffer
        for name, buffer in buffers.items()
    }


def merge_statistics(policy: str, statistics: Tensors, pull: Pull, exchange: Exchange) -> Tensors:
    """BatchNorm statistics after a pull.

    With ``"mean"`` every worker's are afterwards those of all inputs together: the mean of means, the
    mean of variances plus the variance of means, and the largest count of batches.

    Args:
        policy: ``"own"``, ``"leader"``, ``"mean"`` or ``"recompute"``.
        statistics: ``[rows, ...]`` by name.
        pull: what was done to the weights.
        exchange: the workers; asked for statistics by ``"leader"``, ``"mean"``, and where a row
            was replaced.

    Deviates: averaging the variances alone, as others do, forgets that workers' means differ.
    """
    if not statistics or pull.toward == "past":
        return statistics
    if policy == "mean":
        return _pooled(statistics, exchange, is_repairing=pull.is_repairing)
    if pull.toward != "workers" or policy == "recompute":
        return statistics
    if policy == "own" and not pull.is_repairing:
        return statistics
    rows = pull.rows if policy == "leader" else pull.replaced
    sources = _received(statistics, pull, exchange)
    return {name: _taken(own, sources[name], rows) for name, own in statistics.items()}


def recomputed(model: nn.Module, inputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """BatchNorm statistics of a model, measured anew by one pass over inputs.

    The pass is made on a copy: weights, statistics and modes of ``model`` stay as they are. Each layer's
    statistics are the plain mean over the batches.

    Args:
        model: with BatchNorm layers; others run in evaluation mode, so no random numbers are drawn.
        inputs: batches, at least one.

    Returns:
        The statistics by name, as in ``model.state_dict()``; empty for a model without BatchNorm.

    Raises:
        UsageError: no batches.

    Deviates: the authors' code leaves dropout on in this pass; a model is evaluated without it.
    """
    twin = deepcopy(model).eval()
    layers = {name: layer for name, layer in twin.named_modules() if isinstance(layer, _BatchNorm)}
    for layer in layers.values():
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    seen = 0
    with torch.no_grad():
        for batch in inputs:
            twin(batch)
            seen += 1
    if not seen:
        raise UsageError("recompute statistics from 0 batches; give at least one batch of inputs")
    return {
        f"{name}.{key}" if name else key: value
        for name, layer in layers.items()
        for key, value in layer.named_buffers(recurse=False)
    }


def _look_back(policy: str, carried: Carried, pull: Pull) -> Carried:
    """Momentum as a row looks back at its own past."""
    buffers = carried.momentum
    if not buffers or policy == "keep":
        return carried
    if policy == "reset":
        zero = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        return replace(carried, momentum=zero)
    slow = {
        name: toward(
            buffer,
            carried.slow_momentum.get(name, torch.zeros_like(buffer)),
            0.0 if name.endswith("step") else pull.fraction,
        )
        for name, buffer in buffers.items()
    }
    copies = {name: buffer.clone() for name, buffer in slow.items()}
    return replace(carried, momentum=copies, slow_momentum=slow)


def _received(tensors: Tensors, pull: Pull, exchange: Exchange) -> dict[str, Tensor]:
    """Each row's source of every tensor, in one message for each type of number."""
    found: dict[str, Tensor] = {}
    for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
        names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
        packed = _packed([tensors[name] for name in names])
        if pull.toward == "workers":
            source = exchange.from_workers(packed, pull.sources)
        else:
            source = exchange.mean(packed).expand_as(packed)
        found.update(_unpacked(source, {name: tensors[name] for name in names}))
    return found


def _pooled(statistics: Tensors, exchange: Exchange, *, is_repairing: bool) -> Tensors:
    """Statistics of all inputs together; where some worker is ill, of those that are not."""
    means = {name: value for name, value in statistics.items() if name.endswith(MEAN)}
    variances = {name: value for name, value in statistics.items() if name.endswith(VARIANCE)}
    weights = None
    if is_repairing:
        weights = torch.isfinite(_packed([*means.values(), *variances.values()])).all(dim=1)
    common = _unpacked(_mean(means, exchange, weights), means)
    spread = {
        name: value
        + (means[_twin(name, VARIANCE, MEAN)] - common[_twin(name, VARIANCE, MEAN)]).square()
        for name, value in variances.items()
    }
    common.update(_unpacked(_mean(spread, exchange, weights), spread))
    counts = {name: value for name, value in statistics.items() if name.endswith(COUNT)}
    if counts:
        packed = _packed(list(counts.values()))
        common.update(_unpacked(exchange.largest(packed).expand_as(packed), counts))
    return {name: common.get(name, value).clone() for name, value in statistics.items()}


def _mean(tensors: Tensors, exchange: Exchange, weights: Tensor | None) -> Tensor:
    packed = _packed(list(tensors.values()))
    return exchange.mean(packed, weights=weights).expand_as(packed)


def _twin(name: str, ending: str, other: str) -> str:
    return name[: -len(ending)] + other


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(tensor.shape[0], -1) for tensor in tensors], dim=1)


def _unpacked(packed: Tensor, like: Tensors) -> dict[str, Tensor]:
    sizes = [tensor[0].numel() for tensor in like.values()]
    pieces = packed.split(sizes, dim=1)
    return {
        name: piece.reshape(tensor.shape)
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }


def _zeroed(buffer: Tensor, rows: Sequence[int]) -> Tensor:
    zeroed = buffer.clone()
    zeroed[list(rows)] = 0
    return zeroed


def _taken(own: Tensor, source: Tensor, rows: Sequence[int]) -> Tensor:
    taken = own.clone()
    taken[list(rows)] = source[list(rows)]
    return taken


def _moved(buffer: Tensor, source: Tensor, pull: Pull) -> Tensor:
    """Rows of the pull moved as the weights were; those that were replaced, whole."""
    part = [row for row in pull.rows if row not in pull.replaced]
    moved = buffer.clone()
    moved[part] = toward(buffer[part], source[part], pull.fraction)
    return _taken(moved, source, pull.replaced)
