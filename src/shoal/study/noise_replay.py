"""One trial trained again, its gradients measured on the way: what the noise scale is computed from.

A study's own trials keep no gradients. The winner of a plain SGD search is trained once more, by the same
seed and the same engine, up to its crossing; at some steps gradients of micro-batches are taken at its weights.

Source: sections 5.1 and 9.13 of the project's notes on Shallue et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study.engines.contract import Engine
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.noise_scale import NoiseMeasurement, NoiseScale, noise_scale
from shoal.study.records import Trial
from shoal.study.search_summary import SearchSummary
from shoal.study.spec import CurveSpec
from shoal.study.workload import Workload


class Trainable(Protocol):
    """What the replay needs of a workload; ``shoal.study.workload.Workload`` is one."""

    def build(self, seed: int) -> nn.Module:
        """A fresh model."""
        ...

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``"train"``."""
        ...

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(output, target) -> loss of each sample."""
        ...


def replay(
    workload: Trainable,
    engine: Engine,
    trial: Trial,
    steps: Sequence[int],
    *,
    small_batch: int,
    micro_batches: int,
    seed: int = 0,
) -> list[NoiseMeasurement]:
    """Train one trial again and measure squared gradient norms on the way.

    Args:
        workload: model, per-sample loss and training data.
        engine: trains; it must not hold the trial. Any engine that passes the conformance suite.
        trial: plain SGD at its best learning rate, for a comparison with B_crit.
        steps: where to measure, rising, from 0 to the crossing.
        small_batch: samples of a micro-batch.
        micro_batches: how many of them at each step, >= 2, drawn without replacement.
        seed: of that drawing, apart from the trial's own.

    Raises:
        UsageError: more samples asked for than there are, or fewer than 2 micro-batches.
    """
    inputs, targets = workload.split("train")
    need = small_batch * micro_batches
    if micro_batches < 2 or need > len(inputs):
        raise UsageError(
            f"micro_batches = {micro_batches} of {small_batch}; at least 2, and no more than the "
            f"{len(inputs)} training samples in all; choose fewer or smaller ones"
        )
    model = workload.build(trial.seed)
    engine.admit(trial)
    random = np.random.default_rng([seed, trial.seed])
    found: list[NoiseMeasurement] = []
    try:
        for step in steps:
            engine.advance({trial.id: step})
            rows = torch.from_numpy(random.permutation(len(inputs))[:need]).to(inputs.device)
            found.append(
                _measure(
                    model,
                    workload,
                    engine.weights(trial.id),
                    inputs,
                    targets,
                    rows,
                    step,
                    small_batch,
                )
            )
    finally:
        engine.release(trial.id)
    return found


def noise_scale_of_winner(
    workload: Workload,
    curve: CurveSpec,
    search: SearchSummary,
    *,
    measurements: int = 40,
    small_batch: int = 8,
    micro_batches: int = 16,
    seed: int = 0,
) -> NoiseScale:
    """The noise scale along the winner of one search, from its start to its crossing.

    Args:
        workload: of the study.
        curve: the search's; plain SGD for a comparison with B_crit, of others it is a proxy.
        search: with S.
        measurements: at about so many steps, half of them evenly spaced and half in equal ratios, so that
            both the quick fall at the start and the long end are seen.
        small_batch: samples of a micro-batch.
        micro_batches: how many at each step.
        seed: of their drawing.

    Raises:
        UsageError: the search has no S, or too few training samples.
    """
    winner = search.winner
    if winner is None or winner.crossing is None:
        raise UsageError(
            f"{search.key}: it has no winner; the noise scale is measured along one; give a search that "
            "reached the goal"
        )
    last = max(winner.crossing, 1)
    half = max(measurements // 2, 1)
    steps = {0, *(round(x) for x in np.geomspace(1, last, half))}
    steps |= {round(x) for x in np.linspace(0, last, half)}
    engine = PoolEngine(Task(workload=workload, curve=curve, global_batch=search.key.global_batch))
    rows = replay(
        workload,
        engine,
        winner.trial,
        sorted(steps),
        small_batch=small_batch,
        micro_batches=micro_batches,
        seed=seed,
    )
    return noise_scale(
        rows,
        small_batch=small_batch,
        large_batch=small_batch * micro_batches,
        train_samples=workload.samples("train"),
        seed=seed,
    )


def _measure(
    model: nn.Module,
    workload: Trainable,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    rows: Tensor,
    step: int,
    small_batch: int,
) -> NoiseMeasurement:
    """Gradients of all micro-batches of one step, at the engine's weights."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    total: list[Tensor] = []
    squares, losses = 0.0, 0.0
    batches = rows.split(small_batch)
    for part in batches:
        state = {
            name: t.detach().to(inputs.device, copy=True).requires_grad_(name in trained)
            for name, t in weights.items()
        }
        output = torch.func.functional_call(model, state, (inputs[part],))
        loss = workload.loss(output, targets[part]).mean()
        gradients = torch.autograd.grad(loss, [state[n] for n in sorted(trained)])
        squares += sum(float(g.double().square().sum()) for g in gradients)
        losses += float(loss.detach())
        total = [t + g for t, g in zip(total, gradients, strict=True)] if total else list(gradients)
    count = len(batches)
    large = sum(float((t.double() / count).square().sum()) for t in total)
    return NoiseMeasurement(step, losses / count, squares / count, large)
