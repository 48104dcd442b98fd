"""The ledger: an archive of the released schema imported and analysed, and four runners writing at once.

`archive_import`    files to tables, one process on either side; the peer is pandas reading the same files.
`archive_import_default`  the same with the processes users get; no peer.
`archive_size`      bytes on disk; the peer is the files themselves.
`archive_analysis`  with the data loaded on both sides: steps to result of all searches from the first 100 (50)
                    COMPLETE trials, and the best value under eight budgets each. Both must answer the same.
`archive_load`, `archive_memory`  our side's loading, and the most memory of its process; the limit is 2 GiB.
`writers`           rows lost by four runners writing 5,000 evaluations a second each while a reader polls.

Full scale is 71,638,836 values in 454 searches; it takes 2 GB of disk for the files and, on two cores, about a
quarter of an hour, most of it the peer's import. ``--quick`` takes an archive of 970,000 values.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks import ledger_pandas
from benchmarks.ledger_analysis import archive
from benchmarks.ledger_tables import budgets, goals, key, trials_asked, write_tables
from benchmarks.pairing import Row, measured, paired
from shoal.ledger.archive import import_archive
from shoal.ledger.columnar import compact
from shoal.ledger.journal import Tail
from shoal.study.tables import read_study
from shoal.workloads.synthetic_archive import SyntheticArchive

GROUPS = ("import", "analysis", "writers")

WRITERS = 4
RATE = 5_000
DISK_BYTES = 6 << 30
NO_PEER = "no peer: pandas is not installed; pip install 'shoal[bench]'"


def run(groups: Sequence[str], *, quick: bool) -> list[dict[str, object]]:
    """The rows of some groups."""
    rows: list[Row] = []
    for group in GROUPS:
        if group in groups:
            print(f"ledger: {group} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
                rows += {"import": importing, "analysis": analysis, "writers": writers}[group](
                    Path(name), quick
                )
    return [row.as_dict() for row in rows]


def importing(place: Path, quick: bool) -> list[Row]:
    """Both sides from the files, in turn."""
    free = shutil.disk_usage(place).free
    if not quick and free < DISK_BYTES:
        sys.exit(f"{place} has {free >> 30} GB left; the full archive needs {DISK_BYTES >> 30}")
    made = archive(quick)
    values = made.write(place / "archive")
    pairs = 5 if quick else 1
    has_peer = find_spec("pandas") is not None
    ours: list[float] = []
    theirs: list[float] = []
    default: list[float] = []
    trials = 0
    for i in range(pairs):
        begun = time.perf_counter()
        report = import_archive(place / "archive", place / f"one-{i}", processes=1)
        ours.append(time.perf_counter() - begun)
        assert report.values == values and not report.problems, "an import must be whole"
        trials = report.trials
        begun = time.perf_counter()
        import_archive(place / "archive", place / f"default-{i}")
        default.append(time.perf_counter() - begun)
        if has_peer:
            begun = time.perf_counter()
            tables = ledger_pandas.load(place / "archive")
            theirs.append(time.perf_counter() - begun)
            assert sum(table.size for _, table in tables.values()) >= values
            del tables
    searches = len(made)
    said = f"{values} values of {trials} trials in {searches} searches"
    size = sum(p.stat().st_size for p in (place / "one-0").rglob("*") if p.is_file())
    files = sum(p.stat().st_size for p in (place / "archive").rglob("*") if p.is_file())
    rows = [measured("archive_import_default", "seconds", default, note=said)]
    if theirs:
        peer = "pandas.read_csv per trial"
        rows.insert(0, paired("archive_import", "seconds", ours, theirs, peer=peer, note=said))
    else:
        rows.insert(0, measured("archive_import", "seconds", ours, note=f"{said}; {NO_PEER}"))
    peer = "its files (lengths, not blocks)"
    rows.append(paired("archive_size", "bytes", [size], [files], peer=peer, note=said))
    return rows


def analysis(place: Path, quick: bool) -> list[Row]:
    """Both sides from data in memory, in turn; the same answers."""
    made = archive(quick)
    values = write_tables(made, place)
    repeats = 5
    command = [sys.executable, "-m", "benchmarks.ledger_analysis", str(place)]
    command += ["quick" if quick else "full", str(repeats)]
    ours: list[float] = []
    theirs: list[float] = []
    answers: dict[str, object] = {}
    tables = peer_tables(made) if find_spec("pandas") is not None else None
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            loaded = json.loads(process.stdout.readline())
            for _ in range(repeats):
                process.stdin.write("\n")
                process.stdin.flush()
                ours.append(json.loads(process.stdout.readline())["seconds"])
                if tables is not None:
                    begun = time.perf_counter()
                    answers = peer_answers(tables, made)
                    theirs.append(time.perf_counter() - begun)
            last = json.loads(process.stdout.readline())
        finally:
            process.kill()
    searches = len(made)
    said = f"{searches} searches and {8 * searches} budgets from {values} values"
    if theirs:
        assert answers == last["answers"], differing(answers, last["answers"])
        row = paired("archive_analysis", "seconds", ours, theirs, peer="pandas", note=said)
    else:
        row = measured("archive_analysis", "seconds", ours, note=f"{said}; {NO_PEER}")
    held = f"of which arrays {last['bytes']}; limit {2 << 30}"
    return [
        row,
        measured("archive_load", "seconds", [loaded["load"]], note=said),
        measured("archive_memory", "bytes", [last["peak"]], note=held),
    ]


def peer_tables(made: SyntheticArchive) -> dict[str, tuple[list[int], ledger_pandas.Table]]:
    """What the peer's loader gives, without the files."""
    found: dict[str, tuple[list[int], ledger_pandas.Table]] = {}
    for search in made.searches():
        trial = np.repeat(search.ids, search.rows)
        table = ledger_pandas.from_arrays(trial, search.step, search.values)
        found[search.path] = (search.ids[search.status == "COMPLETE"].tolist(), table)
    return found


def peer_answers(
    tables: dict[str, tuple[list[int], ledger_pandas.Table]], made: SyntheticArchive
) -> dict[str, object]:
    """The same questions to the peer."""
    found: dict[str, object] = {}
    wanted, asked = goals(made), trials_asked(made)
    by_steps, by_samples = budgets(made)
    for workload in made.workloads:
        goal, count = wanted[key(workload)], asked[key(workload)]
        for batch in workload.counts:
            path = f"{workload.path}/{batch}"
            table = ledger_pandas.first_complete(*tables[path], count)
            larger = goal.larger_is_better
            answer = ledger_pandas.steps_to_result(table, goal.metric, goal.value, larger)
            found[f"{path} steps"] = None if answer is None else list(answer)
            for kind, unit, given in (("step", 1, by_steps), ("sample", batch, by_samples)):
                for budget in given[key(workload)]:
                    best = ledger_pandas.best_error(table, goal.metric, budget // unit, larger)
                    found[f"{path} {kind} {budget}"] = best
    return found


def differing(theirs: dict[str, object], ours: dict[str, object]) -> str:
    """The first answers on which the two sides do not agree."""
    keys = sorted(theirs.keys() | ours.keys())
    different = [k for k in keys if theirs.get(k, "none") != ours.get(k, "none")]
    return "; ".join(f"{k}: {ours.get(k)} and {theirs.get(k)}" for k in different[:3])


def writers(place: Path, quick: bool) -> list[Row]:
    """Four runners at their rate, a reader that polls, a compaction in the middle; then count."""
    seconds = 3.0 if quick else 20.0
    paths = [place / "rows" / f"runner-{i}.jsonl" for i in range(WRITERS)]
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.ledger_writer",
                str(path), str(i), str(RATE), str(seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, path in enumerate(paths)
    ]  # fmt: skip
    seen = polls = 0
    compacted = False
    tails = [Tail(path) for path in paths]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a writer did not start"
        start = time.time() + 0.5
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{start}\n")
            process.stdin.flush()
        while any(process.poll() is None for process in processes):
            seen += sum(row["kind"] == "eval" for tail in tails for row in tail.rows())
            polls += 1
            if not compacted and time.time() > start + seconds / 2:
                compact(place)
                compacted = True
            time.sleep(0.1)
        said = [json.loads(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    seen += sum(row["kind"] == "eval" for tail in tails for row in tail.rows())
    written = sum(one["rows"] for one in said)
    tables = read_study(place)
    kept = sum(len(np.unique(tables.metric(k, "train/loss").step)) for k in tables.searches)
    rates = [one["rows"] / one["seconds"] for one in said]
    note = (
        f"{written} rows by {WRITERS} writers, slowest {min(rates):.0f} a second of {RATE} asked, "
        f"longest write {max(one['worst'] for one in said) * 1e3:.1f} ms, "
        f"{sum(one['cpu'] for one in said) / written * 1e6:.1f} us of CPU a row; {polls} polls, a compaction "
        "meanwhile; the reader that polls missed "
        f"{written - seen}"
    )
    return [measured("writers", "rows lost", [float(written - kept)], note=note)]
