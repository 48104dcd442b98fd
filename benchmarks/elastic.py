"""What elasticity costs: step time against plain DDP, and time without progress at every kind of change.

    python -m benchmarks elastic [--json] [--rows step,kill,leave,join,coordinator,memory] [--quick]

Everything runs on loopback with the defaults that users of ``shoal run`` get.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic_changes import coordinator_rows, kill_and_join_rows, leave_rows
from benchmarks.elastic_launches import shoal_run
from benchmarks.order import run as order_rows
from benchmarks.pairing import Row, paired

HERE = Path(__file__).parent
SIZES = ("13k", "351k", "3m")
GROUPS = ("step", "memory", "kill", "leave", "join", "coordinator", "order")


# -- (a) step time and (e) memory ---------------------------------------------------------------------


def step_rows(out: Path, *, pairs: int) -> list[Row]:
    """Seconds a step at three sizes, shoal against DDP in the same two processes, alternating."""
    rows = []
    for size in SIZES:
        worker_files(out, size, "None", pairs)
        result = json.loads((out / f"{size}-None-w0.json").read_text())
        ours = [a for a, _ in result["pairs"]]
        theirs = [b for _, b in result["pairs"]]
        rows.append(
            paired(
                f"step_{size}",
                "seconds per step",
                ours,
                theirs,
                peer="torch DDP, gloo, same bucket size",
                note=f"{result['workers']} workers, one thread each",
            )
        )
    return rows


def memory_rows(out: Path) -> list[Row]:
    """Peak resident bytes of one of two workers at 3 M parameters, beyond nothing and beyond DDP."""
    peaks = {}
    for side in ("shoal", "ddp"):
        worker_files(out, "3m", side, 1)
        peaks[side] = json.loads((out / f"3m-{side}-w0.json").read_text())["peak_bytes"]
    beyond = peaks["shoal"] - peaks["ddp"]
    return [
        Row(
            name="memory_3m",
            unit="peak resident bytes",
            ours=peaks["shoal"],
            theirs=peaks["ddp"],
            peer="torch DDP, gloo",
            ratio=peaks["shoal"] / peaks["ddp"],
            pairs=1,
            same_work=True,
            note=f"{beyond / 2**20:+.1f} MiB against DDP; both import shoal",
        )
    ]


def worker_files(out: Path, size: str, side: str, pairs: int) -> None:
    """Run two step workers and leave their result files in ``out``."""
    arguments = [str(HERE / "step_worker.py"), "--size", size, "--out", str(out)]
    arguments += ["--pairs", str(pairs)]
    if side != "None":
        arguments += ["--only", side]
    run = shoal_run(*arguments, directory=out / f"run-{size}-{side}", workers=2)
    if run.wait(600) != 0:
        raise RuntimeError(f"step workers of size {size} failed; see {out}")


def run(groups: Sequence[str] = GROUPS, *, quick: bool = False) -> list[dict[str, object]]:
    """All rows of the groups asked for."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        out = Path(folder)
        made: list[Row] = []
        if "step" in groups:
            made += step_rows(out, pairs=10 if quick else 40)
        if "memory" in groups:
            made += memory_rows(out)
        if "kill" in groups or "join" in groups:
            made += kill_and_join_rows(out, kills=6 if quick else 24, pairs=1 if quick else 4)
        if "leave" in groups:
            made += leave_rows(out, leaves=2 if quick else 8)
        if "coordinator" in groups:
            made += coordinator_rows(out, times=3 if quick else 20)
        rows += [row.as_dict() for row in made]
    if "order" in groups:
        rows += order_rows()
    return rows
