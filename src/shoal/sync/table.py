"""Every sync rule by its name: one table for the command line, recipes and the conformance tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.errors import UsageError
from shoal.sync.allreduce import AllReduce
from shoal.sync.bmuf import BMUF
from shoal.sync.contract import SyncRule
from shoal.sync.diloco import DiLoCo
from shoal.sync.downpour import Downpour
from shoal.sync.eamsgd import EAMSGD
from shoal.sync.easgd import EASGD
from shoal.sync.independent import Independent
from shoal.sync.leader import Leader
from shoal.sync.local_sgd import LocalSGD
from shoal.sync.lookahead import Lookahead
from shoal.sync.powersgd import PowerSGD
from shoal.sync.sgp import SGP
from shoal.sync.slowmo import SlowMo

ShippedRule = (
    AllReduce
    | Leader
    | EASGD
    | EAMSGD
    | Downpour
    | LocalSGD
    | SlowMo
    | BMUF
    | DiLoCo
    | Lookahead
    | SGP
    | PowerSGD
    | Independent
)

RULES: dict[str, type[ShippedRule]] = {
    rule.name: rule
    for rule in (
        AllReduce,
        Leader,
        EASGD,
        EAMSGD,
        Downpour,
        LocalSGD,
        SlowMo,
        BMUF,
        DiLoCo,
        Lookahead,
        SGP,
        PowerSGD,
        Independent,
    )
}
"""The rules shoal ships, by name."""


# The state's type depends on the name, so it is not known to the type checker.
def by_name(name: str, **settings: int | float | str | bool | None) -> SyncRule[Any]:
    """The rule called ``name`` with the given settings, as a recipe or command line writes it.

    Args:
        name: a key of ``RULES``, e.g. ``"leader"``.
        **settings: the rule's arguments, e.g. ``sync_every=16``.

    Returns:
        The rule.

    Raises:
        UsageError: no such rule, no such setting, or a value that the rule refuses.

    Example:
        >>> by_name("easgd", sync_every=16, beta=0.43)
        EASGD(sync_every=16, beta=0.43, alpha=None, synchronous=False)
    """
    if name not in RULES:
        raise UsageError(
            f"sync = {name!r}; there is no such rule; choose one of {', '.join(sorted(RULES))}"
        )
    kind = RULES[name]
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UsageError(
            f"{unknown[0]} = {settings[unknown[0]]!r}; the sync rule {name!r} has no such setting; it takes "
            f"{', '.join(known) or 'none'}"
        )
    return kind(**settings)  # pyright: ignore[reportArgumentType]
