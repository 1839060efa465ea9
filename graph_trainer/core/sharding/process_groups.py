"""Process groups that a pass needs and the model does not have.

Every rank of the world must take part when a group is made, member or not, and in the same order:
without one of the ranks the others wait forever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from graph_trainer.core.analysis.mesh_groups import Partition
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.torch_private_groups import new_group_in_order, process_groups
from graph_trainer.errors import PassError

_MADE_HERE = "graph_trainer"
"""The description of process groups that were made here."""


def groups_within(partitions: Sequence[Partition], agreement: Agreement) -> dict[Partition, str]:
    """Return the name of this rank's group in each partition of the world; make missing groups.

    Uses a group that was made here for an earlier graph or pass again. Every rank of the world must
    call this, with the same partitions in any order.

    Args:
        agreement: the ranks that call this.

    Raises:
        PassError: the ranks need different groups; or a group is missing while other ranks do not
            take part.
    """
    if not partitions:
        return {}
    # A partition is made on all ranks at once, so it exists on all ranks or on none. Groups of
    # other code may exist on some ranks only, and are not used.
    world = dist.group.WORLD
    assert world is not None
    all_ranks = tuple(range(dist.get_world_size()))
    ranks_of = dict(process_groups())
    names: dict[Partition, str] = {}
    for partition in partitions:
        if partition == (all_ranks,):
            names[partition] = str(world.group_name)
        for group in groups_made():
            if ranks_of[group] in partition:
                names.setdefault(partition, str(group.group_name))
    missing = sorted(set(partitions) - names.keys())
    if missing and agreement.is_apart:
        raise PassError(
            "a batch makes this rank's graph need process groups that its first graph did not "
            "need, and the other ranks do not make them now: let every batch read the same "
            "parameters, or leave the pass out with PassConfig.disable_passes"
        )
    if missing and not agreement.same(missing):
        raise PassError(
            f"the ranks need different process groups, rank {dist.get_rank()} those that are "
            f"parallel to {[partition[0] for partition in missing]}: look for code in the model "
            "that depends on the rank, or leave the pass out with PassConfig.disable_passes"
        )
    for partition in missing:
        for ranks in partition:
            group = new_group_in_order(ranks, _MADE_HERE)
            if dist.get_rank() in ranks:
                names[partition] = str(group.group_name)
        assert partition in names, "a partition has a group for every rank of the world"
    return names


def groups_made() -> list[dist.ProcessGroup]:
    """List this rank's process groups that were made here."""
    return [group for group, _ in process_groups() if group.group_desc == _MADE_HERE]
