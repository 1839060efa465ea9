"""Be any rank of any number of ranks, in one process, on a process group that does nothing."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


def become(rank: int, ranks: int) -> None:
    """Start over as `rank` of `ranks`.

    DTensor remembers what an op gave for which meshes, and hands out the mesh of an earlier
    process group where it looks the same: another rank's, with groups that are gone.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
