"""Seconds and bytes for people."""

from __future__ import annotations

_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60


def duration(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``3 min``, ``1.5 h``, ``2.3 d``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / _DAY:.1f} d"


def size(count: float) -> str:
    """``512 B``, ``3.4 KiB``, ``120 MiB``, ``1.2 GiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.1f} {unit}"
