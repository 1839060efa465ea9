"""Predictions beside published runs, and beside runs published as out of memory.

    python -m benchmarks.published
    python -m benchmarks.published --runs A100
    python -m benchmarks.published --write-errors

Each run is planned with `--like torchtitan`, cross-entropy over whole logits as it was computed
then, and a hardware profile whose constants come from other sources than these figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.published.runs import FITS, LEFT_OUT, RUNS
from benchmarks.published.tables import (
    aims,
    compare,
    fits_lines,
    judge_fit,
    judged,
    table_lines,
    write_errors,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, the aims, what was left out, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", help="only the runs whose names contain one of these")
    parser.add_argument(
        "--write-errors",
        action="store_true",
        help="write the errors of all runs that are not kept back, of which bands are made",
    )
    flags = parser.parse_args(argv)
    if flags.runs and flags.write_errors:
        parser.error("--write-errors is of all runs: leave it or --runs out")

    def wanted(name: str) -> bool:
        return flags.runs is None or any(text in name for text in flags.runs)

    rows = []
    for run in RUNS:
        if wanted(run.name) and not (flags.write_errors and run.kept_back):
            print(run.name, file=sys.stderr, flush=True)
            rows.append(compare(run))
    if flags.write_errors:
        print(f"wrote {write_errors(rows)}")
        return
    rows = judged(rows)
    fits = [judge_fit(run) for run in FITS if wanted(run.name)]
    for lines in (table_lines(rows), fits_lines(fits), aims(rows, fits)):
        print("\n".join(lines), end="\n\n")
    print("Left out:", *(f"- {text}" for text in LEFT_OUT), sep="\n")
    document = {"runs": [asdict(row) for row in rows], "fits": [asdict(row) for row in fits]}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
