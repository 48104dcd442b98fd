"""The memory of trials that are trained side by side: one row each in a handful of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.study.engines.contract import SavedTrial

# Each parameter begins at a multiple of this many numbers and each row holds a multiple of them: matrix
# kernels see the same alignment in every row, vectorised ones no remainder, so a row's bits do not
# depend on which row it is.
_ALIGNED = 32


class NotStackable(Exception):
    """The model cannot be trained by this engine; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies within a row: ``row[offset : offset + size].view(shape)``."""

    offset: int
    size: int
    shape: tuple[int, ...]


class Layout:
    """Where each of a model's trained parameters lies within a row, and what else a trial has.

    Args:
        model: any instance of it.

    Raises:
        NotStackable: trained parameters of several types, or none.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        types = {p.dtype for p in trained.values()}
        if len(types) != 1:
            raise NotStackable(f"its trained parameters have the types {sorted(map(str, types))}")
        self.dtype = types.pop()
        self.device = next(iter(trained.values())).device
        self.places: dict[str, Place] = {}
        offset = 0
        for name, parameter in trained.items():
            shape = tuple(parameter.shape)
            self.places[name] = Place(offset=offset, size=parameter.numel(), shape=shape)
            offset += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        self.numbers = offset
        """In a row, gaps included."""
        self.frozen = {n: p.detach() for n, p in named.items() if not p.requires_grad}
        self.buffers = dict(model.named_buffers())

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of ``rows`` (..., numbers), of shape (..., *shape)."""
        return {
            name: rows[..., at.offset : at.offset + at.size].view(*rows.shape[:-1], *at.shape)
            for name, at in self.places.items()
        }


class Block:
    """Rows for a fixed number of trials. A row that no trial has is all zeros.

    Args:
        layout: of a row.
        rows: how many.
        slots: names of what the optimizer keeps.
        gradient_rows: 1 where trials take turns with one row of gradients, else ``rows``.
    """

    def __init__(
        self, layout: Layout, rows: int, slots: tuple[str, ...], *, gradient_rows: int
    ) -> None:
        self.layout = layout
        self.rows = rows

        def zeros(count: int) -> Tensor:
            shape = (count, layout.numbers)
            return torch.zeros(shape, dtype=layout.dtype, device=layout.device)

        self.parameters, self.gradients = zeros(rows), zeros(gradient_rows)
        self.slots = {name: zeros(rows) for name in slots}
        self.extra = {
            name: torch.zeros((rows, *t.shape), dtype=t.dtype, device=layout.device)
            for name, t in (layout.frozen | layout.buffers).items()
        }
        self.parameter_views = layout.views(self.parameters)
        self.gradient_views = layout.views(self.gradients)
        self._state = [self.parameters, *self.slots.values(), *self.extra.values()]

    def load(self, row: int, model: nn.Module, saved: SavedTrial | None) -> None:
        """Put a trial into a row: the model's weights, or what was saved."""
        self.clear(row)
        if saved is None:
            parameters = {f"p/{n}": p.detach() for n, p in model.named_parameters()}
            tensors = parameters | {f"b/{n}": b for n, b in model.named_buffers()}
        else:
            tensors = dict(saved.tensors)
        for name, part in self.tensors(row).items():
            if name in tensors:
                part.copy_(tensors[name])

    def tensors(self, row: int) -> dict[str, Tensor]:
        """A trial's tensors as ``SavedTrial`` names them; views of the row."""
        layout = self.layout
        named = {f"p/{n}": v[row] for n, v in self.parameter_views.items()}
        named |= {f"p/{n}": self.extra[n][row] for n in layout.frozen}
        named |= {f"b/{n}": self.extra[n][row] for n in layout.buffers}
        for slot, rows in self.slots.items():
            named |= {f"o/{slot}/{n}": v for n, v in layout.views(rows[row]).items()}
        return named

    def weights(self, row: int) -> Mapping[str, Tensor]:
        """Parameters and buffers by their names in the module; views of the row."""
        parts = {name: view[row] for name, view in self.parameter_views.items()}
        return parts | {name: rows[row] for name, rows in self.extra.items()}

    def clear(self, row: int) -> None:
        """Make a row all zeros. Gradients are written anew by every step."""
        for tensor in self._state:
            tensor[row].zero_()

    def swap(self, row: int, other: Block, other_row: int) -> None:
        """Exchange two trials' places."""
        for mine, theirs in zip(self._state, other._state, strict=True):
            kept = mine[row].clone()
            mine[row].copy_(theirs[other_row])
            theirs[other_row].copy_(kept)
