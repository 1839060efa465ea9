"""Process groups that a pass needs and the model did not bring along.

Every rank of the world takes part when a group is made, member or not, and in the same order:
a rank that does not come lets the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch.distributed as dist

from graph_trainer.core.analysis.mesh_groups import Partition
from graph_trainer.core.torch_private import new_group_in_order, process_groups
from graph_trainer.errors import PassError

Agree = Callable[[int], int]
"""Makes of this rank's number the largest of all ranks'."""

_MADE_HERE = "graph_trainer"
"""What process groups that were made here are described as."""

_agree: ContextVar[Agree | None] = ContextVar("graph_trainer_agree_on_groups", default=None)


@contextlib.contextmanager
def groups_agreed_on(agree: Agree) -> Iterator[None]:
    """Inside, no rank makes groups before all have said which ones."""
    token = _agree.set(agree)
    try:
        yield
    finally:
        _agree.reset(token)


def no_new_groups(mine: int) -> int:
    """For `groups_agreed_on` while this rank is on its own. Raises PassError."""
    raise PassError(
        "a batch makes this rank's graph ask for process groups that its first graph did not need, "
        "and the other ranks are not there to make them; let every batch read the same "
        "parameters, or leave the pass out with compile.disable_passes"
    )


def groups_within(partitions: Sequence[Partition]) -> dict[Partition, str]:
    """Name of this rank's group in each partition of the world. What has been made before, for
    an earlier graph or pass, is used again; it lasts until the process groups are destroyed.

    Every rank of the world calls this, with the same partitions in any order.

    Raises:
        PassError: the ranks ask for different groups.
    """
    names = {partition: _made_before(partition) for partition in partitions}
    missing = sorted(partition for partition, name in names.items() if name is None)
    if missing:
        _check_agreed(missing)
    made = {partition: _make(partition) for partition in missing}
    return {partition: name or made[partition] for partition, name in names.items()}


def groups_made() -> list[dist.ProcessGroup]:
    """Those of this rank's process groups that were made here."""
    return [group for group, _ in process_groups() if group.group_desc == _MADE_HERE]


def _made_before(partition: Partition) -> str | None:
    """Every rank finds its group or none does: a partition is made on all ranks at once. Groups
    that others made may be there on some ranks only, and are not looked at."""
    everyone = tuple(range(dist.get_world_size()))
    if partition == (everyone,):
        world = dist.group.WORLD
        assert world is not None
        return str(world.group_name)
    ranks_of = dict(process_groups())
    names = [str(g.group_name) for g in groups_made() if ranks_of[g] in partition]
    return names[0] if names else None


def _check_agreed(partitions: list[Partition]) -> None:
    agree = _agree.get()
    if agree is None:
        return
    digest = hashlib.sha256(repr(partitions).encode()).digest()
    mine = int.from_bytes(digest[:7], "big")
    largest, smallest = agree(mine), -agree(-mine)
    if largest != mine or smallest != mine:
        raise PassError(
            f"the ranks ask for different process groups, rank {dist.get_rank()} for those of "
            f"{[p[0] for p in partitions]} and the like; look for code in the model that depends "
            "on the rank, or leave the pass out with compile.disable_passes"
        )


def _make(partition: Partition) -> str:
    rank = dist.get_rank()
    mine = ""
    for ranks in partition:
        group = new_group_in_order(ranks, _MADE_HERE)
        if rank in ranks:
            mine = str(group.group_name)
    assert mine, "a partition has a group for every rank of the world"
    return mine
