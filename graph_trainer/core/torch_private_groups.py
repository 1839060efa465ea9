"""Private names of torch about process groups and meshes, with the reason each is needed.

As `torch_private`, which has all others.
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
    """Return the process groups that this rank is in, with their global ranks in group order. torch
    keeps them by name and by group and has no public list."""
    return [(g, tuple(ranks)) for g, ranks in _world.pg_group_ranks.items() if g in _world.pg_map]


def new_group_in_order(ranks: Sequence[int], description: str) -> dist.ProcessGroup:
    """Make a process group with the ranks in the listed order; every rank of the world calls it.
    dist.new_group sorts them, unless sort_ranks is False, which torch has from 2.13 on."""
    in_order = list(ranks)
    if in_order == sorted(in_order):
        return dist.new_group(in_order, group_desc=description)
    return dist.new_group(in_order, group_desc=description, sort_ranks=False)


def gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a gloo backend whose collectives run one after the other.

    torch's own constructor takes two threads and no public way leads to another number: with two,
    collectives of a group run at once, and several all-gathers then corrupt the heap (torch 2.13).
    Network interfaces are chosen as torch chooses them.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack _Options
    options = gloo._Options()
    options._threads = 1
    options._timeout = timeout
    names = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    options._devices = [gloo.create_device(interface=n) for n in names[:1]] or [
        gloo.create_default_device()
    ]
    return gloo(store, rank, size, options)


def become(rank: int, ranks: int) -> None:
    """Start over as `rank` of `ranks`, on a fake process group that communicates nothing.

    An earlier process group is ended first, with what DTensor inferred for its meshes. The backend
    "fake" and the store that torch makes for it are of torch's own tests. torch 2.11 to 2.15.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=ranks)


def mesh_slices(mesh: Any) -> torch.Tensor:
    """Return the ranks of a mesh and of all its parallel slices: [slices, *shape of the mesh].

    `DeviceMesh.mesh` is this rank's slice alone where the mesh is part of a larger one. Its
    layout and the ranks that are laid out are private.
    """
    return mesh._layout.remap_to_tensor(mesh._rank_map)


def concatenate_meshes(meshes: list[Any]) -> Any:
    """Make one mesh with the dimensions of `meshes`, all slices of one root mesh.

    DeviceMesh._concatenate is what FSDP2 itself calls to put its own dimensions before those
    of tensor parallelism; there is no public spelling.
    """
    return dist.device_mesh.DeviceMesh._concatenate(meshes)


def take_timeout(group: Any, other: Any) -> None:
    """Set the timeout of a gloo backend to that of another one.

    torch's setter changes only the first backend of a process group, and a backend has its
    timeout in private options only. torch 2.13 to 2.15.
    """
    group._set_default_timeout(other.options._timeout)
