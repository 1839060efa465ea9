"""Keep four of gloo's all-gathers in flight until torch 2.13's gloo corrupts the heap.

Needs torch alone; some runs end with SIGABRT or SIGSEGV, the others with exit code 0:

    torchrun --nproc-per-node 4 scripts/gloo_crash.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
group = groups[dist.get_rank() // 2]
for _ in range(150):
    in_flight = []
    for size in range(1, 41):
        in_flight.append(collectives.all_gather_tensor(torch.ones(100 * size), 0, group))
        if len(in_flight) == 4:
            collectives.wait_tensor(in_flight.pop(0))
    for gathered in in_flight:
        collectives.wait_tensor(gathered)
dist.barrier()
os._exit(0)
