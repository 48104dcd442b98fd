"""A study's rows made by hand: two curves, attempts that were given up, bounds, values not finite."""

import math

import numpy as np

from shoal.ledger.study_rows import StudyWriter
from shoal.study.records import Evaluation, Measured, Outcome, SearchKey, Trial

KEY = SearchKey(curve="sgd", global_batch=8, repeat=0)
OTHER = SearchKey(curve="nesterov", global_batch=16, repeat=1)
ERROR = "val/classification_error"


def trial(key, number, **parameters):
    return Trial(
        search=key,
        id=number,
        unit=(0.25, 0.5),
        parameters=parameters or {"lr": 0.1 * (number + 1), "momentum": 0.9},
        seed=2**62 + number,
        address=f"{number:04x}",
    )


def evaluation(step, value, bound="=", diverged=False, **more):
    metrics = {ERROR: Measured(value, bound)}
    metrics.update({f"val/{name}": Measured(number) for name, number in more.items()})
    return Evaluation(step=step, metrics=metrics, diverged=diverged)


def write_trial(writer, key, number, values, attempt, segment=0, outcome=None, first=0):
    """A trial whose error at step i is ``values[i]``."""
    if first == 0:
        writer.trial(trial(key, number), attempt=attempt, engine="pool", segment=segment)
    for step, value in enumerate(values, start=first):
        point = evaluation(step, value, cross_entropy_error=2 * value)
        writer.evaluation(key, number, point, attempt=attempt, segment=segment)
    if outcome is not None:
        last = first + len(values) - 1
        writer.outcome(key, number, outcome, last, attempt=attempt, segment=segment)


def write_study(directory):
    """Two journals, as two runners would write them, the second after the first was killed."""
    with StudyWriter(directory / "rows" / "runner-0.jsonl") as writer:
        write_trial(writer, KEY, 0, [0.9, 0.5, 0.3], "aa", outcome=Outcome.NOT_REACHED)
        write_trial(writer, KEY, 1, [0.9, 0.01, 0.01], "bb")
        write_trial(writer, KEY, 2, [0.9, math.nan], "cc", outcome=Outcome.DIVERGED)
    with StudyWriter(directory / "rows" / "runner-1.jsonl") as writer:
        # Trial 1 was begun anew; trial 3 went on from what was put aside at step 1.
        write_trial(writer, KEY, 1, [0.9, 0.6], "dd", segment=1, outcome=Outcome.NOT_REACHED)
        write_trial(writer, OTHER, 0, [0.8, math.inf, -math.inf], "ee")
        writer.evaluation(KEY, 0, evaluation(3, 0.4, ">="), attempt="aa", segment=1)
        wrong = np.array([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=bool)
        writer.samples(KEY, 0, 3, ERROR, wrong, attempt="aa", segment=1)
        writer.search(KEY, "done", end=3, draws=3, goals=[{"metric": ERROR, "steps": None}])


def shown(tables):
    """Everything in a study's tables as text."""
    return [
        (repr(tables[key]), repr([(*s[:3], s.wrong.tolist()) for s in tables.samples(key)]))
        for key in tables.searches
    ]
