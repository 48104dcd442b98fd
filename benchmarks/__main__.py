"""``python -m benchmarks elastic|order|ledger|study [--rows step,kill,...] [--quick] [--json]``."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks import elastic, ledger, order, study


def line(row: dict[str, object]) -> str:
    """One row for a person."""
    text = f"{row['name']:<22} {row['ours']:>12.5g}"
    if row.get("ratio") is not None:
        interval = row.get("interval")
        text += f"  against {row['theirs']:.5g} ({row['peer']})  ratio {row['ratio']:.3f}"
        if interval:
            text += f" [{interval[0]:.3f}, {interval[1]:.3f}] over {row['pairs']} pairs"  # type: ignore[index]
    text += f"  {row['unit']}"
    return text + (f"; {row['note']}" if row.get("note") else "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=("elastic", "order", "ledger", "study"))
    known = {"elastic": elastic, "ledger": ledger, "study": study}
    listed = "; ".join(f"{name}: {','.join(module.GROUPS)}" for name, module in known.items())
    parser.add_argument("--rows", help=f"groups of rows, separated by commas. {listed}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    arguments = parser.parse_args()
    if arguments.name == "order":
        rows = order.run()
    else:
        module = known[arguments.name]
        groups = arguments.rows.split(",") if arguments.rows else module.GROUPS
        unknown = sorted(set(groups) - set(module.GROUPS))
        if unknown:
            sys.exit(f"--rows {unknown[0]}; known are {', '.join(module.GROUPS)}")
        rows = module.run(groups, quick=arguments.quick)
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(line(row))


if __name__ == "__main__":
    main()
