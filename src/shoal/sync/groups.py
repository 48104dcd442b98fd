"""Which group a worker belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.errors import UsageError


def even_groups(workers: int, groups: int) -> tuple[int, ...]:
    """Groups of neighbouring ranks, all of one size.

    Args:
        workers: p, >= 1.
        groups: how many, >= 1; must divide ``workers``.

    Returns:
        The group of each rank.

    Raises:
        UsageError: ``groups`` below 1, or does not divide ``workers``.

    Example:
        >>> even_groups(4, 2)
        (0, 0, 1, 1)
    """
    if groups < 1 or workers % groups:
        raise UsageError(
            f"groups = {groups} with {workers} workers; groups must divide the workers evenly; use "
            f"{_divisors(workers)}"
        )
    return tuple(rank * groups // workers for rank in range(workers))


def rebalanced(group_of: Sequence[int]) -> tuple[int, ...]:
    """The same number of groups, as even as can be, with as few moves as can be.

    Use it after workers have died or joined: no group may be left empty while another has two.

    Args:
        group_of: the group of each rank, however uneven; every group is numbered below the largest
            number given.

    Returns:
        The group of each rank. Sizes differ by at most one. Of an overfull group the highest ranks leave.

    Example:
        >>> rebalanced([0, 0, 0, 2])        # group 1 has died out
        (0, 0, 1, 2)
    """
    if not group_of:
        return ()
    count = max(group_of) + 1
    sizes = Counter(group_of)
    small, extra = divmod(len(group_of), count)
    # The groups that are largest now keep the larger size: nobody moves only to make up a number.
    largest_first = sorted(range(count), key=lambda g: (-sizes[g], g))
    room = {g: small + (place < extra) for place, g in enumerate(largest_first)}
    kept: list[int | None] = []
    for group in group_of:
        stays = room[group] > 0
        room[group] -= stays
        kept.append(group if stays else None)
    places = [g for g in range(count) for _ in range(room[g])]
    return tuple(places.pop(0) if group is None else group for group in kept)


def _divisors(workers: int) -> str:
    return ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
