"""The study's engines against the plain loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import study_engines
from benchmarks.pairing import Row

GROUPS = ("engines",)


def run(groups: Sequence[str], *, quick: bool) -> list[dict[str, object]]:
    """The rows of some groups."""
    rows: list[Row] = []
    for group in GROUPS:
        if group in groups:
            print(f"study: {group} ...", file=sys.stderr, flush=True)
            rows += {"engines": study_engines.rows}[group](quick)
    return [row.as_dict() for row in rows]
