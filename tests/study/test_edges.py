"""Edges: flagged where planted, not in flat dimensions, told from stability limits; the next range."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from planted import Planted, Truth

from shoal.study.edges import (
    BOUNDARY_EXIT,
    Edge,
    Place,
    cell_edges,
    edge_limited,
    exit_status,
    recenter,
    search_edges,
    void,
)
from shoal.study.records import Goal, SearchKey, Trial
from shoal.study.search_summary import SearchSummary, TrialSummary, summarise
from shoal.study.space import Discrete, Integer, Linear, Log, ReverseLog, Space
from shoal.study.steps_to_result import Reach, StepsToResult

GOAL = Goal(metric="val/error", value=0.1)


def search(
    units: list[tuple[float, ...]],
    crossings: list[int | None],
    diverged: set[int] = frozenset(),
    repeat: int = 0,
) -> SearchSummary:
    """A search of given coordinates and crossings."""
    key = SearchKey(curve="sgd", global_batch=8, repeat=repeat)
    trials = tuple(
        TrialSummary(
            trial=Trial(search=key, id=i, unit=u, parameters={}, seed=0, address=""),
            crossing=c,
            diverged=5 if i in diverged else None,
            last=100,
            is_feasible=i not in diverged,
        )
        for i, (u, c) in enumerate(zip(units, crossings, strict=True))
    )
    known = [c for c in crossings if c is not None]
    result = StepsToResult(
        goal=GOAL,
        reach=Reach.REACHED,
        steps=min(known),
        previous=min(known) - 1,
        winner=crossings.index(min(known)),
        end=100,
        draws=len(units),
        feasible=len(units) - len(diverged),
    )
    return SearchSummary(key=key, result=result, feasible=result.feasible, end=100, trials=trials)


def upward(repeat: int = 0, diverging: bool = False) -> SearchSummary:
    """The higher the first coordinate the better; the second is flat."""
    random = np.random.default_rng(repeat)
    units = [(float(u), float(random.random())) for u in np.linspace(0.01, 0.99, 40)]
    crossings: list[int | None] = [60 - i for i in range(40)]
    diverged = set(range(37, 40)) if diverging else set()
    for i in diverged:
        crossings[i] = None
    return search(units, crossings, diverged, repeat)


def test_an_edge_is_flagged_with_its_side_and_the_exit_status_is_3():
    rows = [upward(r) for r in range(3)]
    edges = cell_edges(rows, {"sgd": ["lr", "momentum"]})
    lr, momentum = edges[("sgd", 8)]
    assert lr.place is Place.BOUNDARY and lr.side == "upper"
    assert lr.words == "boundary: lr at its upper side"
    assert momentum.place is Place.INSIDE
    assert exit_status(edges) == BOUNDARY_EXIT == 3
    limited = edge_limited(rows, {"sgd": ["lr", "momentum"]})
    assert set(limited) == {r.key for r in rows}
    assert set(limited.values()) == {"boundary: lr at its upper side"}


def test_next_to_divergence_it_is_a_stability_limit():
    rows = [upward(r, diverging=True) for r in range(3)]
    (lr, _) = cell_edges(rows, {"sgd": ["lr", "momentum"]})[("sgd", 8)]
    # The best five lie at 0.84 ... 0.94 now, their median just below 0.9: inside. Shift them.
    assert lr.place is Place.INSIDE
    shifted = [
        replace(
            row,
            trials=tuple(
                replace(t, trial=replace(t.trial, unit=(min(0.999, t.trial.unit[0] + 0.04), 0.5)))
                for t in row.trials
            ),
        )
        for row in rows
    ]
    (lr, _) = cell_edges(shifted, {"sgd": ["lr", "momentum"]})[("sgd", 8)]
    assert lr.place is Place.STABILITY and lr.side == "upper"
    assert exit_status({("sgd", 8): [lr]}) == 0
    assert edge_limited(shifted, {"sgd": ["lr", "momentum"]}) == {}


def test_four_crossers_say_nothing():
    units = [(0.99,)] * 4 + [(0.5,)] * 6
    (edge,) = search_edges(search(units, [1, 2, 3, 4] + [None] * 6), ["lr"])
    assert edge.place is Place.UNKNOWN and edge.crossers == 4 and math.isnan(edge.median)
    (edge,) = search_edges(search(units, [1, 2, 3, 4, 5] + [None] * 5), ["lr"])
    assert edge.place is Place.BOUNDARY and edge.median == 0.99


def test_a_flat_dimension_is_insensitive_and_seldom_at_an_edge():
    flagged = insensitive = 0
    studies = 200
    random = np.random.default_rng(0)
    for _ in range(studies):
        rows = [
            search(
                [tuple(random.random(1)) for _ in range(40)],
                [int(c) for c in random.integers(1, 90, 40)],
                repeat=r,
            )
            for r in range(5)
        ]
        (edge,) = cell_edges(rows, {"sgd": ["momentum"]})[("sgd", 8)]
        flagged += edge.place is Place.BOUNDARY
        insensitive += bool(edge.is_insensitive)
    assert flagged == 0
    assert insensitive > 0.85 * studies
    rows = [upward(r) for r in range(3)]
    (lr, _) = cell_edges(rows, {"sgd": ["lr", "momentum"]})[("sgd", 8)]
    assert lr.is_insensitive is False


def test_one_odd_search_decides_nothing():
    inside = [
        search([(0.4 + i / 100,) for i in range(10)], list(range(1, 11)), repeat=r) for r in (1, 2)
    ]
    odd = search([(0.95,)] * 10, list(range(1, 11)), repeat=0)
    edges = cell_edges([odd, *inside], {"sgd": ["lr"]})[("sgd", 8)]
    assert edges[0].place is Place.INSIDE
    assert edge_limited([odd, *inside], {"sgd": ["lr"]}) == {}


def test_a_decay_at_its_lower_edge_voids_the_search():
    units = [(i / 50, 0.5) for i in range(20)]
    row = search(units, list(range(1, 21)))
    assert void([row], {"sgd": ["decay_steps", "lr"]}) == [row.key]
    assert void([row], {"sgd": ["lr", "decay_steps"]}) == []
    high = search([(1 - u, v) for u, v in units], list(range(1, 21)))
    assert void([high], {"sgd": ["decay_steps", "lr"]}) == []


def edge(parameter: str, place: Place, side: str | None, median: float) -> Edge:
    return Edge(parameter=parameter, place=place, side=side, median=median, crossers=20)  # type: ignore[arg-type]


def test_recentring_keeps_the_width_or_adds_a_decade():
    space = Space({"lr": Log(min=1e-3, max=1.0), "momentum": ReverseLog(min=0.0, max=0.99)})
    edges = [edge("lr", Place.BOUNDARY, "upper", 0.95), edge("momentum", Place.INSIDE, None, 0.4)]
    moved = recenter(("sgd", 8), space, edges)
    lr = moved.space["lr"]
    assert lr.max / lr.min == pytest.approx(1000)
    # Centred on the best: 10^(-3 + 0.95 * 3).
    assert math.sqrt(lr.max * lr.min) == pytest.approx(10 ** (-3 + 2.85))
    assert moved.space["momentum"] == space["momentum"]
    assert moved.changes == ("lr: 0.001 ... 1 becomes 0.02239 ... 22.39",)
    wider = recenter(("sgd", 8), space, edges, how="widen").space["lr"]
    assert (wider.min, wider.max) == (pytest.approx(1e-3), pytest.approx(10.0))
    down = [edge("lr", Place.BOUNDARY, "lower", 0.03), edges[1]]
    wider = recenter(("sgd", 8), space, down, how="widen").space["lr"]
    assert (wider.min, wider.max) == (pytest.approx(1e-4), pytest.approx(1.0))


def test_recentring_momentum_stays_within_sense():
    space = Space({"momentum": ReverseLog(min=0.9, max=0.999)})
    up = [edge("momentum", Place.BOUNDARY, "upper", 0.97)]
    wider = recenter(("sgd", 8), space, up, how="widen").space["momentum"]
    assert wider.max == pytest.approx(0.9999) and wider.min == pytest.approx(0.9)
    floor = Space({"momentum": ReverseLog(min=0.0, max=0.99)})
    down = [edge("momentum", Place.BOUNDARY, "lower", 0.02)]
    kept = recenter(("sgd", 8), floor, down, how="widen")
    assert kept.changes == ()
    assert kept.kept == ("momentum: it cannot be moved further to the lower side",)


def test_other_scales_and_stability_limits():
    space = Space(
        {
            "end_factor": Linear(min=0.0, max=0.5),
            "decay_steps": Integer(min=100, max=999, log=True),
            "eps": Discrete(values=(1e-8, 1e-6)),
            "lr": Log(min=1e-3, max=1.0),
        }
    )
    edges = [
        edge("end_factor", Place.BOUNDARY, "upper", 0.96),
        edge("decay_steps", Place.BOUNDARY, "lower", 0.04),
        edge("eps", Place.BOUNDARY, "upper", 0.95),
        edge("lr", Place.STABILITY, "upper", 0.93),
    ]
    found = recenter(("sgd", 8), space, edges, how="widen")
    assert found.space["end_factor"] == Linear(min=0.0, max=1.0)
    assert found.space["decay_steps"] == Integer(min=10, max=999, log=True)
    assert found.space["eps"] == space["eps"] and found.space["lr"] == space["lr"]
    assert len(found.changes) == 2 and len(found.kept) == 2
    assert any("diverged" in line for line in found.kept)


def test_a_planted_edge_is_found_and_recentring_cures_it():
    low = Space({"lr": Log(min=1e-5, max=4e-2)})
    truth = Truth(lr_per_sample=0.02, lr_cap=0.4, width=1.0, space=low)
    study = Planted(truths={"sgd": truth}, batches=(16,), repeats=2)

    def edges_of(planted: Planted) -> list[Edge]:
        goal = planted.goals[0]
        rows = [summarise(d, goal, planted.settings) for d in planted.tables()]
        return cell_edges(rows, planted.parameters)[("sgd", 16)]

    before = edges_of(study)
    assert before[0].place is Place.BOUNDARY and before[0].side == "upper"
    proposal = recenter(("sgd", 16), low, before)
    after = edges_of(replace(study, truths={"sgd": replace(truth, space=proposal.space)}))
    assert after[0].place is Place.INSIDE
