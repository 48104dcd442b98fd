"""Guards against the left-overs of a plain loop: they would update twice, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError


class OptimizerGuard:
    """Makes ``optimizer.step()`` and foreign changes of the learning rate an error.

    Raises:
        UsageError: at construction, when a torch lr scheduler is already attached.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._stepping = False
        self._expected = _rates(optimizer)
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise UsageError(
                "optimizer = one with a torch lr scheduler attached; shoal sets the learning rate from "
                "its schedule and scaling rule; remove the scheduler and pass schedule=shoal.schedules...."
            )
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise UsageError(
                "optimizer.step() was called beside the fleet; the update would be made twice; "
                "call fleet.step() instead"
            )

    @contextmanager
    def stepping(self, rates: list[float]) -> Iterator[None]:
        """Set the groups' learning rates for one update by the fleet itself."""
        self.check()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._expected = list(rates)
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Raise UsageError if somebody else changed a learning rate since the last step."""
        found = _rates(self._optimizer)
        if any(
            abs(a - b) > 1e-12 + 1e-6 * abs(b) for a, b in zip(found, self._expected, strict=True)
        ):
            raise UsageError(
                f"lr = {found}, but shoal had set {self._expected}; a scheduler or the loop changes it "
                "too; leave the learning rate to shoal (schedule=, scaling=)"
            )

    def forget(self) -> None:
        """Accept whatever rates are in the optimizer now (after a load)."""
        self._expected = _rates(self._optimizer)

    def close(self) -> None:
        """Remove the guard."""
        self._hook.remove()


def check_parameters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    known: Sequence[nn.Parameter],
    groups: int,
) -> None:
    """Make sure that the parameters to train are those the fleet began with.

    Args:
        known: the parameters that are exchanged.
        groups: the number of the optimizer's parameter groups at ``shoal.init``.

    Raises:
        UsageError: a parameter was unfrozen, or a parameter group added, since ``shoal.init``.
    """
    exchanged = set(known)
    if any(p.requires_grad and p not in exchanged for p in model.parameters()):
        raise UsageError(
            "model = a parameter requires a gradient now and did not at shoal.init; it would not be "
            "exchanged; unfreeze before shoal.init, or set its group's lr to 0 until it is to train"
        )
    if len(optimizer.param_groups) != groups:
        raise UsageError(
            f"optimizer = {len(optimizer.param_groups)} parameter groups, but {groups} at shoal.init; add "
            "all groups before shoal.init"
        )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
