"""Numbers, durations and the headline sentence, in words a person reads at a glance."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from shoal.report.columns import Row, number
from shoal.report.run import Run

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def count(value: float) -> str:
    """A whole number with thousands separated: ``110,000``; a dash when there is none."""
    return "–" if not math.isfinite(value) else f"{round(value):,}"


def decimal(value: float, digits: int = 4) -> str:
    """A number to ``digits`` significant digits; a dash when there is none."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:,.{digits}g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.{digits - 1}g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e15 else text


def duration(seconds: float) -> str:
    """A span of time in its two largest units: ``0.34 s``, ``2 min 51 s``, ``3 h 5 min``."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def clock(seconds: float) -> str:
    """Time since the start as on a stopwatch: ``0:31``, ``1:02:07``; a dash when there is none."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def in_words(value: int) -> str:
    """Small counts as a word (0 is ``no``), larger ones in digits."""
    return _WORDS[value] if 0 <= value < len(_WORDS) else count(value)


def final_score(run: Run) -> tuple[str, float] | None:
    """The run's last score as (name, value): of the test set if there is one, else of the last set.

    Losses are no scores. ``summary.json``'s ``accuracy`` stands in where nothing was evaluated.
    """
    named: dict[str, tuple[str, float]] = {}
    for row in run.evaluations:
        for key, value in scores_of(row).items():
            if "loss" not in key and math.isfinite(value):
                label = score_label(row, key)
                named[label] = (label, value)
                break
    tests = [entry for name, entry in named.items() if "test" in name.lower()]
    if tests:
        return tests[-1]
    told = number(run.summary.get("accuracy"))
    if math.isfinite(told):
        return ("accuracy", told)
    return list(named.values())[-1] if named else None


def scores_of(row: Row) -> dict[str, float]:
    """The named scores of an ``evaluate`` event as numbers."""
    scores = row.get("scores")
    return {str(k): number(v) for k, v in scores.items()} if isinstance(scores, Mapping) else {}


def score_label(row: Row, key: str) -> str:
    """``test accuracy`` for the score ``accuracy`` of an evaluation named ``test``."""
    name = str(row.get("name") or "").strip()
    return key if name in ("", "evaluate") else f"{name} {key}"


def longest_pause(run: Run) -> float:
    """The longest time without progress at a change of membership, in seconds; NaN if untold."""
    pauses = [number(row.get("seconds_without_progress")) for row in run.changes]
    known = [value for value in pauses if math.isfinite(value)]
    return max(known) if known else math.nan


def headline(run: Run) -> str:
    """The run in one sentence, made from its data; parts that nothing tells are left out."""
    parts = [_trained(run), _changed(run), _used(run)]
    pause = longest_pause(run)
    if math.isfinite(pause):
        parts.append(f"longest time without progress {duration(pause)}")
    score = final_score(run)
    if score:
        parts.append(f"{score[0]} {decimal(score[1], 3)}")
    return "; ".join(part for part in parts if part) + "."


def _trained(run: Run) -> str:
    steps = run.steps
    if not len(steps):
        return "No step has been committed"
    before = steps.samples[0] - _first_size(run)
    many = count(float(steps.samples[-1]) - before)
    known = steps.workers[np.isfinite(steps.workers)]
    low, high = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    who = f" on {low} to {high} workers" if low != high else f" on {high} workers"
    who = {0: "", 1: " on one worker"}.get(high, who)
    verb = "Trained" if run.finished else "Trained so far:"
    return f"{verb} {many} samples{who} in {duration(run.seconds)}"


def _first_size(run: Run) -> float:
    """Samples of the first committed step: all of them unless the run was resumed."""
    first = float(run.steps.samples[0])
    size = float(run.steps.global_batch[0])
    return min(first, size) if math.isfinite(size) else first


def _changed(run: Run) -> str:
    changes = run.changes
    if not changes:
        return "no change of membership" if len(run.steps) else ""
    killed = sum(row["kind"] == "kill" for row in changes)
    word = "change" if len(changes) == 1 else "changes"
    unannounced = f", {in_words(killed)} unannounced" if killed else ""
    return f"{len(changes)} {word} of membership{unannounced}"


def _used(run: Run) -> str:
    if not run.counts:
        return ""
    repeated, missed = run.counts["repeated"], run.counts["missed"]
    if not repeated and not missed:
        epochs = len(set(run.steps.epoch[np.isfinite(run.steps.epoch)]))
        return "every sample used exactly once" + (" per epoch" if epochs > 1 else "")
    return f"{count(repeated)} samples repeated and {count(missed)} missed"
