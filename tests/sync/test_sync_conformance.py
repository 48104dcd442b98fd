"""Every shipped rule against the shipped conformance suite, on stacked workers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.sync import RULES, SyncRule, by_name
from shoal.testing import sync as suite
from shoal.testing.sync_formulas import FORMULAS
from shoal.testing.sync_task import integer_trace

CASES: list[tuple[str, dict[str, Any]]] = [
    ("allreduce", {}),
    ("independent", {}),
    ("leader", {"sync_every": 4, "global_sync_every": 8}),
    ("leader", {"sync_every": 1, "global_sync_every": 1, "pull": 1.0}),
    ("leader", {"sync_every": 4, "global_sync_every": 4, "pull": 0.0}),
    ("leader", {"sync_every": 3, "global_sync_every": 3, "pull": 0.5, "verify": True}),
    ("leader", {"sync_every": 4, "global_sync_every": 4, "pull": 0.25, "anchor": 0.5}),
    ("easgd", {"sync_every": 4}),
    ("easgd", {"sync_every": 1, "beta": 0.5, "alpha": 0.25, "synchronous": True}),
    ("easgd", {"sync_every": 4, "beta": 0.43, "synchronous": True}),
    ("eamsgd", {"sync_every": 4, "momentum": 0.5}),
    ("downpour", {}),
    ("downpour", {"sync_every": 3}),
    ("local_sgd", {"sync_every": 4}),
    ("local_sgd", {"sync_every": 1}),
    ("local_sgd", {"sync_every": 4, "warmup_steps": 3}),
    ("slowmo", {"sync_every": 4}),
    ("bmuf", {"sync_every": 4, "block_momentum": 0.5}),
    ("bmuf", {"sync_every": 4, "block_momentum": 0.5, "nesterov": True}),
    ("diloco", {"sync_every": 4, "outer_lr": 0.5, "outer_momentum": 0.5}),
    ("diloco", {"sync_every": 4, "outer_lr": 0.5, "nesterov": False, "outer_momentum": 0.25}),
    (
        "diloco",
        {"sync_every": 6, "fragments": 3, "delay": 1, "mixing": 0.25, "outer_momentum": 0.5},
    ),
    ("lookahead", {}),
    ("sgp", {}),
    ("sgp", {"sync_every": 3, "peers": 2}),
    ("powersgd", {"warmup_steps": 2}),
    ("powersgd", {"warmup_steps": 0, "rank": 2, "min_compression": 1.0, "warm_start": False}),
    ("powersgd", {"warmup_steps": 0, "min_compression": 1.0, "error_feedback": False}),
]
STEPS, TRACED = 10, (2, 3)
GOLDEN = Path(__file__).parent / "golden_traces.json"
REWRITE = os.environ.get("SHOAL_REWRITE_GOLDEN") == "1"


def label(case: tuple[str, dict[str, Any]]) -> str:
    name, settings = case
    return "-".join([name, *(f"{key}={value}" for key, value in settings.items())])


def make(case: tuple[str, dict[str, Any]]) -> SyncRule[Any]:
    name, settings = case
    return by_name(name, **settings)


def test_every_shipped_rule_has_a_row_and_a_formula() -> None:
    assert {name for name, _ in CASES} == set(RULES)
    assert set(FORMULAS) == set(RULES)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_whole_suite(case: tuple[str, dict[str, Any]], workers: int) -> None:
    # A product of one row and that of several round differently.
    tolerance = 1e-5 if case[0] == "powersgd" else 0.0
    suite.check_rule(make(case), workers=workers, tolerance=tolerance)


def test_integer_traces_are_the_stored_ones() -> None:
    """Rewritten only by SHOAL_REWRITE_GOLDEN=1."""
    if REWRITE:
        traces = {
            f"{label(case)} x {workers}": integer_trace(make(case), workers=workers, steps=STEPS)
            for case in CASES
            for workers in TRACED
        }
        GOLDEN.write_text(
            "{\n"
            + ",\n".join(f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in traces.items())
            + "\n}\n"
        )
    golden = json.loads(GOLDEN.read_text())
    for case in CASES:
        for workers in TRACED:
            suite.check_trace(
                make(case),
                workers=workers,
                steps=STEPS,
                golden=golden,
                key=f"{label(case)} x {workers}",
            )
    assert len(golden) == len(TRACED) * len(CASES)
    with pytest.raises(UsageError, match="none is stored"):
        suite.check_trace(make(CASES[0]), workers=5, steps=1, golden=golden, key="none")


def test_names_and_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="there is no such rule; choose one of allreduce, bmuf"):
        by_name("average")
    with pytest.raises(UsageError, match="'local_sgd' has no such setting; it takes sync_every"):
        by_name("local_sgd", pull=0.1)
