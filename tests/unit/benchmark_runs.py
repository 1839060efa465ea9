"""Runs a benchmark as small as it goes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100


def benchmark(module, *flags, timeout=280):
    """The lines of the table that a benchmark prints, and its JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *table, last = done.stdout.splitlines()
    assert all(len(line) <= WIDTH for line in table), table
    return table, json.loads(last)
