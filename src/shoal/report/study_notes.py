"""What a reader of a study's page must know: warnings, the design, and what is not claimed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.report.wording import count
from shoal.study.analysis import StudyAnalysis
from shoal.study.edges import Place


def notes_of(study: StudyAnalysis) -> list[str]:
    """What a reader must know before using a number."""
    goal = study.main
    notes: list[str] = []
    at = by_curve(
        place
        for place, edges in goal.edges.items()
        if any(e.place is Place.BOUNDARY for e in edges)
    )
    if at:
        notes.append(
            f"The best settings lie at the boundary of their range: {at}. S there may be too large; "
            "recentre and run again."
        )
    if goal.void:
        notes.append(
            f"Void, since the decay's length is at the lower edge of its range: {_some(goal.void)}."
        )
    short = [s.key for s in goal.summaries if s.is_short]
    if short:
        notes.append(f"Short of feasible trials within the draw limit: {_some(short)}.")
    unfinished = [s.key for s in goal.summaries if str(s.result.reach) == "unfinished"]
    if unfinished:
        notes.append(f"Not finished yet: {_some(unfinished)}.")
    missed = [s.key for s in goal.summaries if str(s.result.reach) == "not reached"]
    if missed:
        notes.append(f"The goal was not reached, S is larger than shown: {_some(missed)}.")
    coarse = [s.key for s in goal.summaries if s.result.is_too_coarse]
    if coarse:
        notes.append(f"Below 20 steps, too few to resolve: {_some(coarse)}.")
    if study.still_falls:
        some = by_curve(study.still_falls)
        notes.append(f"More trials would still have lowered S by more than 10 %: {some}.")
    return notes


def by_curve(places: Iterable[tuple[str, int]]) -> str:
    """Places in words: ``sgd at 4, 8; nesterov at 2``."""
    found: dict[str, list[int]] = {}
    for curve, batch in places:
        found.setdefault(curve, []).append(batch)
    return "; ".join(
        f"{curve} at {', '.join(f'{batch:,}' for batch in sorted(batches))}"
        for curve, batches in sorted(found.items())
    )


def _some(keys: Sequence[object]) -> str:
    shown = ", ".join(str(key) for key in keys[:6])
    return shown + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")


def plan_rows(study: StudyAnalysis) -> list[tuple[str, str]]:
    """The design in words."""
    budget = study.settings.budget
    grid = study.settings.grid
    goals = ", ".join(f"{g.value:g}" for g in study.settings.goals)
    searches = {s.key for s in study.main.summaries}
    rows = [
        ("metric", study.main.goal.metric),
        ("goals", goals),
        ("feasible trials per search", count(budget.feasible)),
        ("draw limit", count(budget.draws)),
        ("most steps", count(budget.steps)),
        ("trained on to", "the full budget" if budget.full else f"{budget.kappa:g} × S"),
        ("searches", count(len(searches))),
        ("trials drawn", count(sum(len(s.trials) for s in study.main.summaries))),
    ]
    if grid is not None and len(grid) > 2:
        rows.append(("largest ratio of grid points", f"{grid[-1] / grid[-2]:.3g}"))
    if study.settings.train_samples is not None:
        rows.append(("training samples", count(study.settings.train_samples)))
    return rows


def expectation_notes(study: StudyAnalysis) -> list[str]:
    """What this study does not claim."""
    lines = [
        "Steps are not time; multiply S_conf by the measured time of a step at each batch.",
        "Borders are those of this workload, this goal and this range of settings.",
        "Trials are feasible at S: one that diverges later has still counted.",
    ]
    if not study.settings.budget.full and study.settings.grid is not None:
        lines.append(
            "Trials were stopped soon after the goal: nothing is said about the best error a budget buys, nor "
            "whether larger batches generalise as well."
        )
    return lines
