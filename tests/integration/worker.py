"""Runs the jobs of one launch on every rank; launches.py starts it and hands out the results.

Arguments: the number of ranks, a scratch folder that all launches share, then jobs, each
`module:function:argument` with a module of tests.integration; the function is called with the
folder and the argument. On CPU one process imports what takes seconds, and ranks are forks of it;
CUDA does not survive a fork, and there torchrun starts each.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, debug

import graph_trainer as gt
from graph_trainer.train import leave
from tests.integration.launch import report

# A job that waits for ever ends its launch, and the stacks of its ranks say where it waited.
SECONDS_OF_A_JOB = 600


def run(job: str, folder: Path) -> Any:
    module, function, argument = job.split(":", 2)
    return getattr(importlib.import_module(f"tests.integration.{module}"), function)(
        folder, argument
    )


def end_groups() -> None:
    """End the groups of a job, of which each has two threads that wake a hundred times a second:
    those of many jobs would take more than the jobs."""
    # DTensor knows meshes of the same ranks as one, and would go on with the groups of the first
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    gc.collect()  # torchtitan switches collection off, and a trainer is full of cycles
    # caches of torch's, some of them in C++, keep meshes, which keep their groups
    for mesh in [kept for kept in gc.get_objects() if type(kept) is DeviceMesh]:
        mesh._pg_registry.clear()
    # glibc keeps what a job has freed: eight ranks of many jobs would fill the machine
    ctypes.CDLL(None).malloc_trim(0)
    # a million objects of torch's and what caches keep: a fifth of a job's time went to looking
    # through them, when a trainer is made and when it is closed
    gc.freeze()


def main() -> None:
    ranks, folder, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    for module in {job.partition(":")[0] for job in jobs}:
        importlib.import_module(f"tests.integration.{module}")
    gc.freeze()
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
        work(folder, jobs)
        return
    with socket.create_server(("localhost", 0)) as server:
        args = ranks, server, folder, jobs
        torch.multiprocessing.start_processes(be_rank, args, nprocs=ranks, start_method="fork")
    leave(0)  # Python's end would take seconds for the libraries that torch has registered


def be_rank(
    rank: int, ranks: int, server: socket.socket, folder: Path, jobs: Sequence[str]
) -> None:
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= local | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    host, port = server.getsockname()
    given = {"is_master": True, "master_listen_fd": server.detach()} if rank == 0 else {}
    store = dist.TCPStore(host, port, ranks, **given)
    dist.init_process_group(gt.cpu_backend(), store=store, rank=rank, world_size=ranks)
    work(folder, jobs)


def work(folder: Path, jobs: Sequence[str]) -> None:
    """Run the jobs, all of which use the group of all ranks: torchtitan takes the one it finds."""
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        start = time.perf_counter()
        faulthandler.dump_traceback_later(SECONDS_OF_A_JOB, exit=True)
        try:
            results[job] = {"result": run(job, folder)}
        except Exception:
            # the other ranks run the same job, and fail here too unless one differs from the rest
            results[job] = {"error": traceback.format_exc()}
            traceback.print_exc()  # at once: ranks that wait for this one may end the launch
        faulthandler.cancel_dump_traceback_later()
        results[job]["seconds"] = round(time.perf_counter() - start, 1)
        end_groups()
        results[job]["threads"] = len(os.listdir("/proc/self/task"))
    report(results)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
