"""All virtual workers' models in a handful of tensors: one row each, without gaps between parameters.

A sync rule works on ``parameters[:workers]`` of shape (workers, numbers); the bytes it moves are therefore
those of the parameters and nothing else. Rows 0, 1, ... are those of the workers that are there, in the
order that the cluster keeps; those behind are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Size, Tensor, nn

from shoal.errors import UsageError
from shoal.study.curve_spec import OptimizerName
from shoal.study.engines.block import Layout, NotStackable, Place
from shoal.study.engines.update import SLOTS
from shoal.sync.policies import Carried


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The workers' optimizer, torch's own arithmetic.

    Args:
        kind: ``sgd``, ``heavy_ball``, ``nesterov`` or ``adamw``.
        lr: base learning rate, >= 0.
        momentum: in [0, 1); no meaning for ``sgd`` and ``adamw``.
        weight_decay: >= 0; decoupled for ``adamw``.
        betas: of ``adamw``.
        eps: of ``adamw``.

    Raises:
        UsageError: an unknown kind, or a number outside its range.
    """

    kind: OptimizerName = "heavy_ball"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.kind not in SLOTS:
            raise UsageError(
                f"optimizer kind = {self.kind!r}; known are {', '.join(SLOTS)}; choose one"
            )
        if not (self.lr >= 0 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise UsageError(
                f"optimizer lr = {self.lr:g}, momentum = {self.momentum:g}, weight_decay = "
                f"{self.weight_decay:g}; lr and weight_decay are 0 or more, momentum is in [0, 1)"
            )
        object.__setattr__(self, "betas", tuple(self.betas))

    @property
    def slots(self) -> tuple[str, ...]:
        """What it keeps per parameter."""
        return SLOTS[self.kind]


class DenseLayout(Layout):
    """Where each parameter lies within a row: one behind the other.

    Args:
        model: any instance of it.

    Raises:
        NotStackable: trained parameters of several types, or none; parameters that are not trained.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if self.frozen:
            raise NotStackable(f"its parameters {', '.join(self.frozen)} are not trained")
        offset = 0
        for name, place in self.places.items():
            self.places[name] = Place(offset=offset, size=place.size, shape=place.shape)
            offset += place.size
        self.numbers = offset


class Stack:
    """Parameters, optimizer state and buffers of up to ``capacity`` workers.

    Args:
        model: any instance of the model.
        optimizer: decides what is kept per parameter.
        capacity: rows.

    Raises:
        UsageError: the model cannot be laid out in rows.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, capacity: int) -> None:
        try:
            self.layout = DenseLayout(model)
        except NotStackable as error:
            raise UsageError(
                f"model = {type(model).__name__}; virtual workers lie in rows of one tensor, but {error}"
            ) from error
        layout = self.layout

        def rows() -> Tensor:
            return torch.zeros((capacity, layout.numbers), dtype=layout.dtype, device=layout.device)

        self.parameters = rows()
        self.slots = {name: rows() for name in optimizer.slots}
        self.buffers = {
            name: torch.zeros((capacity, *buffer.shape), dtype=buffer.dtype, device=layout.device)
            for name, buffer in layout.buffers.items()
        }
        self.steps = [0] * capacity
        """Optimizer steps behind each row's optimizer state."""

    @property
    def capacity(self) -> int:
        """Rows there are."""
        return len(self.parameters)

    @property
    def shapes(self) -> list[Size]:
        """Shapes of the parameters in order."""
        return [Size(place.shape) for place in self.layout.places.values()]

    @property
    def snapshot_bytes(self) -> int:
        """Of all that one worker hands to a newcomer: parameters, optimizer state, buffers."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self._tensors())

    @torch.no_grad()
    def load(self, row: int, model: nn.Module) -> None:
        """A model's weights, and an optimizer that has done nothing, into a row."""
        for name, view in self.layout.views(self.parameters[row]).items():
            view.copy_(model.get_parameter(name))
        for name, buffer in model.named_buffers():
            self.buffers[name][row].copy_(buffer)
        for slot in self.slots.values():
            slot[row].zero_()
        self.steps[row] = 0

    @torch.no_grad()
    def reorder(self, rows: Sequence[int]) -> None:
        """Let row ``rows[i]`` become row i; the others keep what they are or become free."""
        if list(rows) == list(range(len(rows))):
            return
        order = torch.as_tensor(rows, device=self.layout.device)
        for tensor in self._tensors():
            tensor[: len(rows)] = tensor[order]
        self.steps[: len(rows)] = [self.steps[row] for row in rows]

    def spare(self, rows: int) -> Stack:
        """Empty rows of the same kind, elsewhere in memory."""
        other = copy(self)
        other.parameters = self.parameters.new_zeros((rows, self.layout.numbers))
        other.slots = {name: torch.zeros_like(other.parameters) for name in self.slots}
        other.buffers = {
            name: buffer.new_zeros((rows, *buffer.shape[1:]))
            for name, buffer in self.buffers.items()
        }
        other.steps = [0] * rows
        return other

    @torch.no_grad()
    def gather(self, other: Stack, rows: Sequence[int]) -> None:
        """Rows of another stack become the first ones of this."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            for place, row in enumerate(rows):
                mine[place].copy_(theirs[row])

    @torch.no_grad()
    def scatter(self, other: Stack, rows: Sequence[int]) -> None:
        """The inverse of :meth:`gather`."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            for place, row in enumerate(rows):
                theirs[row].copy_(mine[place])

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Everything of one row into another."""
        for tensor in self._tensors():
            tensor[target] = tensor[source]
        self.steps[target] = self.steps[source]

    def carried(self, rows: int, slow: Mapping[str, Tensor]) -> Carried:
        """What the first rows hold beside their weights, for a rule's policies.

        Args:
            rows: how many.
            slow: momentum after the last look back, as the policies gave it.
        """
        momentum = {name: slot[:rows] for name, slot in self.slots.items()}
        if momentum:
            steps = torch.tensor(self.steps[:rows], dtype=torch.float64)
            momentum["step"] = steps.unsqueeze(1)
        statistics = {name: buffer[:rows] for name, buffer in self.buffers.items()}
        return Carried(momentum=momentum, statistics=statistics, slow_momentum=slow)

    @torch.no_grad()
    def take(self, carried: Carried, rows: int) -> None:
        """The inverse of :meth:`carried`: what the policies made of it."""
        for name, value in carried.momentum.items():
            if name == "step":
                self.steps[:rows] = [round(step) for step in value[:, 0].tolist()]
            else:
                self.slots[name][:rows] = value
        for name, value in carried.statistics.items():
            self.buffers[name][:rows] = value

    def weights(self, row: int) -> Mapping[str, Tensor]:
        """Parameters and buffers of a row by their names in the module; views."""
        named = self.layout.views(self.parameters[row])
        return named | {name: rows[row] for name, rows in self.buffers.items()}

    def named(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A vector of parameters, and buffers, by their names in the module."""
        return {**self.layout.views(vector), **buffers}

    def _tensors(self) -> list[Tensor]:
        return [self.parameters, *self.slots.values(), *self.buffers.values()]
