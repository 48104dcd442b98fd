"""Which steps count: the chain of committed steps behind the newest state. Pure functions on rows.

Every worker writes one row per step that it committed, so a step of four workers has four rows
with one id. A worker that was lost, or overwritten by a peer's state, leaves rows that are no part
of the history of the final state. They are told apart by walking back from the newest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Row = Mapping[str, object]


def committed(rows: Iterable[Row], since: float = 0.0) -> list[Row]:
    """The rows of the steps behind the newest state, oldest first, one per step.

    Starts at the row with the most ``commits`` (of several, the latest ``time``) and follows
    ``parent_row`` to the rows whose ``row`` it names, until a row has no parent or it is not there.

    Args:
        rows: the rows of all workers, in any order.
        since: when the fleet was last started, in unix seconds: steps of an earlier start that the
            checkpoint did not hold are no part of the history, however many they were. The newest
            row is looked for from then on; where there is none, among all rows.
    """
    by_id: dict[object, Row] = {}
    newest: Row | None = None
    for row in rows:
        by_id.setdefault(row["row"], row)
        if newest is None or _rank(row, since) > _rank(newest, since):
            newest = row
    chain: list[Row] = []
    seen: set[object] = set()
    while newest is not None and newest["row"] not in seen:
        seen.add(newest["row"])
        chain.append(newest)
        newest = by_id.get(newest.get("parent_row"))
    chain.reverse()
    return chain


def coverage(chain: Iterable[Row], n_total: int | None) -> tuple[int, int, int]:
    """How the samples of a run were used: (used, repeated, missed).

    A row covers the positions ``from`` (included) to ``to`` (excluded), counted from the start of the
    run on through all epochs.

    Args:
        chain: rows of :func:`committed`.
        n_total: samples the run was to train, over all epochs; None where it is not known: then
            only gaps before the last position count as missed.

    Returns:
        positions trained at least once; how often positions were trained again; positions never
        trained.
    """
    used = trained = end = 0
    for first, last in sorted((_position(row, "from"), _position(row, "to")) for row in chain):
        trained += last - first
        used += max(0, last - max(first, end))
        end = max(end, last)
    return used, trained - used, max(0, (end if n_total is None else n_total) - used)


def _rank(row: Row, since: float) -> tuple[bool, float, float]:
    commits, time = row["commits"], row.get("time", 0.0)
    assert isinstance(commits, int | float) and isinstance(time, int | float)
    return time >= since, commits, time


def _position(row: Row, key: str) -> int:
    value = row[key]
    assert isinstance(value, int)
    return value
