"""The models of a simulated run, measured: the leader, the mean, those near the best, the best, the center."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.data.order import Indices
from shoal.world.virtual.judging import Judge
from shoal.world.virtual.setup import Setup
from shoal.world.virtual.stack import Stack


class Measures:
    """Measures models without touching the training state.

    Args:
        setup: which models, which split.
        stack: whose buffers go with the weights.
        judge: evaluates.
        probe: training samples common to all workers.
    """

    def __init__(self, setup: Setup, stack: Stack, judge: Judge, probe: Indices) -> None:
        self._setup, self._stack, self._judge, self._probe = setup, stack, judge, probe

    def scores(
        self, x: Tensor, leader: int | None, center: Tensor | None
    ) -> dict[str, dict[str, float]]:
        """The models that are wanted, each by every metric.

        Args:
            x: every worker's weights, ``[p, d]``.
            leader: row of the present leader; None where there is none.
            center: the rule's own average, ``[1, d]``.

        Returns:
            By model, by metric.
        """
        wanted, everyone = self._setup.models, list(range(len(x)))
        found: dict[str, dict[str, float]] = {}
        if "leader" in wanted and leader is not None:
            found["leader"] = self._metrics(x[leader], [leader])
        if "mean" in wanted:
            sound = [row for row in everyone if bool(torch.isfinite(x[row]).all())]
            found["mean"] = self._metrics(_mean(x, sound or everyone), sound or everyone)
        if "near_best" in wanted:
            near = self._near_best(x) or everyone
            found["near_best"] = self._metrics(_mean(x, near), near)
        if "best" in wanted:
            each = [self._metrics(x[row], [row]) for row in everyone]
            key = self._setup.target[0] if self._setup.target else next(iter(each[0]))
            values = [scores[key] if math.isfinite(scores[key]) else math.inf for scores in each]
            found["best"] = each[int(np.argmin(values))]
        if "center" in wanted and center is not None:
            found["center"] = self._metrics(center[0], everyone)
        return found

    def _near_best(self, x: Tensor) -> list[int]:
        """Rows whose loss on the probe is within the margin of the lowest; none if none is finite."""
        losses = self._judge.losses(x, [self._probe] * len(x))
        lowest = min((loss for loss in losses if math.isfinite(loss)), default=-math.inf)
        return [row for row, loss in enumerate(losses) if loss <= lowest + self._setup.margin]

    def _metrics(self, vector: Tensor, rows: Sequence[int]) -> dict[str, float]:
        """Of one model, with the statistics of these rows, or measured anew if the rule wants that."""
        split = self._setup.split
        if self._stack.buffers and self._setup.rule.statistics_policy == "recompute":
            again = self._judge.recomputed(vector, self._buffers(rows), self._probe)
            return self._judge.metrics(vector, again, split)
        return self._judge.metrics(vector, self._buffers(rows), split)

    def _buffers(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        """The mean of these rows' buffers; of those that are whole numbers the first row's."""
        found: dict[str, Tensor] = {}
        for name, buffers in self._stack.buffers.items():
            chosen = buffers[list(rows)]
            found[name] = chosen.mean(0) if torch.is_floating_point(chosen) else chosen[0]
        return found


def _mean(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x[list(rows)].double().mean(0).to(x.dtype)
