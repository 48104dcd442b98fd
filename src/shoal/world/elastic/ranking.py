"""The order of a fleet's workers: what decides who has which rank."""

from __future__ import annotations


def rank_order(name: str) -> tuple[str, int, str]:
    """The key by which workers are sorted: the text before a name's number, then the number.

    The first in this order has rank 0 and speaks for the fleet: it writes checkpoints and the final
    weights. ``shoal run`` calls the workers on its own machine ``w0``, ``w1``, ... and those on machines
    that joined ``x2``, ``x3``, ...: as long as one of its own is there, what is written is written on its
    machine.

    Args:
        name: a worker's name.

    Returns:
        A key for :func:`sorted` and :func:`min`; equal for equal names alone.

    Example:
        >>> sorted(["x3", "w10", "w2"], key=rank_order)
        ['w2', 'w10', 'x3']
    """
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name
