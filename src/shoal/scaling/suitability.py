"""Whether a rule fits an optimizer, and a global batch lies in what the rule was tested at."""

from __future__ import annotations

from typing import Protocol

from shoal.errors import UsageError
from shoal.scaling.contract import optimizer_kind
from shoal.scaling.table import RULES


class Declared(Protocol):
    """The declarations of a rule; every :class:`shoal.scaling.Rule` has them."""

    @property
    def name(self) -> str:
        """The rule's name."""
        ...

    @property
    def reference_batch(self) -> int:
        """The global batch at which the base learning rate was tuned, in samples."""
        ...

    @property
    def optimizers(self) -> frozenset[str]:
        """Kinds of optimizer the rule is meant for; ``"any"`` among them allows every one."""
        ...

    @property
    def tested_ratio(self) -> float:
        """Largest ratio of batches, or its inverse, the rule was tested at."""
        ...


def check_optimizer(rule: Declared, optimizer: object) -> None:
    """Refuse a rule that is not meant for the optimizer.

    Args:
        rule: the scaling rule.
        optimizer: a torch optimizer; its first parameter group says whether it has momentum.

    Raises:
        UsageError: the optimizer's kind is not among ``rule.optimizers``.
    """
    kind = optimizer_kind(optimizer)
    if "any" in rule.optimizers or kind in rule.optimizers:
        return
    if kind == "sgd_with_dampening":
        raise UsageError(
            f"optimizer = {type(optimizer).__name__} ({kind}); the scaling rule {rule.name!r} "
            f"assumes dampening 0; create the optimizer with dampening=0, or use scaling=Unscaled()"
        )
    fitting = [
        other.__name__
        for other in RULES.values()
        if kind in other.optimizers or "any" in other.optimizers
    ]
    raise UsageError(
        f"optimizer = {type(optimizer).__name__} ({kind}); the scaling rule {rule.name!r} is meant "
        f"for {', '.join(sorted(rule.optimizers))}; for {kind} use {' or '.join(fitting)} "
        f"(argument scaling), or change the optimizer"
    )


def check_range(rule: Declared, global_batch: int) -> str | None:
    """Say so when a global batch is further from the reference batch than the rule was tested.

    Args:
        rule: the scaling rule.
        global_batch: the nominal global batch, in samples, >= 1.

    Returns:
        The text of a warning, or None within the tested range.
    """
    ratio = global_batch / rule.reference_batch
    if 1.0 / rule.tested_ratio <= ratio <= rule.tested_ratio:
        return None
    distance = f"{ratio:g} times" if ratio >= 1.0 else f"1/{1.0 / ratio:g} of"
    return (
        f"global_batch = {global_batch}; that is {distance} "
        f"reference_batch = {rule.reference_batch}, and the scaling rule {rule.name!r} was tested "
        f"only up to a ratio of {rule.tested_ratio:g}; tune the base learning rate at a nearer "
        f"batch and set reference_batch to it, or choose another batch policy"
    )
