"""Sync rules: the virtual cluster against the plain loop, and who stands still on the virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import sync_still, sync_virtual
from benchmarks.pairing import Row

GROUPS = ("virtual", "still")


def run(groups: Sequence[str], *, quick: bool) -> list[dict[str, object]]:
    """The rows of some groups."""
    rows: list[Row] = []
    for group in GROUPS:
        if group in groups:
            print(f"sync: {group} ...", file=sys.stderr, flush=True)
            rows += {"virtual": sync_virtual.rows, "still": sync_still.rows}[group](quick)
    return [row.as_dict() for row in rows]
