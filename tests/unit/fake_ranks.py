"""Many ranks in one process, a thread each."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch.distributed as dist

from graph_trainer.core.ordering.agreement import OneRank


class Agreed(OneRank):
    """An agreement whose all-reduce is a function of this rank's number."""

    def __init__(self, largest: Callable[[int], int]) -> None:
        super().__init__()
        self.all_reduce_max = largest


def in_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` of every rank in a thread, with dist.all_gather_object among them.

    Returns:
        by rank, the result or the exception. A rank that gathers alone gets a BrokenBarrierError.
    """
    local, barrier = threading.local(), threading.Barrier(ranks)
    objects: list[bytes] = [b""] * ranks

    def all_gather_object(everyone: list[Any], mine: Any, group: Any) -> None:
        objects[local.rank] = pickle.dumps(mine)
        barrier.wait(timeout=20)
        everyone[:] = map(pickle.loads, objects)
        barrier.wait(timeout=20)

    def run(rank: int) -> Any:
        local.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    with (
        mock.patch.multiple(
            dist,
            all_gather_object=all_gather_object,
            get_rank=lambda: local.rank,
            get_world_size=lambda group=None: ranks,
            get_backend=lambda group=None: "threads",
            get_process_group_ranks=lambda group: list(range(ranks)),
            is_initialized=lambda: True,
        ),
        ThreadPoolExecutor(ranks) as pool,
    ):
        return list(pool.map(run, range(ranks)))
