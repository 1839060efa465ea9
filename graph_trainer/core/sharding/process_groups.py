"""Process groups that a pass needs and the model does not have.

Every rank of the world takes part when a group is made, member or not, and in the same order:
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
    """Return the name of this rank's group in each partition of the world, made where needed.

    A group that was made here for an earlier graph or pass is used again. Every rank of the
    world calls this, with the same partitions in any order.

    Args:
        agreement: the ranks that call this.

    Raises:
        PassError: the ranks ask for different groups; or a group is to be made while other ranks
            do not take part.
    """
    names = {partition: _made_before(partition) for partition in partitions}
    missing = sorted(partition for partition, name in names.items() if name is None)
    if missing and agreement.is_apart:
        raise PassError(
            "a batch makes this rank's graph ask for process groups that its first graph did not "
            "need, and the other ranks do not make them now; let every batch read the same "
            "parameters, or leave the pass out with compile.disable_passes"
        )
    if missing and not agreement.same(missing):
        raise PassError(
            f"the ranks ask for different process groups, rank {dist.get_rank()} for those of "
            f"{[p[0] for p in missing]} and the like; look for code in the model that depends "
            "on the rank, or leave the pass out with compile.disable_passes"
        )
    made = {partition: _make(partition) for partition in missing}
    return {partition: name or made[partition] for partition, name in names.items()}


def groups_made() -> list[dist.ProcessGroup]:
    """List this rank's process groups that were made here."""
    return [group for group, _ in process_groups() if group.group_desc == _MADE_HERE]


def _made_before(partition: Partition) -> str | None:
    """Return the name of this rank's group if it was made here before. A partition is made on all
    ranks at once, so all ranks find theirs or none; groups made elsewhere may exist on some ranks
    only and do not count."""
    everyone = tuple(range(dist.get_world_size()))
    if partition == (everyone,):
        world = dist.group.WORLD
        assert world is not None
        return str(world.group_name)
    ranks_of = dict(process_groups())
    names = [str(g.group_name) for g in groups_made() if ranks_of[g] in partition]
    return names[0] if names else None


def _make(partition: Partition) -> str:
    rank = dist.get_rank()
    mine = ""
    for ranks in partition:
        group = new_group_in_order(ranks, _MADE_HERE)
        if rank in ranks:
            mine = str(group.group_name)
    assert mine, "a partition has a group for every rank of the world"
    return mine
