"""A study's searches against Optuna's, and its engines against the plain loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import study_engines, study_optuna
from benchmarks.pairing import Row

GROUPS = ("optuna", "engines")


def run(groups: Sequence[str], *, quick: bool) -> list[dict[str, object]]:
    """The rows of some groups."""
    rows: list[Row] = []
    for group in GROUPS:
        if group in groups:
            print(f"study: {group} ...", file=sys.stderr, flush=True)
            rows += {"optuna": study_optuna.rows, "engines": study_engines.rows}[group](quick)
    return [row.as_dict() for row in rows]
