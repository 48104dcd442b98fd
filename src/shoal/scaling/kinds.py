"""Families of optimizers, by the kinds that ``shoal.scaling.contract.optimizer_kind`` gives."""

from __future__ import annotations

SGD_FAMILY: frozenset[str] = frozenset({"sgd", "heavy_ball", "nesterov"})
"""Optimizers whose step is the learning rate times a weighted sum of gradients."""

ADAM_FAMILY: frozenset[str] = frozenset({"adam", "adamw"})
"""Optimizers whose step is divided by a running root mean square of the gradient."""

ANY_OPTIMIZER: frozenset[str] = SGD_FAMILY | ADAM_FAMILY | {"any"}
"""Every kind, those that shoal has no name for included."""
