"""Every rule by its name: one table for the command line, recipes and the conformance tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.errors import UsageError
from shoal.scaling.adascale import AdaScale
from shoal.scaling.contract import Rule
from shoal.scaling.dynamic import Dynamic
from shoal.scaling.legw import Legw
from shoal.scaling.linear import Linear
from shoal.scaling.noise_matched import NoiseMatched
from shoal.scaling.square_root import SquareRoot
from shoal.scaling.unscaled import Unscaled

ShippedRule = Unscaled | Linear | SquareRoot | Dynamic | NoiseMatched | AdaScale | Legw

RULES: dict[str, type[ShippedRule]] = {
    rule.name: rule
    for rule in (Unscaled, Linear, SquareRoot, Dynamic, NoiseMatched, AdaScale, Legw)
}
"""The rules shoal ships, by name."""


# The state's type depends on the name, so it is not known to the type checker.
def by_name(name: str, **settings: int | float | str | bool) -> Rule[Any]:
    """The rule called ``name`` with the given settings, as a recipe or command line writes it.

    Args:
        name: a key of ``RULES``, e.g. ``"dynamic"``.
        **settings: the rule's arguments, e.g. ``reference_batch=256``.

    Returns:
        The rule.

    Raises:
        UsageError: no such rule, no such setting, a setting missing, or a value that the rule
            refuses.

    Example:
        >>> by_name("linear", reference_batch=256)
        Linear(reference_batch=256, momentum_correction=True)
    """
    if name not in RULES:
        raise UsageError(
            f"scaling = {name!r}; there is no such rule; choose one of {', '.join(sorted(RULES))}"
        )
    kind = RULES[name]
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UsageError(
            f"{unknown[0]} = {settings[unknown[0]]!r}; the scaling rule {name!r} has no such "
            f"setting; it takes {', '.join(known)}"
        )
    try:
        return kind(**settings)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise UsageError(
            f"scaling = {name!r}; a setting is missing ({error}); it takes {', '.join(known)}"
        ) from error
