"""Our side of ``archive_analysis``, in a process of its own so that its memory can be read."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.ledger_tables import budgets, goals, trials_asked
from shoal.ledger import queries
from shoal.workloads.synthetic_archive import SyntheticArchive, released_archive, small_archive

Answers = dict[str, object]


def archive(quick: bool) -> SyntheticArchive:
    """The archive that is measured."""
    return small_archive() if quick else released_archive()


def analyse(columns: queries.Columns, made: SyntheticArchive) -> Answers:
    """Steps to result of every search, and the best value under every budget of its figures."""
    found: Answers = {}
    wanted, asked = goals(made), trials_asked(made)
    by_steps, by_samples = budgets(made)
    for count in sorted(set(asked.values())):
        these = {k: goal for k, goal in wanted.items() if asked[k] == count}
        for row in queries.steps_to_result(columns, these, first_n_complete=count):
            answer = None if row.steps is None else [row.steps, row.trial]
            found[f"{name(row.search)} steps"] = answer
        for metric, larger in sorted({(g.metric, g.larger_is_better) for g in these.values()}):
            own = [k for k, goal in these.items() if goal.metric == metric]
            for kind, given in (("step", by_steps), ("sample", by_samples)):
                limits = {k: given[k] for k in own}
                for row in queries.best_error(
                    columns,
                    metric,
                    step_budgets=limits if kind == "step" else (),
                    sample_budgets=limits if kind == "sample" else (),
                    larger_is_better=larger,
                    first_n_complete=count,
                ):
                    found[f"{name(row.search)} {kind} {row.budget}"] = row.value
    return found


def name(search: queries.SearchRow) -> str:
    """The path of a search in the archive."""
    return f"{search.study}/{search.curve}/{search.global_batch}"


def peak_bytes() -> int:
    """Most memory this process has had (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def main(directory: str, quick: bool, repeats: int) -> None:
    """Load, then analyse ``repeats`` times, each when a line comes in; one JSON line for each."""
    begun = time.perf_counter()
    columns = queries.load_columns(directory)
    loaded = time.perf_counter() - begun
    made = archive(quick)
    print(json.dumps({"load": loaded, "peak": peak_bytes()}), flush=True)
    answers: Answers = {}
    for _ in range(repeats):
        sys.stdin.readline()
        begun = time.perf_counter()
        answers = analyse(columns, made)
        print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
    print(json.dumps({"answers": answers, "peak": peak_bytes(), "bytes": columns.nbytes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "quick", int(sys.argv[3]))
