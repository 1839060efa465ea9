"""How long `graph-trainer plan` takes and how much memory, from the command to the table.

    python -m benchmarks.plan                        # 8B, 70B and 405B, minutes
    python -m benchmarks.plan --cases 8b:128:8       # config:ranks:tensor parallel degree

Every case is a process of its own. `ms/layer` is constant where time grows linearly with layers;
the two rows of 8B that differ in ranks alone show what the world size costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CASES = ("8b:128:8", "8b:4096:8", "70b:256:8", "405b:4096:8")
LAYERS = {"debugmodel": 6, "8b": 32, "70b": 80, "405b": 126}
_KIB = 1024


def main(argv: Sequence[str] | None = None) -> None:
    """Plan every case, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CONFIG:RANKS:TP")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--json", help="write the results to this file as well")
    words = parser.parse_args(argv)
    print(f"{os.cpu_count()} cores")
    print(
        f"{'config':<12}{'ranks':>7}{'tp':>4}{'nodes':>9}{'wall s':>9}{'CPU s':>8}"
        f"{'ms/layer':>10}{'RSS GiB':>9}"
    )
    rows = []
    for case in words.cases:
        config, ranks, tensor = case.split(":")
        row = measure(config, int(ranks), int(tensor), words.hardware)
        rows.append(row)
        print(
            f"{config:<12}{row['ranks']:>7,}{row['tensor_parallel']:>4}{row['nodes']:>9,}"
            f"{row['wall_seconds']:>9.1f}{row['cpu_seconds']:>8.1f}"
            f"{1e3 * row['cpu_seconds'] / LAYERS[config]:>10.0f}"
            f"{row['peak_resident_bytes'] / 1024**3:>9.2f}",
            flush=True,
        )
    text = json.dumps(rows)
    print(text)
    if words.json:
        Path(words.json).write_text(text)


def measure(config: str, ranks: int, tensor: int, hardware: str) -> dict[str, Any]:
    """Run the command once and read what the system says of its process."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "graph_trainer", "plan", "--config", config]
        command += ["--world-size", str(ranks), "--hardware", hardware, "--json", str(document)]
        command += ["--parallelism.tensor_parallel_degree", str(tensor)]
        start = time.perf_counter()
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                raise SystemExit(f"{command} failed:\n{errors.read().decode()[-4000:]}")
        return {
            "config": config,
            "ranks": ranks,
            "tensor_parallel": tensor,
            "nodes": json.loads(document.read_text())["nodes"],
            "wall_seconds": time.perf_counter() - start,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_resident_bytes": usage.ru_maxrss * _KIB,
        }


if __name__ == "__main__":
    main()
