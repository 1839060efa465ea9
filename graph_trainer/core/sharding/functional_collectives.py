"""The collectives that sharded data and context parallelism need, as traceable ops.

Each returns a finished tensor: the wait follows its op directly, in eager and in the captured
graph, and passes increase the distance later. In a group of one rank they do nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from graph_trainer.core.torch_private import c10d_functional


def all_gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather equal shards of every rank along the first dimension.

    Args:
        shard: [rows, ...], contiguous, the same shape on every rank.

    Returns:
        [rows * group size, ...] in the order of the group's ranks.
    """
    if group.size() == 1:
        return shard
    gathered = c10d_functional.all_gather_into_tensor(shard, group.size(), group.group_name)
    return c10d_functional.wait_tensor(gathered)


def reduce_scatter(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group and keep this rank's rows.

    Args:
        full: [rows * group size, ...], contiguous.

    Returns:
        [rows, ...]
    """
    if group.size() == 1:
        return full
    # SUM and never AVG, because gloo's AVG has returned wrong results; the caller scales.
    reduced = c10d_functional.reduce_scatter_tensor(full, "sum", group.size(), group.group_name)
    return c10d_functional.wait_tensor(reduced)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group, and return a new tensor of the same shape."""
    if group.size() == 1:
        return tensor
    return c10d_functional.wait_tensor(c10d_functional.all_reduce(tensor, "sum", group.group_name))


def all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send block i of the first dimension to rank i; block j of the result comes from rank j."""
    if group.size() == 1:
        return blocks
    rows = [blocks.shape[0] // group.size()] * group.size()
    received = c10d_functional.all_to_all_single(blocks, rows, rows, group.group_name)
    return c10d_functional.wait_tensor(received)
