"""The engine a study chooses against the plain loop, on the same trials.

`engine_MODEL_bB`       all slots filled and equally many steps for every trial.
`engine_MODEL_bB_refill`  as a search has it: trials of very uneven length, which leave at their end, are
                        advanced from one grid point to the next; what the last few lose is counted.

Both sides train the same trials to the same steps, one process and one thread each, in turn. The cost is the
processor's seconds: the machine's other work does not lengthen them. Evaluation takes no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from benchmarks.pairing import Row, paired
from shoal.study.engines.build import Candidate, build_engine
from shoal.study.engines.contest import Choice, contest
from shoal.study.engines.equality import trials_of
from shoal.study.engines.task import Task
from shoal.study.grid import Grid
from shoal.study.records import Trial
from shoal.study.space import Log, ReverseLog, Space
from shoal.study.spec import CurveSpec
from shoal.study.workload import Workload, load_workload

MODELS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "digits": ("digits_mlp", (1, 8, 64, 512)),
    "mlp200k": ("fashion_fc", (1, 8, 64, 512)),
    "cnn20k": ("fashion_cnn", (1, 8, 64, 512)),
}
CURVE = CurveSpec(
    optimizer="nesterov",
    space=Space({"lr": Log(min=1e-4, max=0.1), "momentum": ReverseLog(min=0.5, max=0.99)}),
)
POOL = Candidate(engine="pool")

SEARCH_SECONDS = 60.0
"""What a search is said to take: contests get their least, 2 seconds."""
SIDE_SECONDS = 1.0
"""About what the plain loop takes in one pair."""


def rows(quick: bool) -> list[Row]:
    """Two rows for each model and batch size."""
    torch.set_num_threads(1)
    found: list[Row] = []
    pairs = 5 if quick else 11
    for name, (workload_name, batches) in MODELS.items():
        workload = load_workload(workload_name)
        for batch in batches:
            found += _compare(name, workload, batch, pairs)
    return found


def _compare(name: str, workload: Workload, batch: int, pairs: int) -> list[Row]:
    task = Task(workload=workload, curve=CURVE, global_batch=batch)
    choice = contest(task, search_seconds=SEARCH_SECONDS, trials=40)
    slots = choice.candidate.slots
    seconds = choice.step_seconds["pool"]
    steps = max(2, int(SIDE_SECONDS / seconds / slots))
    trials = trials_of(task, slots, reach=0.5)
    label = f"engine_{name}_b{batch}"
    peer = "the plain loop, torch.optim fused"
    note = f"{choice.candidate}; contest {choice.seconds:.1f} s"
    full = _pairs(task, choice, trials, lambda t: dict.fromkeys((x.id for x in t), steps), pairs)
    found = [paired(label, "seconds", *full, peer=peer, note=note)]
    many = trials_of(task, max(2 * slots, 8) + slots // 2, reach=0.5)
    total = SIDE_SECONDS / seconds / len(many)
    uneven = _pairs(task, choice, many, lambda t: _lengths(t, total), pairs)
    return [*found, paired(f"{label}_refill", "seconds", *uneven, peer=peer, note=note)]


def _lengths(trials: Sequence[Trial], mean: float) -> dict[int, int]:
    """Log-normal lengths, a third of them cut early as by divergence."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(0.0, 0.8, len(trials))
    drawn[rng.random(len(trials)) < 1 / 3] *= 0.1
    drawn *= mean / drawn.mean()
    return {trial.id: max(1, int(steps)) for trial, steps in zip(trials, drawn, strict=True)}


def _pairs(
    task: Task,
    choice: Choice,
    trials: Sequence[Trial],
    lengths: Callable[[Sequence[Trial]], dict[int, int]],
    pairs: int,
) -> tuple[list[float], list[float]]:
    ours: list[float] = []
    theirs: list[float] = []
    ends = lengths(trials)
    for number in range(pairs + 1):
        order = ((ours, choice.candidate), (theirs, POOL))
        for costs, candidate in order if number % 2 else reversed(order):
            costs.append(_cost(task, candidate, trials, ends))
    return ours[1:], theirs[1:]  # the first pair pays for what is made on first use


def _cost(
    task: Task, candidate: Candidate, trials: Sequence[Trial], ends: Mapping[int, int]
) -> float:
    """Seconds that training takes, trial by trial or side by side, along the study's grid."""
    engine = build_engine(task, candidate)
    for trial in trials:
        engine.admit(trial)
    live = dict(ends)
    began = time.process_time()
    for point in Grid().points(2 * max(ends.values())):
        targets = {number: min(point, end) for number, end in live.items()}
        for portion in engine.portions(sorted(targets)):
            engine.advance({number: targets[number] for number in portion})
        for number in [n for n, end in live.items() if end <= point]:
            engine.release(number)
            del live[number]
        if not live:
            break
    return time.process_time() - began
