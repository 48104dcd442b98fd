"""What is measured at a grid point, exactly and at the least cost.

A pass over the validation set ends as soon as its result is decided. With a non-negative metric m_i per
sample, n samples and g the easiest goal, the mean is at least g once the sum over any part of them has
reached g n; then the value is stored as a bound, ">=", which no goal at least as hard can be met by. A
pass that is not ended gives the mean over all samples, by the same matrix products in the same order
whatever came before: what meets a goal is always measured whole.

Which samples come first is remembered per trial: those that weighed most the last time.

Source: sections 9.2, 9.4 and 9.5 of the notes on Shallue et al. 2019. There the loss of divergence is the
cross entropy; here it is the workload's own loss.
Deviates: the training loss is held against the larger of its own and the validation block's value at step
0, as a first batch of one or two samples may lie far below what is usual.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.study.engines.contract import Engine
from shoal.study.forward import Forward
from shoal.study.records import Evaluation, Goal, Measured, hardest
from shoal.study.validation_pass import Block, Memory, Meter, Pass, decides
from shoal.study.workload import Workload

DIVERGED_FACTOR = 10.0
"""A loss beyond this many times its value at step 0 has diverged."""
TRAIN_SAMPLES = 1024
"""Training samples, evenly spaced, that training metrics are measured on."""
NEAR_FACTOR = 1.25
"""Default of ``near``: what lies within this factor of a goal is measured whole, its outcomes kept."""


@dataclass(frozen=True, kw_only=True)
class SampleOutcomes:
    """One metric of every validation sample at one evaluation.

    Args:
        metric: ``val/name``.
        values: by sample, float32.
    """

    metric: str
    values: npt.NDArray[np.float32]

    @property
    def is_binary(self) -> bool:
        """Whether every value is 0 or 1."""
        return bool(np.isin(self.values, (0.0, 1.0)).all())

    def packed(self) -> str:
        """Binary outcomes, eight to a byte, first sample in the highest bit, as base64.

        Raises:
            ValueError: a value is neither 0 nor 1.
        """
        if not self.is_binary:
            raise ValueError(f"metric = {self.metric}; only outcomes 0 and 1 fit into bits")
        return base64.b64encode(np.packbits(self.values > 0).tobytes()).decode()


class Evaluator:
    """Measures the trials of a study at grid points.

    Args:
        workload: whose validation and test sets and metrics are used.
        goals: all of one metric, ``val/...``; at least one.
        full: measure every metric of every split at every point and end no pass early.
        near: where the goal's metric comes within this factor of a goal, the pass is not ended early and
            each sample's outcome is kept; 1 for the least cost.
        device: that evaluates.

    Raises:
        UsageError: ``near`` below 1; no goal, goals of several metrics, or of one that
            the workload does not measure.
    """

    def __init__(
        self,
        workload: Workload,
        goals: Sequence[Goal],
        *,
        full: bool = False,
        near: float = NEAR_FACTOR,
        device: torch.device | None = None,
    ) -> None:
        hardest(goals)
        split, _, self._metric = goals[0].metric.partition("/")
        if split != "val" or self._metric not in workload.metrics:
            known = ", ".join(f"val/{name}" for name in workload.metrics)
            raise UsageError(
                f"goal.metric = {goals[0].metric!r}; the workload {workload.name} measures {known}; use "
                "one of these"
            )
        self._workload = workload
        self._goals = tuple(goals)
        if not (math.isfinite(near) and near >= 1):
            raise UsageError(f"near = {near}; it is a factor of at least 1")
        self._full, self._near = full, near
        self._forward = Forward(workload, device=device)
        self._meter = Meter(workload, self._metric, self._forward)
        self._test = None if workload.test is None else self._forward.prepared("test")
        count = workload.samples("train")
        rows = torch.from_numpy(np.arange(min(count, TRAIN_SAMPLES)) * count) // min(
            count, TRAIN_SAMPLES
        )
        self._train = self._forward.prepared("train", rows)
        # Only where smaller is better does a partial sum say anything.
        self._easiest = (
            math.inf if full or goals[0].larger_is_better else max(g.value for g in goals)
        )
        self._trials: dict[int, Memory] = {}
        self._outcomes: dict[int, list[SampleOutcomes]] = {}

    @property
    def block_inputs(self) -> Tensor:
        """Inputs of the validation samples that are always evaluated; for ``Engine.outputs``."""
        return self._meter.val[0][: self._meter.block]

    def evaluate(
        self, trial: int, step: int, weights: Mapping[str, Tensor], losses: tuple[float, float]
    ) -> Evaluation:
        """Measure one trial at a grid point. Its weights are only read.

        Args:
            trial: its id.
            step: optimizer steps done; the first point of a trial is 0.
            weights: parameters and buffers by name.
            losses: training loss of step 0 and its mean since the last point; NaN before step 1.

        Returns:
            The goal's metric on ``val``, exact or a bound. Where a goal is met for the first time, and
            always with ``full``, every metric of ``val`` and ``test``, and of ``train`` on a fixed
            part.

        Raises:
            ValueError: a trial that was not measured at step 0, nor restored.
            UsageError: a metric that is negative for a sample.
        """
        self._forward.bind(weights)
        output, target = self._forward(self._meter.val, slice(0, self._meter.block))
        (block,) = self._meter.blocks(output[None], target)
        return self._finish(trial, step, block, None, losses)

    def evaluate_portion(self, engine: Engine, steps: Mapping[int, int]) -> dict[int, Evaluation]:
        """Measure several trials that an engine holds, each at its own grid point.

        Like :meth:`evaluate` of each, in the order given. The block that is always evaluated is put
        through all models at once where the engine can do so; for a small model that is most of the work.

        Args:
            engine: that holds them.
            steps: the grid point of each trial, by id; the engine has trained it so far.
        """
        outputs = engine.outputs(list(steps), self.block_inputs)
        if outputs is None:
            return {
                n: self.evaluate(n, step, engine.weights(n), engine.losses(n))
                for n, step in steps.items()
            }
        blocks = self._meter.blocks(outputs, self._meter.val[1][: self._meter.block])
        return {
            number: self._finish(
                number, step, block, partial(engine.weights, number), engine.losses(number)
            )
            for (number, step), block in zip(steps.items(), blocks, strict=True)
        }

    def _finish(
        self,
        trial: int,
        step: int,
        block: Block,
        weights: Callable[[], Mapping[str, Tensor]] | None,
        losses: tuple[float, float],
    ) -> Evaluation:
        """The evaluation, from what is known of the block on; ``weights`` are bound already where None."""
        memory = self._remembered(trial, step, block)
        diverged = self._has_diverged(memory, block.loss, losses)
        self._outcomes.pop(trial, None)
        threshold = self._easiest * self._near * self._meter.samples
        if decides(block.total, block.largest, threshold):
            bound = block.total / self._meter.samples
            metrics = {f"val/{self._metric}": Measured(bound, ">=")}
            return Evaluation(step=step, metrics=metrics, diverged=diverged)
        if weights is not None:
            self._forward.bind(weights())
        run = Pass(self._meter, block)
        reached = run.screened(memory, threshold)
        if reached is not None:
            metrics = {f"val/{self._metric}": Measured(reached / self._meter.samples, ">=")}
        else:
            metrics = run.whole()
            self._keep_outcomes(trial, run, metrics)
        run.remember(memory, self._easiest)
        crossed = self._newly_met(memory, metrics)
        if crossed or self._full:
            metrics |= self._meter.means("test", self._test) if self._test is not None else {}
            metrics |= self._meter.means("train", self._train)
        return Evaluation(step=step, metrics=metrics, diverged=diverged)

    def _remembered(self, trial: int, step: int, block: Block) -> Memory:
        memory = self._trials.get(trial)
        if memory is None:
            if step != 0:
                raise ValueError(
                    f"trial {trial}, step {step}: it was never measured at step 0, which divergence is "
                    "judged by; measure it there or load its state"
                )
            memory = Memory(block_loss=block.loss, heavy=np.zeros(self._meter.samples, dtype=bool))
            self._trials[trial] = memory
        return memory

    def outcomes(self, trial: int) -> list[SampleOutcomes]:
        """Each validation sample's outcomes at the trial's last evaluation, if that came near a goal."""
        return self._outcomes.get(trial, [])

    def measure(self, weights: Mapping[str, Tensor], split: str) -> dict[str, Measured]:
        """Every metric of ``val``, ``test`` or all of ``train``, measured whole."""
        self._forward.bind(weights)
        return self._meter.means(split, self._forward.prepared(split))

    def forget(self, trial: int) -> None:
        """A trial has ended; harmless for one that is not known."""
        self._trials.pop(trial, None)
        self._outcomes.pop(trial, None)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of each trial, as JSON values."""
        return {
            "format": 1,
            "trials": {
                str(number): {
                    "block_loss": _plain(memory.block_loss),
                    "heavy": base64.b64encode(np.packbits(memory.heavy).tobytes()).decode(),
                    "heavy_mean": memory.heavy_mean,
                    "met": sorted(memory.met),
                }
                for number, memory in self._trials.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave, in place of all that is remembered.

        Raises:
            UsageError: it is of another format.
        """
        if state.get("format") != 1:
            raise UsageError(
                f"format = {state.get('format')}; this version reads format 1; use the version that "
                "wrote it"
            )
        self._outcomes.clear()
        self._trials = {}
        for number, entry in state["trials"].items():
            bits = np.frombuffer(base64.b64decode(entry["heavy"]), dtype=np.uint8)
            self._trials[int(number)] = Memory(
                block_loss=float(entry["block_loss"]),
                heavy=np.unpackbits(bits, count=self._meter.samples).astype(bool),
                heavy_mean=entry["heavy_mean"],
                met=set(entry["met"]),
            )

    # -- parts --------------------------------------------------------------------------------------

    def _has_diverged(self, memory: Memory, block_loss: float, losses: tuple[float, float]) -> bool:
        first, recent = losses
        reference = memory.block_loss
        if not block_loss <= DIVERGED_FACTOR * reference or not math.isfinite(block_loss):
            return True
        if math.isnan(first) and math.isnan(recent):  # no step was made yet
            return False
        limit = DIVERGED_FACTOR * max(first, reference) if math.isfinite(first) else -math.inf
        return not (recent <= limit and math.isfinite(recent))

    def _newly_met(self, memory: Memory, metrics: Mapping[str, Measured]) -> bool:
        met = {n for n, goal in enumerate(self._goals) if goal.is_met_by(metrics[goal.metric])}
        is_new = bool(met - memory.met)
        memory.met |= met
        return is_new

    def _keep_outcomes(self, trial: int, run: Pass, metrics: Mapping[str, Measured]) -> None:
        value, _ = metrics[f"val/{self._metric}"]
        if any(
            g.value <= value * self._near and value <= g.value * self._near for g in self._goals
        ):
            self._outcomes[trial] = [
                SampleOutcomes(metric=f"val/{name}", values=values.astype(np.float32))
                for name, values in run.values.items()
            ]


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
