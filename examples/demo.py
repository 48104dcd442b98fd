"""`make demo`: train on real images while workers join, leave and are killed; then say what it cost.

Runs the example on a real fleet whose workers follow ``demo.toml``, then, for comparison and in virtual
workers, the same training on one worker throughout (static) and with the learning rate scaled linearly at
once under the same events. Everything it found is in ``runs/demo/summary.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def real_run(run_dir: Path, epochs: int, data: str) -> int:
    """The run on real workers; returns the exit status of ``shoal run``."""
    command = [sys.executable, "-m", "shoal", "run", "--workers", "1"]
    command += ["--script", str(HERE / "demo.toml"), "--run-dir", str(run_dir)]
    command += [str(HERE / "fashion_mnist.py"), "--epochs", str(epochs), "--data", data]
    return subprocess.run(command, check=False).returncode


def compared(kind: str, run_dir: Path, epochs: int, data: str) -> subprocess.Popen[str]:
    """Start one comparison in virtual workers; it prints its test accuracy as JSON."""
    command = [sys.executable, __file__, "--compare", kind, "--run-dir", str(run_dir)]
    command += ["--epochs", str(epochs), "--data", data]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def compare(kind: str, run_dir: Path, epochs: int, data: str) -> None:
    """Train in virtual workers and print ``{"accuracy": ...}``."""
    sys.path.insert(0, str(HERE))
    import shoal
    from fashion_mnist import train

    task = shoal.data.image_task(data, may_fetch=False)
    events: list[shoal.VirtualEvent] = []
    scaling: Any = shoal.scaling.Dynamic(reference_batch=64)
    if kind == "linear_at_once":
        scaling = shoal.scaling.Linear(reference_batch=64)
        for row in json.loads((run_dir / "summary.json").read_text())["events"]:
            workers = abs(row["workers_after"] - row["workers_before"])
            # A kill's event names the step that was drawn again without the dead worker.
            events.append(
                shoal.VirtualEvent(kind=row["kind"], workers=workers, at_step=row["step"])
            )
    world = shoal.VirtualWorld(1, events)
    _, tested = train(task, epochs=epochs, scaling=scaling, world=world)
    print(json.dumps({"accuracy": tested}))


def table(summary: dict[str, Any], report: Path) -> str:
    """What the demo has to say, as plain text."""
    gaps = ", ".join(
        f"{row['kind']} {row['seconds_without_progress']:.2f}" for row in summary["events"]
    )
    used = (
        f"{summary['samples_used']:,} / {summary['samples_repeated']} / {summary['samples_missed']}"
    )
    rows = [
        ("test accuracy, this run (workers came and went)", f"{summary['accuracy']:.4f}"),
        ("test accuracy, one worker throughout (virtual)", f"{summary['accuracy_static']:.4f}"),
        (
            "test accuracy, lr scaled linearly at once, same events (virtual)",
            f"{summary['accuracy_linear_at_once']:.4f}",
        ),
        (f"samples used / repeated / missed, of {summary['samples_expected']:,}", used),
        ("restarts of surviving workers", str(summary["restarts_of_survivors"])),
        ("seconds without progress at each event", gaps),
        ("report", str(report)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([f"\nshoal demo on {summary['dataset']}, {summary['seconds']:.0f} s", *lines])


def picture(run_dir: Path) -> None:
    """Write the report again, now with the comparison, and its figure by itself."""
    from shoal.report import write_run_report
    from shoal.report.figures import overview
    from shoal.report.run import load_run

    write_run_report(run_dir)
    overview(load_run(run_dir)).savefig(run_dir / "overview.png", dpi=100)


def demo(run_dir: Path, epochs: int, data: str) -> int:
    """The whole demo; returns the exit status."""
    from shoal.data import image_task

    began = time.monotonic()
    task = image_task(data)  # fetches what is missing once, before several processes want it
    shutil.rmtree(run_dir, ignore_errors=True)
    status = real_run(run_dir, epochs, task.name)
    if status != 0:
        print(
            f"shoal demo: the run ended with status {status}; see {run_dir}/logs", file=sys.stderr
        )
        return status
    runs = {
        kind: compared(kind, run_dir, epochs, task.name) for kind in ("static", "linear_at_once")
    }
    scores = {}
    for kind, process in runs.items():
        out, _ = process.communicate()
        if process.returncode != 0:
            return process.returncode
        scores[kind] = json.loads(out.splitlines()[-1])["accuracy"]
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    tested = [row for row in summary["evaluations"] if row["name"] == "test"]
    summary |= {
        "dataset": task.name,
        "accuracy": tested[-1]["scores"]["accuracy"],
        "accuracy_static": scores["static"],
        "accuracy_linear_at_once": scores["linear_at_once"],
        "seconds": round(time.monotonic() - began, 1),
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(summary, indent=1))
    os.replace(part, path)
    picture(run_dir)
    print(table(summary, run_dir / "report.html"))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--data", default="auto")
    parser.add_argument("--compare", choices=("static", "linear_at_once"))
    arguments = parser.parse_args()
    # One thread per process: the machine's cores are for the workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.compare:
        compare(arguments.compare, arguments.run_dir, arguments.epochs, arguments.data)
        return
    sys.exit(demo(arguments.run_dir, arguments.epochs, arguments.data))


if __name__ == "__main__":
    main()
