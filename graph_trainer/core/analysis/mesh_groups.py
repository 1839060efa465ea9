"""Which process groups the other ranks of a mesh are in, and which ranks run the same graph.

A rank knows only the process groups that it is in. A device mesh is the same on every rank and
lists all ranks, so the parallel groups follow from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import Input, with_parts
from graph_trainer.core.graph.subclasses import wrap
from graph_trainer.core.torch_private_groups import mesh_slices

Partition = tuple[Ranks, ...]
"""Groups of one size, sorted: every rank of the world is in exactly one. The order within a group
is the order of its ranks in a collective."""
Axes = tuple[int, ...]
"""Indices of mesh axes in the order in which ranks are counted, the fastest last."""


def _groups(mesh: torch.Tensor, axes: Axes) -> list[list[int]]:
    """Return the groups along `axes`: each has the ranks whose other coordinates are equal."""
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    members = math.prod(mesh.shape[axis] for axis in axes)
    return mesh.permute(*others, *axes).reshape(-1, members).tolist()


def _axes_of(mesh: torch.Tensor, ranks: Ranks) -> Axes | None:
    """Return the mesh axes along which the ranks are one group, in the order of the ranks.

    Axes with one coordinate are left out. None if the ranks, in this order, are no such group.
    """
    first = (mesh == ranks[0]).nonzero()[0].tolist()
    last = (mesh == ranks[-1]).nonzero()[0].tolist()
    axes = [axis for axis in range(mesh.ndim) if first[axis] != last[axis]]
    if math.prod(mesh.shape[axis] for axis in axes) != len(ranks):
        return None
    for order in itertools.permutations(axes):
        if list(ranks) in _groups(mesh, order):
            return order
    return None


def partition_of(meshes: list[torch.Tensor], ranks: Ranks) -> Partition | None:
    """Return the partition of the world that contains a group along axes of one of the meshes.

    None if the group lies along no axes of any mesh. The axes may be in any order, so that a group
    may count ranks by column.

    Args:
        meshes: tensors with every rank of the world once, at its coordinates.
    """
    for mesh in meshes:
        axes = _axes_of(mesh, ranks)
        if axes is not None:
            return tuple(sorted(tuple(group) for group in _groups(mesh, axes)))
    return None


def meshes_of(joint: JointGraph, world_size: int) -> list[torch.Tensor]:
    """Return the meshes of the graph's inputs that contain every rank of the world.

    An action that needs all ranks cannot rely on another mesh.
    """
    meshes = dict.fromkeys(tensor.device_mesh for _, tensor in dtensors_of(joint))
    return [ranks for ranks in map(mesh_slices, meshes) if ranks.numel() == world_size]


def dtensors_of(joint: JointGraph) -> Iterator[tuple[Input, DTensor]]:
    """Yield the inputs of a graph that are DTensors."""
    for spec, nodes in with_parts(joint.signature.inputs, joint.placeholders()):
        if spec.layout.subclass is DTensor:
            tensor = wrap([value_of(n) for n in nodes], spec.layout)
            assert isinstance(tensor, DTensor)
            yield spec, tensor


def joined(inner: Partition, outer: Partition) -> Partition | None:
    """Return the partition over which one gather equals a gather over `inner`, then `outer`.

    Member q of an outer group contributes what all members of q's inner group have, in its
    order. None if the result is not a partition: a rank occurs twice, as after two gathers over one
    axis, or ranks would not end with the same tensor. Two reduce-scatters in a row leave their
    parts in the order of `joined(second, first)`. Linear in the ranks of the world.
    """
    inner_of = {rank: group for group in inner for rank in group}
    groups: set[Ranks] = set()
    for group in outer:
        if any(rank not in inner_of for rank in group):
            return None
        groups.add(tuple(itertools.chain.from_iterable(inner_of[rank] for rank in group)))
    ranks = list(itertools.chain.from_iterable(groups))
    if len(ranks) != len(set(ranks)) or set(ranks) != set(inner_of):
        return None
    return tuple(sorted(groups))


@dataclass(frozen=True)
class RankClasses:
    """The ranks of a mesh, in classes of ranks whose graphs are equal.

    The coordinates along each axis have classes, and two ranks are in one class if their
    coordinates are in the same classes on every axis. So the parallel groups through the ranks of
    one class have members of the same classes, and one rank can represent its class.
    """

    names: tuple[str, ...]
    """Names of the axes. Ranks are counted along the last axis first."""
    labels: tuple[tuple[int, ...], ...]
    """For every axis the class of each coordinate."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks along each axis."""
        return tuple(map(len, self.labels))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole mesh."""
        return math.prod(self.sizes)

    @cached_property
    def _mesh(self) -> torch.Tensor:
        return torch.arange(self.num_ranks).view(self.sizes)

    def representatives(self) -> dict[int, int]:
        """Return the first rank of every class, with the number of ranks in the class."""
        members = {}
        classes_of_axes = [list(dict.fromkeys(labels)) for labels in self.labels]
        for classes in itertools.product(*classes_of_axes):
            axes = list(zip(self.labels, classes, strict=True))
            coordinates = tuple(labels.index(class_) for labels, class_ in axes)
            first = int(self._mesh[coordinates])
            members[first] = math.prod(labels.count(class_) for labels, class_ in axes)
        return members

    def representative_of(self, rank: int) -> int:
        """Return the first rank of a rank's class."""
        axes = zip(self.labels, self.coordinates(rank), strict=True)
        coordinates = tuple(labels.index(labels[coordinate]) for labels, coordinate in axes)
        return int(self._mesh[coordinates])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate along each axis."""
        return tuple(map(int, torch.unravel_index(torch.tensor(rank), self.sizes)))

    def axes_of_group(self, ranks: Ranks, rank: int) -> Axes | None:
        """Return the axes of more than one rank along which a group through `rank` lies.

        The last axis is the one along which the group counts its ranks first. None for any other
        set of ranks, or another order.
        """
        return _axes_of(self._mesh, ranks) if rank in ranks else None

    def classes_in_group(self, rank: int, axes: Axes) -> Ranks:
        """Return the representatives of all classes in a group, sorted; all are in the group.

        `rank` is one of them, and `axes` are the axes along which the group lies.
        """
        group = next(group for group in _groups(self._mesh, axes) if rank in group)
        return tuple(sorted({self.representative_of(member) for member in group}))

    def num_groups(self, rank: int, axes: Axes) -> int:
        """Return the number of equal groups: the parallel ones through all ranks of a class."""
        coordinates = self.coordinates(rank)
        count = 1
        for axis, labels in enumerate(self.labels):
            if axis not in axes:
                count *= labels.count(labels[coordinates[axis]])
        return count
