"""A runner that writes evaluations at a given rate; prints what it did as JSON."""

from __future__ import annotations

import json
import sys
import time

from shoal.ledger.study_rows import StudyWriter
from shoal.study.records import Evaluation, Measured, SearchKey, Trial

TICK_SECONDS = 0.01


def main(path: str, number: int, rate: int, seconds: float) -> None:
    """Write ``rate`` evaluations a second, from the moment that a line on standard input names."""
    key = SearchKey(curve="sgd", global_batch=2**number, repeat=0)
    trial = Trial(search=key, id=0, unit=(0.5,), parameters={"lr": 0.1}, seed=1, address="a")
    metrics = {
        "val/classification_error": Measured(0.123456789),
        "val/cross_entropy_error": Measured(0.987654321),
        "train/loss": Measured(0.55555555),
    }
    late: list[float] = []
    worst = 0.0
    per_tick = int(rate * TICK_SECONDS)
    ticks = round(seconds / TICK_SECONDS)
    with StudyWriter(path) as writer:
        writer.trial(trial, attempt="a", engine="none")
        print("ready", flush=True)
        used = time.process_time()
        start = float(sys.stdin.readline())
        step = 0
        for tick in range(ticks):
            due = start + tick * TICK_SECONDS
            time.sleep(max(0.0, due - time.time()))
            for _ in range(per_tick):
                evaluation = Evaluation(step=step, metrics=metrics)
                before = time.perf_counter()
                writer.evaluation(key, 0, evaluation, attempt="a")
                worst = max(worst, time.perf_counter() - before)
                step += 1
            late.append(time.time() - due)
        taken = time.time() - start
    answer = {"rows": step, "seconds": taken, "worst": worst, "late": max(late)}
    print(json.dumps({**answer, "cpu": time.process_time() - used}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
