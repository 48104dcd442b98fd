"""Bad workers, as a script has them: what a fault does to a gradient, a learning rate or a reported loss.

    flip     g -> -g                         climbs where it should descend
    noise    g -> scale * N(0, 1)            learns nothing
    nan      g -> NaN from ``from_step`` on  diverged
    frozen   lr -> 0                         computes, and never moves
    lr       lr -> scale * lr                a wrongly tuned worker
    lie      reported loss -> scale          nothing else

A lie goes with any of the others: its worker may have several faults.

Source: section 6.2 L3 and experiment E10 of the notes on Teng et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.errors import UsageError

FaultName = Literal["flip", "noise", "nan", "frozen", "lr", "lie"]

_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one worker.

    Args:
        kind: as listed above.
        scale: of ``noise``, ``lr`` and ``lie``; no meaning for the others.
        from_step: the worker's own step at which it begins, >= 0.

    Raises:
        UsageError: an unknown kind, or a number outside its range.
    """

    kind: FaultName
    scale: float = 1.0
    from_step: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultName):
            raise UsageError(
                f"fault kind = {self.kind!r}; known are {', '.join(get_args(FaultName))}; choose one"
            )
        if not math.isfinite(self.scale) or (self.kind != "lie" and self.scale < 0):
            raise UsageError(
                f"fault scale = {self.scale:g}; it multiplies, so it is finite and not negative; only the "
                "reported loss of a lie may be any number"
            )
        if self.from_step < 0:
            raise UsageError(f"fault from_step = {self.from_step}; a worker's steps count from 0")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """All faults of one worker; empty for a healthy one.

    Args:
        worker: its number; noise is drawn by it.
        seed: of the run.
        listed: the faults.
    """

    worker: int
    seed: int = 0
    listed: tuple[Fault, ...] = ()

    @property
    def touch_gradients(self) -> bool:
        """Whether any of them changes a gradient, now or later."""
        return any(fault.kind in ("flip", "noise", "nan") for fault in self.listed)

    def spoil(self, gradients: Sequence[Tensor], step: int) -> None:
        """Change a step's gradients in place.

        Args:
            gradients: of the parameters in the model's order; the same numbers whatever memory they are in.
            step: the worker's own, from 0.
        """
        for fault in self.listed:
            if step < fault.from_step:
                continue
            if fault.kind == "flip":
                for gradient in gradients:
                    gradient.neg_()
            elif fault.kind == "noise":
                self._draw(gradients, step, fault.scale)
            elif fault.kind == "nan":
                for gradient in gradients:
                    gradient.fill_(math.nan)

    def lr_factor(self, step: int) -> float:
        """What multiplies the worker's learning rate at one of its steps."""
        factor = 1.0
        for fault in self.listed:
            if fault.kind in ("frozen", "lr") and step >= fault.from_step:
                factor *= 0.0 if fault.kind == "frozen" else fault.scale
        return factor

    def reported(self, loss: float, step: int) -> float:
        """The loss the worker claims to have."""
        for fault in self.listed:
            if fault.kind == "lie" and step >= fault.from_step:
                loss = fault.scale
        return loss

    def _draw(self, gradients: Sequence[Tensor], step: int, scale: float) -> None:
        drawn = torch.Generator()
        drawn.manual_seed((self.seed * _MIX + self.worker * 0x5851F42D + step * 0x2545F491) % 2**63)
        for gradient in gradients:
            noise = torch.randn(gradient.shape, generator=drawn, dtype=gradient.dtype)
            gradient.copy_(noise).mul_(scale)
