"""Process groups that a pass needs and the model did not bring along."""

from __future__ import annotations

import torch.distributed as dist

from graph_trainer.analysis.partitions import Partition
from graph_trainer.compat import new_group_in_order, process_groups

_MADE_HERE = "graph_trainer"
"""What process groups that were made here are described as."""


def group_within(partition: Partition) -> str | None:
    """Name of this rank's group of a partition, if it has been made.

    Every rank finds its group or none does: a partition is made on all ranks at once, and the
    groups of others, which may be on some ranks only, are not looked at.
    """
    everyone = tuple(range(dist.get_world_size()))
    if partition == (everyone,):
        world = dist.group.WORLD
        assert world is not None
        return str(world.group_name)
    for group, ranks in process_groups():
        if group.group_desc == _MADE_HERE and ranks in partition:
            return str(group.group_name)
    return None


def make_groups(partition: Partition) -> str:
    """Make all groups of a partition. Every rank of the world calls this in the same order.

    A group is there until the process groups are destroyed: `group_within` finds it for the next
    graph of the same program.

    Returns:
        the name of this rank's.
    """
    rank = dist.get_rank()
    mine = ""
    for ranks in partition:
        group = new_group_in_order(ranks, _MADE_HERE)
        if rank in ranks:
            mine = str(group.group_name)
    assert mine, "a partition has a group for every rank of the world"
    return mine
