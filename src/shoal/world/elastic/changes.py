"""What a change of membership is called."""

from __future__ import annotations

from collections.abc import Sequence, Set

from shoal.world.contract import Change


def changes_between(
    old: Sequence[str], new: Sequence[str], departed: Set[str] = frozenset()
) -> list[Change]:
    """The changes that lead from one membership to the next, losses first.

    Args:
        old: names before; empty for a worker that was in none, which saw no change.
        new: names after.
        departed: names that had announced their leave.

    Returns:
        At most one change of each kind: ``leave``, ``kill``, ``join``.
    """
    if not old:
        return []
    gone = [name for name in old if name not in new]
    groups = (
        ("leave", tuple(name for name in gone if name in departed), -1),
        ("kill", tuple(name for name in gone if name not in departed), -1),
        ("join", tuple(name for name in new if name not in old), 1),
    )
    changes: list[Change] = []
    workers = len(old)
    for kind, names, sign in groups:
        if names:
            after = workers + sign * len(names)
            changes.append(
                Change(kind=kind, workers_before=workers, workers_after=after, names=names)
            )
            workers = after
    return changes
