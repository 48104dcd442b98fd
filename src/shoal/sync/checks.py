"""Checks of the hyper-parameters that only sync rules have."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import UsageError


def one_of(owner: str, field: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything but one of ``choices``.

    Raises:
        UsageError: ``value`` is none of them.
    """
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise UsageError(
            f"{field} = {value!r}; {owner} needs one of {known} there; "
            f"write {owner}({field}={choices[0]!r})"
        )


def momentum_policy(owner: str, value: object) -> None:
    """Refuse an unknown policy for momentum buffers."""
    one_of(owner, "momentum_policy", value, ("keep", "reset", "interpolate"))


def statistics_policy(owner: str, value: object) -> None:
    """Refuse an unknown policy for BatchNorm statistics."""
    one_of(owner, "statistics_policy", value, ("own", "leader", "mean", "recompute"))


def mean_statistics_policy(owner: str, value: object) -> None:
    """As :func:`statistics_policy`, for rules that have no leader."""
    one_of(owner, "statistics_policy", value, ("own", "mean", "recompute"))


def multiple(owner: str, field: str, value: int, *, of: int, of_field: str = "sync_every") -> None:
    """Refuse a whole number that is not a multiple of another.

    Raises:
        UsageError: ``value`` is none.
    """
    if value % of:
        nearest = max(of, round(value / of) * of)
        raise UsageError(
            f"{field} = {value}; {owner} needs a multiple of {of_field} = {of} there; "
            f"write {owner}({field}={nearest})"
        )
