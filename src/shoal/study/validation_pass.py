"""One way through a validation set that ends as soon as its result is decided.

With a non-negative metric m_i per sample and a threshold T, the sum over all samples is at least T once
the sum over some of them is. Which samples come first is a matter of cost alone; a pass that is not ended
takes all of them in their order, by the same matrix products whatever was tried before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from shoal.errors import UsageError
from shoal.study.forward import Forward
from shoal.study.records import Measured
from shoal.study.workload import PerSample, Workload, classification_error, cross_entropy

BLOCK_SAMPLES = 256
"""Validation samples that are always evaluated: the first ones."""

_CHUNK = 512
_MARGIN = 1e-5
"""Single results depend a little on the batch they are computed in; a bound leaves room for that."""

Values = npt.NDArray[np.float64]
Split = tuple[Tensor, Tensor]


class Meter:
    """Measures metrics of a workload's samples by the weights that ``forward`` is bound to.

    Args:
        workload: whose metrics they are.
        metric: the goals', without its split.
        forward: evaluates.
    """

    def __init__(self, workload: Workload, metric: str, forward: Forward) -> None:
        self.workload, self.metric, self.forward = workload, metric, forward
        self.val = forward.prepared("val")
        self.samples = len(self.val[0])
        self.block = min(BLOCK_SAMPLES, self.samples)

    def means(self, split: str, data: Split) -> dict[str, Measured]:
        """Every metric over all of ``data``, by ``split/name``."""
        found: dict[str, list[Values]] = {name: [] for name in self.workload.metrics}
        for start in range(0, len(data[0]), _CHUNK):
            output, target = self.forward(data, slice(start, start + _CHUNK))
            for name, values in self.per_sample(output, target).items():
                found[name].append(values)
        return {
            f"{split}/{name}": Measured(float(np.concatenate(v).mean()))
            for name, v in found.items()
        }

    def per_sample(self, output: Tensor, target: Tensor) -> dict[str, Values]:
        """Every metric of each sample.

        Raises:
            UsageError: a metric is negative for one.
        """
        return {
            name: self.checked(name, metric(output, target))
            for name, metric in self.workload.metrics.items()
        }

    def goal_values(self, rows: npt.NDArray[np.int64]) -> Values:
        """The goals' metric of some validation samples."""
        output, target = self.forward(self.val, torch.from_numpy(rows))
        return self.checked(self.metric, self.workload.metrics[self.metric](output, target))

    def checked(self, name: str, values: Tensor) -> Values:
        """A metric's values in double precision.

        Raises:
            UsageError: one is negative.
        """
        array = values.detach().double().cpu().numpy()
        if array.size and array.min() < 0:
            raise UsageError(
                f"metrics[{name!r}] = {array.min():g} for a sample; a metric is an error, never negative, "
                "so that an evaluation may stop early; measure 1 - accuracy instead of accuracy"
            )
        return array

    def blocks(self, outputs: Tensor, target: Tensor) -> list[Block]:
        """What the outputs (trials, samples, ...) on the block say about each trial."""
        with torch.inference_mode():
            losses = _stacked(self.workload.loss, outputs, target)
            metric = self.workload.metrics[self.metric]
            is_loss = metric is self.workload.loss
            goal = losses if is_loss else _stacked(metric, outputs, target)
            means = losses.double().mean(1).tolist()
        values = self.checked(self.metric, goal)
        rows = zip(outputs.unbind(0), means, values, values.sum(1), values.max(1), strict=True)
        return [
            Block(output=o, target=target, loss=m, values=v, total=float(t), largest=float(x))
            for o, m, v, t, x in rows
        ]


def _stacked(function: PerSample, outputs: Tensor, target: Tensor) -> Tensor:
    """A loss or metric of outputs (trials, samples, ...), (trials, samples).

    Of several trials, the two usual ones are computed over samples side by side, three times as fast. Where
    the largest output is shared, a class may count as right that whole passes count as wrong: bounds stay
    bounds.
    """
    count, samples = outputs.shape[:2]
    if count > 1 and outputs.dim() == 3 and target.dim() == 1:
        across, wanted = outputs.transpose(1, 2), target.expand(count, -1)
        if function is cross_entropy:
            return functional.cross_entropy(across, wanted, reduction="none")
        if function is classification_error:
            own = across.gather(1, wanted.unsqueeze(1)).squeeze(1)
            return (own < across.amax(1)).to(outputs.dtype)
    targets = target.repeat(count, *[1] * (target.dim() - 1)) if count > 1 else target
    return function(outputs.flatten(0, 1), targets).view(count, samples)


@dataclass(kw_only=True)
class Memory:
    """What is remembered of a trial.

    Args:
        block_loss: on the validation block at step 0.
        heavy: samples whose value was above the easiest goal when last seen.
        heavy_mean: mean value of those seen heavy the last time.
        met: goals already met, as numbers in the evaluator's list.
    """

    block_loss: float
    heavy: npt.NDArray[np.bool_]
    heavy_mean: float = 1.0
    met: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, kw_only=True)
class Block:
    """What the always evaluated block says about one trial.

    Args:
        output: of the model, sample by sample.
        target: of these samples.
        loss: mean.
        values: the goal's metric of each sample.
        total: their sum.
        largest: of them.
    """

    output: Tensor
    target: Tensor
    loss: float
    values: Values
    total: float
    largest: float


def needed(largest: float, threshold: float) -> float:
    """The partial sum that settles it, rounding and one sample on the brink aside."""
    return threshold * (1 + _MARGIN) + largest


def decides(total: float, largest: float, threshold: float) -> bool:
    """Whether the whole must come to the threshold."""
    return math.isfinite(total) and total >= needed(largest, threshold)


class Pass:
    """One evaluation's way through the validation set beyond the block.

    Args:
        meter: measures; the trial's weights are bound.
        block: evaluated before.
    """

    def __init__(self, meter: Meter, block: Block) -> None:
        self._of = meter
        self._block = block
        self.values: dict[str, Values] = {}
        count = meter.samples
        self._seen = np.zeros(count, dtype=bool)
        self._goal_values = np.zeros(count)
        self._see(np.arange(len(block.values)), block.values)

    def screened(self, memory: Memory, threshold: float) -> float | None:
        """The sum over a part of the samples if it suffices to reach ``threshold``, else None.

        After the block come the samples that weighed most the last time. Where too few are known, as
        at first, the others follow in their order.
        """
        of = self._of
        total, largest = self._block.total, self._block.largest
        if not math.isfinite(threshold) or not math.isfinite(total):
            return None
        known = np.flatnonzero(memory.heavy & ~self._seen)
        missing = needed(largest, threshold) - total
        enough = len(known) * memory.heavy_mean >= 1.1 * missing
        rows = known if enough else np.flatnonzero(~self._seen)
        count = math.ceil(1.2 * missing / memory.heavy_mean) + 8 if enough else _CHUNK
        if not enough and self._is_near(memory, missing, len(known)):
            return None
        while rows.size:
            part, rows = rows[:count], rows[count:]
            values = of.goal_values(part)
            self._see(part, values)
            total, largest = total + float(values.sum()), max(largest, float(values.max()))
            if decides(total, largest, threshold):
                return total
            count = max(64, count // 4) if enough else count
        return None

    def _is_near(self, memory: Memory, missing: float, known: int) -> bool:
        """Whether the rest is expected to stay below ``missing``: then the whole is needed anyway."""
        of, block = self._of, self._block
        rest = of.samples - len(block.values)
        expected = max(block.total / len(block.values) * rest, known * memory.heavy_mean)
        return expected < 1.5 * missing

    def whole(self) -> dict[str, Measured]:
        """All samples in their order, for every metric; the block need not be done again."""
        of = self._of
        with torch.inference_mode():
            block = of.per_sample(self._block.output, self._block.target)
        found = {name: [values] for name, values in block.items()}
        for start in range(len(self._block.values), of.samples, _CHUNK):
            output, target = of.forward(of.val, slice(start, min(start + _CHUNK, of.samples)))
            for name, values in of.per_sample(output, target).items():
                found[name].append(values)
        self.values = {name: np.concatenate(parts) for name, parts in found.items()}
        self._see(np.arange(of.samples), self.values[of.metric])
        return {f"val/{n}": Measured(float(values.mean())) for n, values in self.values.items()}

    def _see(self, rows: npt.NDArray[np.int64], values: Values) -> None:
        self._seen[rows] = True
        self._goal_values[rows] = values

    def remember(self, memory: Memory, easiest: float) -> None:
        """Note which samples weighed much."""
        heavy = self._goal_values > easiest
        memory.heavy[self._seen] = heavy[self._seen]
        if heavy.any():
            mean = float(self._goal_values[heavy].mean())
            memory.heavy_mean = mean if math.isfinite(mean) else 1.0
