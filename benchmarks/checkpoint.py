"""The cost of `checkpoint.verify`: digests written with a checkpoint and compared before a load.

    python -m benchmarks.checkpoint               # 1 GiB, one rank
    python -m benchmarks.checkpoint --mib 8 --rounds 1

One rank saves tensors of 64 MiB to a folder on disk, with and without digests in turn, in the
modes "disabled" (the training thread saves) and "async" (another thread saves). `blocked s` is what
the training thread waits for, `save s` the time until the checkpoint is complete, `CPU s` what all
threads compute in that time, and `check s` the check of the files before they are loaded, from the
page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.turns import orders
from graph_trainer.titan.checkpoint_files import ManifestWriter, damage

TENSOR_MIB = 64
CASES = {
    f"{mode}, {'with' if verify else 'without'} digests": (mode, verify)
    for mode in ("disabled", "async")
    for verify in (False, True)
}
COLUMNS = ("blocked", "save", "cpu", "check")


def main() -> None:
    """Measure every case in turn, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median counts")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--json", help="write the results to this file as well")
    arguments = parser.parse_args()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    numel = min(TENSOR_MIB, arguments.mib) * 2**20 // 4
    state = {str(i): torch.rand(numel) for i in range(max(1, arguments.mib // TENSOR_MIB))}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(state, Path(folder), "disabled", True)  # warm up
        for order in orders(list(CASES), arguments.rounds):
            for name in order:
                runs[name].append(measure(state, Path(folder), *CASES[name]))
    dist.destroy_process_group()
    rows = [
        {"case": name} | {c: statistics.median(run[c] for run in several) for c in COLUMNS}
        for name, several in runs.items()
    ]
    print(f"{'':25}{'blocked s':>10}{'save s':>10}{'CPU s':>10}{'check s':>10}")
    for row in rows:
        print(f"{row['case']:25}" + "".join(f"{row[c]:10.2f}" for c in COLUMNS))
    results: dict[str, Any] = {"mib": arguments.mib, "cores": os.cpu_count(), "rows": rows}
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def measure(
    state: dict[str, torch.Tensor], folder: Path, mode: str, verify: bool
) -> dict[str, float]:
    """Save and check once; seconds by column."""
    final = folder / "step-1"
    shutil.rmtree(final, ignore_errors=True)
    writer = ManifestWriter(final, verify=verify)
    start, cpu = time.perf_counter(), time.process_time()
    if mode == "async":
        future: Any = dcp.async_save(state, storage_writer=writer)
        blocked = time.perf_counter() - start
        future.result()
    else:
        dcp.save(state, storage_writer=writer)
        blocked = time.perf_counter() - start
    save, cpu = time.perf_counter() - start, time.process_time() - cpu
    start = time.perf_counter()
    assert damage(final, verify=verify) == []
    return {"blocked": blocked, "save": save, "cpu": cpu, "check": time.perf_counter() - start}


if __name__ == "__main__":
    main()
