"""What virtual workers' models are worth: losses for choosing, metrics for the record; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.data.order import Indices
from shoal.sync.policies import recomputed
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.stack import Stack

_AT_ONCE = 1024
_STATISTICS_BATCH = 64


class Judge:
    """Evaluates rows of weights.

    Args:
        workload: model, loss, metrics and data.
        stack: whose layout the rows have.
    """

    def __init__(self, workload: Workload, stack: Stack) -> None:
        self._workload, self._stack = workload, stack
        self._model = workload.build(0).eval()
        self._x, self._y = workload.split("train")

    def metrics(
        self, vector: Tensor, buffers: Mapping[str, Tensor], split: str
    ) -> dict[str, float]:
        """The mean of every metric over a split.

        Args:
            vector: parameters ``[d]``.
            buffers: by name.
            split: ``"val"`` or ``"test"``.
        """
        x, y = self._workload.split(split)
        names = list(self._workload.metrics)
        sums = dict.fromkeys(names, 0.0)
        for part, wanted in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
            output = self._outputs(vector, buffers, part)
            for name in names:
                sums[name] += float(self._workload.metrics[name](output, wanted).double().sum())
        return {name: value / len(x) for name, value in sums.items()}

    def loss(
        self,
        vector: Tensor,
        buffers: Mapping[str, Tensor],
        samples: Indices | None = None,
    ) -> float:
        """The mean loss on training samples, or on the validation set where ``samples`` is None."""
        if samples is None:
            x, y = self._workload.split("val")
        else:
            rows = torch.from_numpy(samples)
            x, y = self._x.index_select(0, rows), self._y.index_select(0, rows)
        total = 0.0
        for part, wanted in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
            output = self._outputs(vector, buffers, part)
            total += float(self._workload.loss(output, wanted).double().sum())
        return total / len(x)

    def recomputed(
        self, vector: Tensor, buffers: Mapping[str, Tensor], samples: Indices
    ) -> dict[str, Tensor]:
        """A model's buffers with BatchNorm's statistics measured anew on training samples."""
        model = self._workload.build(0)
        model.load_state_dict(dict(self._stack.named(vector, buffers)))
        x = self._x.index_select(0, torch.from_numpy(samples))
        return {**buffers, **recomputed(model, x.split(_STATISTICS_BATCH))}

    def losses(self, vectors: Tensor, samples: Sequence[Indices | None]) -> list[float]:
        """Each row's loss of the weights ``[rows, d]``, on its own samples, with its own buffers."""
        return [
            self.loss(vector, self._row_buffers(row), chosen)
            for row, (vector, chosen) in enumerate(zip(vectors, samples, strict=True))
        ]

    def _row_buffers(self, row: int) -> dict[str, Tensor]:
        return {name: rows[row] for name, rows in self._stack.buffers.items()}

    @torch.no_grad()
    def _outputs(self, vector: Tensor, buffers: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self._model, dict(self._stack.named(vector, buffers)), (x,))
