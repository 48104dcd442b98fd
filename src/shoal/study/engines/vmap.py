"""``torch.func`` over stacked parameters: the engine for any model that ``vmap`` can batch.

One call of ``vmap(grad(functional_call))`` computes the gradients of every row of a block. Buffers that a
forward pass changes in place (running statistics) are changed in the stack. What ``vmap`` cannot do, among
it dropout and branches on a tensor's values, raises; what it does differently, such as a buffer assigned
anew in ``forward``, is found when the engine is held against the plain loop.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from shoal.study.engines.block import Block, Layout
from shoal.study.engines.task import Task
from shoal.study.engines.update import RowUpdate

_copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class VmapProgram:
    """Gradients of stacked trials by ``torch.func``.

    Args:
        task: what is trained.
        layout: of a row.
    """

    takes_turns = False

    def __init__(self, task: Task, layout: Layout) -> None:
        self._task = task
        model = task.initial(0)

        def loss(
            trained: dict[str, Tensor], others: dict[str, Tensor], x: Tensor, y: Tensor
        ) -> Tensor:
            return task.mean_loss(functional_call(model, (trained, others), (x,)), y)

        self._each = vmap(grad_and_value(loss), in_dims=(0, 0, 0, 0), randomness="error")
        self._names = list(layout.places)

    def step(
        self,
        block: Block,
        rows: int,
        samples: Tensor,
        losses: Tensor,
        update: RowUpdate,
        number: int,
    ) -> None:
        """One step: forward, backward, update; see ``Program``."""
        task = self._task
        x = task.inputs.index_select(0, samples)
        y = task.targets.index_select(0, samples)
        gradients, values = self._each(
            {n: v[:rows] for n, v in block.parameter_views.items()},
            {n: v[:rows] for n, v in block.extra.items()},
            x.view(rows, task.global_batch, *x.shape[1:]),
            y.view(rows, task.global_batch, *y.shape[1:]),
        )
        written = [block.gradient_views[name][:rows] for name in self._names]
        _copy_all(written, [cast(dict[str, Tensor], gradients)[name] for name in self._names])
        losses.copy_(values)
        update.apply(number, rows)

    def outputs(self, block: Block, rows: int, inputs: Tensor) -> Tensor | None:
        """One model after another is quicker; see ``Program``."""
        return None
