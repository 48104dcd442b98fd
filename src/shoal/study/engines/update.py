"""The optimizers' arithmetic over rows of parameters, each row a trial with its own numbers.

Per row it is that of ``torch.optim`` (SGD and AdamW, not ``maximize``, ``dampening`` 0):

    sgd, heavy_ball, nesterov          adamw
    g <- g + wd p                      p <- p - lr wd p
    m <- mu m + g                      m <- m + (1 - b1) (g - m);   v <- b2 v + (1 - b2) g^2
    p <- p - lr (g + mu m | m)         p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Long rows are updated one by one with torch's fused kernels, which read and write each number once, while
it is in the cache; short ones all together, where the calls themselves would cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.study.spec import OptimizerName

Floats = npt.NDArray[np.float64]

# What torch.optim calls with fused=True; it has no other name.
_fused_sgd = torch._fused_sgd_  # pyright: ignore[reportPrivateImportUsage]
_fused_adamw = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]

LONG_ROW = 16384
"""Numbers from which a row is updated on its own."""

SLOTS: Mapping[OptimizerName, tuple[str, ...]] = {
    "sgd": (),
    "heavy_ball": ("momentum",),
    "nesterov": ("momentum",),
    "adamw": ("mean", "square"),
}
"""What each optimizer keeps per parameter."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One trial's optimizer.

    Args:
        lr: learning rates of steps [start, start + steps): called with (start, steps).
        momentum: mu; 0 for sgd.
        weight_decay: wd, >= 0.
        betas: (b1, b2) of adamw.
        eps: of adamw.
    """

    lr: Callable[[int, int], Floats]
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


def is_long(numbers: int, device: torch.device) -> bool:
    """Whether rows of so many numbers are updated one by one."""
    return numbers >= LONG_ROW and device.type == "cpu"


class RowUpdate:
    """Updates the first rows of (rows, numbers) tensors in place.

    Args:
        kind: the optimizer.
        decays: whether any trial may have a weight decay other than 0. Decided once for a curve: a row's
            arithmetic does not depend on its neighbours'.
        parameters: p, shape (rows, numbers), contiguous.
        gradients: g, the same, or one row of which trials take turns; overwritten.
        slots: m, or m and v, the same, in the order of ``SLOTS``.
    """

    def __init__(
        self,
        kind: OptimizerName,
        *,
        decays: bool,
        parameters: Tensor,
        gradients: Tensor,
        slots: Sequence[Tensor],
    ) -> None:
        self._kind: OptimizerName = kind
        self._decays = decays
        self._p, self._g, self._slots = parameters, gradients, tuple(slots)
        self._is_long = is_long(parameters.shape[1], parameters.device)
        shared = len(gradients) == 1
        self._rows = [
            ([parameters[r]], [gradients[0 if shared else r]], [[slot[r]] for slot in slots])
            for r in range(len(parameters))
        ]
        self._table: list[Tensor] = []
        self._numbers: list[list[float]] = []
        self._rates: list[list[float]] = []
        self._counts: list[list[Tensor]] = []

    def plan(self, settings: Sequence[Settings], first: Sequence[int], steps: int) -> None:
        """Prepare the next ``steps`` steps of rows 0, 1, ...: their numbers become tensors.

        Args:
            settings: of each row.
            first: each row's optimizer steps done so far.
            steps: how many to prepare.
        """
        lr = np.stack([s.lr(t, steps) for s, t in zip(settings, first, strict=True)], axis=1)
        if self._is_long:
            self._rates = lr.tolist()
            self._numbers = [[s.momentum, s.weight_decay, *s.betas, s.eps] for s in settings]
            self._counts = [[torch.tensor(float(t))] for t in first]
            return
        if self._kind == "adamw":
            self._table = [self._column(c) for c in _adamw_columns(settings, first, lr)]
            return
        momentum = np.array([s.momentum for s in settings])
        decay = np.array([s.weight_decay for s in settings])
        self._table = [self._column(c) for c in (-lr, momentum, decay)]

    def _column(self, values: Floats) -> Tensor:
        """(..., rows) as float tensor (..., rows, 1) that broadcasts over a row's numbers."""
        return torch.from_numpy(values).to(self._p.device, self._p.dtype).unsqueeze(-1)

    def apply(self, step: int, rows: int) -> None:
        """Update the first ``rows`` rows with the numbers of the ``step``-th step of the plan."""
        if self._is_long:
            for row in range(rows):
                self.apply_row(step, row)
        elif self._kind == "adamw":
            self._adamw(step, rows)
        else:
            self._sgd(step, rows)

    def apply_row(self, step: int, row: int) -> None:
        """Update one long row."""
        update = self._fused_adamw if self._kind == "adamw" else self._fused_sgd
        update(row, self._rates[step][row])

    def _sgd(self, step: int, rows: int) -> None:
        p, g = self._p[:rows], self._g[:rows]
        rate, momentum, decay = self._table
        if self._decays:
            g.addcmul_(p, decay)
        if self._kind != "sgd":
            m = self._slots[0][:rows]
            m.mul_(momentum).add_(g)
            g = g.addcmul_(m, momentum) if self._kind == "nesterov" else m
        p.addcmul_(g, rate[step])

    def _adamw(self, step: int, rows: int) -> None:
        p, g = self._p[:rows], self._g[:rows]
        m, v = (slot[:rows] for slot in self._slots)
        keep, size, root, beta1, rest1, beta2, rest2, eps = self._table
        if self._decays:
            p.mul_(keep[step])
        m.mul_(beta1).addcmul_(g, rest1)
        v.mul_(beta2).addcmul_(g.square_(), rest2)
        scale = torch.sqrt(v, out=g).div_(root[step]).add_(eps)
        p.addcmul_(torch.div(m, scale, out=g), size[step])

    def _fused_sgd(self, row: int, lr: float) -> None:
        p, g, slots = self._rows[row]
        momentum, decay, *_ = self._numbers[row]
        keeps = (
            self._kind != "sgd" and momentum > 0
        )  # the kernel refuses a buffer it has no use for
        _fused_sgd(
            p,
            g,
            slots[0] if keeps else [],
            weight_decay=decay,
            momentum=momentum if keeps else 0.0,
            lr=lr,
            dampening=0.0,
            nesterov=keeps and self._kind == "nesterov",
            maximize=False,
            is_first_step=False,
        )

    def _fused_adamw(self, row: int, lr: float) -> None:
        p, g, (m, v) = self._rows[row]
        _, decay, beta1, beta2, eps = self._numbers[row]
        self._counts[row][0] += 1
        _fused_adamw(
            p,
            g,
            m,
            v,
            [],
            self._counts[row],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def _adamw_columns(
    settings: Sequence[Settings], first: Sequence[int], lr: Floats
) -> tuple[Floats, ...]:
    """The numbers of each step and row; powers in double precision, as torch.optim takes them."""
    beta1 = np.array([s.betas[0] for s in settings])
    beta2 = np.array([s.betas[1] for s in settings])
    decay = np.array([s.weight_decay for s in settings])
    eps = np.array([s.eps for s in settings])
    done = np.arange(1, len(lr) + 1)[:, None] + np.array(first)
    size = -lr / (1 - beta1**done)
    return 1 - lr * decay, size, np.sqrt(1 - beta2**done), beta1, 1 - beta1, beta2, 1 - beta2, eps
