"""Which group every rank of the world is in, told from the meshes of a graph's inputs.

A rank's process groups say who its own partners are and nothing of the other ranks'. Whether
two collectives in a row are one over more ranks depends on those as well, and so does the
making of a new group, in which every rank takes part. A device mesh is the same on every rank
and lists them all.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graph_trainer.core.capture.subclasses import wrap
from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.torch_private import mesh_slices

Ranks = tuple[int, ...]
Partition = tuple[Ranks, ...]
"""Groups of one size, sorted: every rank of the world is in one of them. The order within a
group is the order of its ranks in a collective."""


class Partitions:
    """The partitions of the world along the meshes of a graph's DTensors.

    Arguments:
        meshes: the ranks of the world, each once, by coordinates: one tensor a mesh.
    """

    def __init__(self, meshes: list[torch.Tensor]) -> None:
        self._meshes = meshes
        self._places = [
            {rank: place for place, rank in enumerate(mesh.flatten().tolist())} for mesh in meshes
        ]
        self._known: dict[Ranks, Partition | None] = {}

    def through(self, ranks: Ranks) -> Partition | None:
        """The partition that has this group; None where it lies along no axes of any mesh.

        The axes may stand in any order, so groups that count ranks column by column are found.
        """
        if ranks not in self._known:
            found = (
                self._along(*each, ranks) for each in zip(self._meshes, self._places, strict=True)
            )
            self._known[ranks] = next((f for f in found if f is not None), None)
        return self._known[ranks]

    @staticmethod
    def _along(mesh: torch.Tensor, places: dict[int, int], ranks: Ranks) -> Partition | None:
        if any(rank not in places for rank in ranks):
            return None
        index = torch.tensor([places[rank] for rank in ranks])
        axes = [
            axis
            for axis, at in enumerate(torch.unravel_index(index, mesh.shape))
            if len(at.unique()) > 1
        ]
        if math.prod(mesh.shape[axis] for axis in axes) != len(ranks):
            return None
        for order in itertools.permutations(axes):
            last = range(-len(order), 0)
            groups = mesh.movedim(order, tuple(last)).reshape(-1, len(ranks)).tolist()
            partition = tuple(sorted(map(tuple, groups)))
            if ranks in partition:
                return partition
        return None


def partitions_of(joint: JointGraph, world_size: int) -> Partitions:
    """Those that the inputs' meshes tell. A mesh that leaves ranks of the world out tells none:
    what is not said of every rank cannot be done on every rank."""
    meshes: dict[DeviceMesh, None] = {}
    for kind in InputKind:
        for spec, nodes in joint.inputs_of(kind):
            if spec.layout.subclass is DTensor:
                tensor = wrap([value_of(n) for n in nodes], spec.layout)
                assert isinstance(tensor, DTensor)
                meshes[tensor.device_mesh] = None
    slices = map(mesh_slices, meshes)
    return Partitions([ranks for ranks in slices if ranks.numel() == world_size])


def joined(inner: Partition, outer: Partition) -> Partition | None:
    """The partition over which one gather does what two in a row do, first over `inner`.

    Member q of an outer group comes with what all of q's inner group hold, in its order. None
    where that is no partition: a rank twice, as behind two gathers over the same axis, or ranks
    that would not end up with the same.

    Two reduce-scatters in a row leave their parts in the order of `joined(second, first)`.
    Linear in the ranks of the world.
    """
    of = {rank: group for group in inner for rank in group}
    if any(rank not in of for group in outer for rank in group):
        return None
    flat = {tuple(rank for member in group for rank in of[member]) for group in outer}
    ranks = [rank for group in flat for rank in group]
    if len(ranks) != len(set(ranks)) or set(ranks) != set(of):
        return None
    return tuple(sorted(flat))
