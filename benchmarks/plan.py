"""How long `graph-trainer plan` takes and how much memory, from the command to the table.

    python -m benchmarks.plan                              # all work, half an hour
    python -m benchmarks.plan --work "8b on 128" order     # whose names contain one of these

Each kind of work is a process of its own, without the cache of captured steps. Phases are seconds
of wall time between the lines of progress that the command prints: until the first is imports and
config, then capture of the step, and the rest, which is passes, simulation and files. Rows of
--compare and ranks of --verify-order are one line each: all of such a line is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graph_trainer.core.units import GIB

WORK = {
    "debugmodel on 4": "--config debugmodel --world-size 4",
    "8b on 128": "--config 8b --world-size 128 --parallelism.tensor_parallel_degree 8",
    "8b on 4096": "--config 8b --world-size 4096 --parallelism.tensor_parallel_degree 8",
    "70b on 256, page and save": "--config 70b --world-size 256 "
    "--parallelism.tensor_parallel_degree 8 --html {folder}/plan.html --save {folder}/plan.json",
    "405b on 4096": "--config 405b --world-size 4096 --parallelism.tensor_parallel_degree 8",
    "qwen3 32b on 8, like torchtitan": "--module graph_trainer.qwen3 --config 32b --world-size 8 "
    "--activation_checkpoint.type full --like torchtitan",
    "deepseek 16b on 64": "--module graph_trainer.deepseek_v3 --config 16b --world-size 64 "
    "--parallelism.expert_parallel_degree 8",
    "deepseek 671b on 2048": "--module graph_trainer.deepseek_v3 --config 671b --world-size 2048 "
    "--parallelism.expert_parallel_degree 64",
    "compare four meshes of 8b on 64": "--config 8b --world-size 64 "
    "--compare parallelism.tensor_parallel_degree=1,2,4,8",
    "compare four policies of 8b on 64": "--config 8b --world-size 64 --compare "
    "activation_checkpoint.type=none,full --compare "
    "parallelism.fsdp_reshard_after_forward=always,never",
    "memory curve of 8b on 8": "--config 8b --world-size 8 --memory-curve",
    "order of 8b on 64": "--config 8b --world-size 64 --parallelism.tensor_parallel_degree 8 "
    "--verify-order",
    "version": "version",
}
"""By name, the words after `graph-trainer plan`; `version` is `graph-trainer --version`."""

_PROGRESS = re.compile(r"^\w.*?\[ *[\d.]+ s\] ")
"""What comes before the words of a line of progress."""


def main(argv: Sequence[str] | None = None) -> None:
    """Do all the work, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", default=[""], metavar="PART", help="parts of names")
    parser.add_argument("--json", help="write the results to this file as well")
    words = parser.parse_args(argv)
    print(f"{os.cpu_count()} cores")
    print(
        f"{'work':<34}{'start s':>8}{'capture s':>11}{'rest s':>8}{'wall s':>8}{'CPU s':>8}"
        f"{'RSS GiB':>9}"
    )
    rows = []
    for name, command in WORK.items():
        if not any(part in name for part in words.work):
            continue
        row = {"work": name, **measure(command)}
        rows.append(row)
        print(
            f"{name:<34}{row['start_seconds']:>8.1f}{row['capture_seconds']:>11.1f}"
            f"{row['rest_seconds']:>8.1f}{row['wall_seconds']:>8.1f}{row['cpu_seconds']:>8.1f}"
            f"{row['peak_resident_bytes'] / GIB:>9.2f}",
            flush=True,
        )
    text = json.dumps(rows)
    print(text)
    if words.json:
        Path(words.json).write_text(text)


def measure(command: str) -> dict[str, Any]:
    """Run a command once, read its phases and what the system says of its process."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--version"]
        if command != "version":
            words = ["plan", *shlex.split(command.format(folder=folder))]
        seconds = {"start": 0.0, "capture": 0.0, "rest": 0.0}
        phase, printed = "start", []
        begin = now = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "graph_trainer", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            before, now = now, time.perf_counter()
            seconds[phase] += now - before
            printed.append(line)
            if line := _PROGRESS.sub("", line):
                phase = "capture" if line.startswith(("capturing", "building")) else "rest"
        _, status, usage = os.wait4(process.pid, 0)
        end = time.perf_counter()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{''.join(printed)[-4000:]}")
    seconds[phase] += end - now
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "wall_seconds": end - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_resident_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
