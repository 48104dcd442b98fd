"""Checks of hyper-parameters, and the way small states of numbers are written and read back."""

from __future__ import annotations

from dataclasses import asdict, fields
from math import ceil, isfinite
from typing import TYPE_CHECKING, TypeVar

from shoal.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataclassT = TypeVar("DataclassT", bound=DataclassInstance)


def whole_number(owner: str, field: str, value: object, *, at_least: int) -> None:
    """Refuse anything but a whole number of at least ``at_least``.

    Args:
        owner: what the field belongs to, as the user writes it, e.g. ``"Dynamic"``.
        field: the argument's name.
        value: what the user gave.
        at_least: the smallest value allowed.

    Raises:
        UsageError: ``value`` is not an ``int`` (a ``bool`` is none), or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{field} = {value!r}; {owner} needs a whole number of at least {at_least} there; "
            f"write {owner}({field}={at_least}), or another int"
        )
    if value < at_least:
        raise UsageError(
            f"{field} = {value}; {owner} needs at least {at_least}; "
            f"write {owner}({field}={at_least}) or more"
        )


def number_in(
    owner: str, field: str, value: object, *, low: float, high: float, open_low: bool = False
) -> None:
    """Refuse anything but a finite number in [low, high], or in (low, high] with ``open_low``.

    Raises:
        UsageError: ``value`` is no number, not finite, or outside.
    """
    fits = (
        not isinstance(value, bool)
        and isinstance(value, (int, float))
        and isfinite(value)
        and low <= value <= high
        and not (open_low and value == low)
    )
    if not fits:
        bracket = "(" if open_low else "["
        raise UsageError(
            f"{field} = {value!r}; {owner} needs a number in {bracket}{low:g}, {high:g}] there; "
            f"change the argument {field} of {owner}"
        )


def flag(owner: str, field: str, value: object) -> None:
    """Refuse anything but True or False.

    Raises:
        UsageError: ``value`` is no ``bool``.
    """
    if not isinstance(value, bool):
        raise UsageError(
            f"{field} = {value!r}; {owner} needs True or False there; write {owner}({field}=True)"
        )


def ceil_of_ratio(value: float) -> int:
    """The ceiling of a computed ratio, forgiving the last bits.

    A ratio of whole numbers that should be 24 may come out as 24.000000000000004; its ceiling is
    24.
    """
    return ceil(value * (1.0 - 1e-12))


def state_to_dict(state: DataclassInstance) -> dict[str, float | int | None]:
    """The fields of a state as plain numbers, by name."""
    return asdict(state)


def state_from_dict(
    kind: type[DataclassT], values: dict[str, float | int | None], *, rule: str
) -> DataclassT:
    """The state whose fields are ``values``: the inverse of :func:`state_to_dict`, bit for bit.

    Args:
        kind: the state's dataclass; its fields are annotated ``int`` or ``float``.
        values: what :func:`state_to_dict` gave.
        rule: the rule's name, for the error.

    Raises:
        UsageError: the names differ, as in a checkpoint that another rule has written.
    """
    expected = {field.name: field.type for field in fields(kind)}
    if set(values) != set(expected):
        raise UsageError(
            f"scaling state = {sorted(values)}; the rule {rule!r} keeps {sorted(expected)}: "
            f"another rule wrote this state; resume with the rule the run was started with "
            f"(argument scaling)"
        )
    numbers: dict[str, float | int] = {}
    for name, declared in expected.items():
        value = values[name]
        if value is None:
            raise UsageError(
                f"scaling state {name} = None; the rule {rule!r} needs a number there; "
                f"resume from an earlier checkpoint"
            )
        numbers[name] = int(value) if declared == "int" else float(value)
    return kind(**numbers)
