"""Run directories made by the tests, with everything a supervisor and its workers write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START = 1_760_000_000.0
SAMPLES = 20_000


@dataclass
class MadeRun:
    """A synthetic run: the directory and the numbers that went into it."""

    directory: Path
    steps: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    summary: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def membership(kind: str, step: int, before: list[str], after: list[str], **extra: object) -> dict:
    names = sorted(set(before) ^ set(after))
    return {
        "kind": kind,
        "step": step,
        "workers_before": len(before),
        "workers_after": len(after),
        "names": names,
        **extra,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., MadeRun]:
    """Writes a run of workers 1 -> 3 -> 4 -> 3 -> 2 (or as scripted); returns what went into it."""
    counter = iter(range(1000))

    def make(
        *,
        total: int = 60_000,
        local_batch: int = 64,
        script: tuple[tuple[float, str, tuple[str, ...], float], ...] = (
            (0.0, "", ("w0",), 0.0),
            (0.18, "join", ("w0", "w1", "w2"), 0.21),
            (0.42, "join", ("w0", "w1", "w2", "w3"), 0.12),
            (0.63, "kill", ("w0", "w1", "w3"), 0.34),
            (0.82, "leave", ("w1", "w3"), 0.04),
        ),
        evaluate: bool = True,
        losses: Callable[[int], float] | None = None,
        summary: bool = True,
        name: str | None = None,
    ) -> MadeRun:
        made = MadeRun(tmp_path / (name or f"run-{next(counter)}"))
        made.directory.mkdir()
        rows: dict[str, list[dict]] = {}
        samples, clock, step, base = 0, START, 0, 0.02
        stages = list(script)
        workers = list(stages.pop(0)[2])
        multiplier = float(len(workers))
        anchor, anchor_step, ramp = multiplier, 0, 0
        while samples < total:
            if stages and samples >= stages[0][0] * total:
                _, kind, after, pause = stages.pop(0)
                clock += pause
                ratio = len(after) / multiplier
                anchor, anchor_step = multiplier, step
                ramp = math.ceil(8 * ratio) if ratio > 1 else 0
                made.events.append(
                    membership(
                        kind,
                        step,
                        workers,
                        list(after),
                        samples=samples,
                        time=clock,
                        global_batch=local_batch * len(after),
                        lr=base * (multiplier if ramp else len(after)),
                        lr_target=base * len(after),
                        ramp_end_step=step + ramp if ramp else None,
                        seconds_without_progress=pause,
                    )
                )
                workers = list(after)
            part = 1.0 if not ramp else min(1.0, (step - anchor_step) / ramp)
            multiplier = anchor + part * (len(workers) - anchor)
            epoch, position = divmod(samples, SAMPLES)
            taken = min(local_batch * len(workers), SAMPLES - position, total - samples)
            clock += 0.11 + 0.02 * len(workers)
            wobble = 0.25 * math.sin(step * 2.1) * math.sin(step * 0.77)
            loss = 0.3 + 2.0 * math.exp(-samples / 15_000) * (1 + wobble * 0.5)
            for rank, worker in enumerate(workers):
                rows.setdefault(worker, []).append(
                    {
                        "step": step + 1,
                        "commits": step + 1,
                        "row": f"r{step + 1}",
                        "parent_row": f"r{step}" if step else "",
                        "epoch": epoch,
                        "from": samples,
                        "to": samples + taken,
                        "workers": len(workers),
                        "rank": rank,
                        "global_batch": local_batch * len(workers),
                        "samples": samples + taken,
                        "lr": base * multiplier,
                        "multiplier": multiplier,
                        "lr_target": base * len(workers),
                        "loss": losses(step) if losses else loss,
                        "time": clock + 0.001 * rank,
                    }
                )
            samples += taken
            step += 1
            if evaluate and (samples % SAMPLES == 0):
                made.evaluations.append(
                    {
                        "kind": "evaluate",
                        "step": step,
                        "samples": samples,
                        "epoch": epoch,
                        "name": "test",
                        "scores": {
                            "accuracy": 0.9 - 0.5 * math.exp(-samples / 18_000),
                            "loss": 0.3 + 2.0 * math.exp(-samples / 15_000),
                        },
                        "time": clock,
                    }
                )
            made.steps.append({"samples": samples, "workers": list(workers), "time": clock})
        made.seconds = clock - START
        for worker, own in rows.items():
            write_lines(made.directory / "metrics" / f"{worker}.jsonl", own)
        checkpoints = [
            {"kind": "checkpoint", "step": s, "samples": row["samples"], "time": row["time"]}
            for s, row in enumerate(made.steps)
            if s % 60 == 59
        ]
        started = {"kind": "start", "time": START}
        everything = [started, *made.events, *made.evaluations, *checkpoints]
        write_lines(
            made.directory / "events.jsonl", sorted(everything, key=lambda row: row["time"])
        )
        made.config = configuration(local_batch, len(workers))
        (made.directory / "run.json").write_text(json.dumps(made.config))
        if summary:
            made.summary = {
                "dataset": "synthetic",
                "seconds": made.seconds,
                "accuracy": made.evaluations[-1]["scores"]["accuracy"]
                if made.evaluations
                else None,
                "accuracy_static": 0.884,
                "accuracy_linear_at_once": 0.871,
                "samples_expected": total,
                "samples_used": total,
                "samples_repeated": 0,
                "samples_missed": 0,
                "restarts_of_survivors": 0,
            }
            (made.directory / "summary.json").write_text(json.dumps(made.summary))
        return made

    return make


def configuration(local_batch: int, workers: int) -> dict:
    return {
        "model": {"name": "SmallCNN", "parameters": 351_210, "batch_norm_layers": 0},
        "optimizer": {"kind": "heavy_ball", "lr": [0.02], "momentum": 0.9, "weight_decay": 5e-4},
        "scaling": {
            "name": "dynamic",
            "reference_batch": local_batch,
            "ramp_steps": "8r",
            "down": "at_once",
            "state": None,
        },
        "schedule": {"name": "cosine", "warmup_samples": 2000},
        "batch_policy": {"name": "proportional", "samples": None},
        "local_batch": local_batch,
        "micro_batch": local_batch,
        "global_batch": local_batch * workers,
        "workers": workers,
        "samples": SAMPLES,
        "epochs": 3,
        "total_samples": None,
        "seed": 0,
        "precision": "fp32",
        "device": "cpu",
        "batch_norm": "worker",
        "deterministic": False,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "torchft": "0.2.0", "shoal": "0.1.0"},
    }
