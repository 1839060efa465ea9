"""Private names of torch for process groups and meshes, with the reason each is needed.

See `torch_private`, which has the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The store of the rendezvous, which any rank may use at any time; the process group of a name in a
# graph; what torch.distributed.set_timeout of later torch does; all groups of this rank.
from torch.distributed.distributed_c10d import _get_default_store as default_store  # noqa: F401
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.distributed_c10d import (
    _set_pg_timeout as set_process_group_timeout,  # noqa: F401
)


def group_ranks(group_name: str) -> tuple[int, ...]:
    """Return the global ranks of the process group that a collective in a graph names."""
    return tuple(dist.get_process_group_ranks(_resolve_process_group(group_name)))  # type: ignore[arg-type]


def group_backend(group_name: str) -> str:
    """Return the backend of the process group that a collective in a graph names."""
    return str(dist.get_backend(_resolve_process_group(group_name)))  # type: ignore[arg-type]


def process_groups() -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    """Return the process groups that this rank is in, with their global ranks in group order.

    torch has no public list of them.
    """
    return [
        (group, tuple(ranks))
        for group, ranks in _world.pg_group_ranks.items()
        if group in _world.pg_map
    ]


def new_group_in_order(ranks: Sequence[int], description: str) -> dist.ProcessGroup:
    """Make a process group with the ranks in the listed order. Every rank of the world calls it.

    dist.new_group sorts the ranks unless sort_ranks is False, an argument since torch 2.13.
    """
    in_order = list(ranks)
    if in_order == sorted(in_order):
        return dist.new_group(in_order, group_desc=description)
    return dist.new_group(in_order, group_desc=description, sort_ranks=False)


def gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a gloo backend whose collectives run one after the other.

    torch's constructor takes two threads, and there is no public way to set another number. With
    two, collectives of a group run at the same time, and several all-gathers then corrupt the heap
    (torch 2.13). Chooses network interfaces as torch does.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack _Options
    options = gloo._Options()
    options._threads = 1
    options._timeout = timeout
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        options._devices = [gloo.create_device(interface=interfaces[0])]
    else:
        options._devices = [gloo.create_default_device()]
    return gloo(store, rank, size, options)


def become(rank: int, ranks: int) -> None:
    """Become `rank` of `ranks`, on a fake process group that communicates nothing.

    Destroys an earlier process group first, and clears what DTensor cached for its meshes. The
    backend "fake" and its store belong to torch's tests. torch 2.11 to 2.15.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=ranks)


def mesh_slices(mesh: Any) -> torch.Tensor:
    """Return the ranks of a mesh and of all its parallel slices: [slices, *shape of the mesh].

    If the mesh is part of a larger one, `DeviceMesh.mesh` is this rank's slice alone. The layout
    and the ranks of a mesh are private.
    """
    return mesh._layout.remap_to_tensor(mesh._rank_map)


def concatenate_meshes(meshes: list[Any]) -> Any:
    """Make one mesh with the dimensions of `meshes`, all slices of one root mesh.

    FSDP2 itself calls DeviceMesh._concatenate, to put its dimensions before those of tensor
    parallelism; it has no public name.
    """
    return dist.device_mesh.DeviceMesh._concatenate(meshes)


def take_timeout(group: Any, other: Any) -> None:
    """Set the timeout of a gloo backend to that of another one.

    torch's setter changes only the first backend of a process group, and the timeout of a backend
    is in private options only. torch 2.13 to 2.15.
    """
    group._set_default_timeout(other.options._timeout)
