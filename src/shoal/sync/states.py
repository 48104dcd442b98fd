"""States of sync rules: how they are counted, written, read back, and follow a change of workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from shoal.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataclassT = TypeVar("DataclassT", bound=DataclassInstance)

StateValue = Tensor | float | int | str | None
FORMAT = 1
"""Version of the dictionaries that ``to_values`` writes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Counters:
    """The part that every state has.

    Args:
        steps: optimizer steps made.
        since: of them, since the last round (or since rounds began).
    """

    steps: int = 0
    since: int = 0


CountersT = TypeVar("CountersT", bound=Counters)


def counted(state: CountersT) -> CountersT:
    """The state after one more optimizer step."""
    return replace(state, steps=state.steps + 1, since=state.since + 1)


PER_ROW = {"rows": "copy"}
"""Metadata of a field with one entry per local row; a worker that joins begins with its donor's."""

PER_ROW_FROM_ZERO = {"rows": "zero"}
"""The same; a worker that joins begins with zero."""


def reseat(state: DataclassT, rows: Sequence[int], *, joined: Collection[int] = ()) -> DataclassT:
    """The state after workers have come, gone or changed places.

    Args:
        state: of the old rows.
        rows: for each new row the old row it continues, or, for a newcomer, whose state it takes over.
        joined: which of the new rows are newcomers.

    Returns:
        A state with ``len(rows)`` rows; what all workers share is unchanged.

    Example:
        >>> from shoal.sync.lookahead import LookaheadState
        >>> state = LookaheadState(slow=torch.tensor([[1.0], [2.0]]))
        >>> reseat(state, [1, 1, 0], joined=[1]).slow.tolist()
        [[2.0], [2.0], [1.0]]
    """
    changes: dict[str, Tensor] = {}
    index = torch.tensor(list(rows), dtype=torch.int64)
    for entry in fields(state):
        value = getattr(state, entry.name)
        if "rows" not in entry.metadata or value is None:
            continue
        moved = value.index_select(0, index.to(value.device))
        if entry.metadata["rows"] == "zero":
            for place in joined:
                moved[place] = 0
        changes[entry.name] = moved
    return replace(state, **changes)


def to_values(state: DataclassInstance, *, rule: str) -> dict[str, StateValue]:
    """The fields of a state as tensors and plain numbers; tensors are copies.

    Args:
        state: a dataclass of tensors, numbers and None.
        rule: name of the rule it belongs to.
    """
    values: dict[str, StateValue] = {"format": FORMAT, "rule": rule}
    for entry in fields(state):
        value = getattr(state, entry.name)
        values[entry.name] = value.detach().clone() if isinstance(value, Tensor) else value
    return values


def from_values(
    kind: type[DataclassT], values: Mapping[str, StateValue], *, rule: str
) -> DataclassT:
    """The inverse of :func:`to_values`, bit for bit; tensors are copied again.

    Args:
        kind: the state's dataclass.
        values: what :func:`to_values` gave.
        rule: name of the rule that reads it.

    Raises:
        UsageError: the format, the rule or the names of the values differ.
    """
    if values.get("format") != FORMAT:
        raise UsageError(
            f"sync state format = {values.get('format')!r}; this version reads {FORMAT}; resume with the "
            "version of shoal that wrote it"
        )
    if values.get("rule") != rule:
        raise UsageError(
            f"sync state of the rule {values.get('rule')!r}; this run uses {rule!r}; resume with the rule "
            "the run was started with (argument sync)"
        )
    expected = {entry.name for entry in fields(kind)}
    found = set(values) - {"format", "rule"}
    if found != expected:
        raise UsageError(
            f"sync state = {sorted(found)}; the rule {rule!r} keeps {sorted(expected)}; resume from a "
            "checkpoint that this version wrote"
        )
    return kind(
        **{
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in values.items()
            if name in expected
        }
    )
