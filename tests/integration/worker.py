"""Runs the jobs of one launch on every rank; launches.py starts it and hands out the results.

Arguments: a scratch folder that all launches share, then jobs, each `module:function:argument`
with a module of tests.integration; the function is called with the folder and the argument.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute, debug

import graph_trainer as gt
from graph_trainer.train import leave
from tests.integration.launch import report


def run(job: str, folder: Path) -> Any:
    module, function, argument = job.split(":", 2)
    return getattr(importlib.import_module(f"tests.integration.{module}"), function)(
        folder, argument
    )


def end_groups() -> None:
    """End the groups of a job: a thread of each of gloo's wakes a hundred times a second."""
    gc.collect()  # torchtitan switches collection off, and a trainer is full of cycles
    # DTensor knows meshes of the same ranks as one, and would go on with the groups of the first
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    # glibc keeps what a job has freed: eight ranks of many jobs would fill the machine
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    folder, jobs = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    # Every job uses this group: torchtitan's trainer takes the one that it finds.
    dist.init_process_group("nccl" if torch.accelerator.is_available() else gt.cpu_backend())
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        start = time.perf_counter()
        try:
            results[job] = {"result": run(job, folder)}
        except Exception:
            # the other ranks run the same job, and fail here too unless one differs from the rest
            results[job] = {"error": traceback.format_exc()}
        results[job]["seconds"] = round(time.perf_counter() - start, 1)
        end_groups()
    report(results)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
