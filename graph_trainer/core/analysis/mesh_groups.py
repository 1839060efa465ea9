"""Which process groups the other ranks of a mesh are in, and which ranks run the same graph.

The process groups of a rank say nothing about groups that the rank is not in. A device mesh is
the same on every rank and lists all ranks, so the parallel groups follow from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graph_trainer.core.analysis.collective_kinds import Ranks
from graph_trainer.core.capture.subclasses import wrap
from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.torch_private import mesh_slices

Partition = tuple[Ranks, ...]
"""Groups of one size, sorted: every rank of the world is in exactly one. The order within a group
is the order of its ranks in a collective."""
Axes = tuple[int, ...]
"""Indices of mesh axes in the order in which ranks are counted, the fastest last."""


def _coordinates(sizes: Sequence[int], position: int) -> list[int]:
    """The coordinates of a position in a row-major mesh."""
    found = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        found.append(coordinate)
    return found[::-1]


def _position(sizes: Sequence[int], coordinates: Iterable[int]) -> int:
    position = 0
    for size, coordinate in zip(sizes, coordinates, strict=True):
        position = position * size + coordinate
    return position


def _through(sizes: Sequence[int], position: int, axes: Axes) -> Ranks:
    """The positions along `axes` whose other coordinates are those of `position`."""
    at = _coordinates(sizes, position)
    found = []
    for swept in itertools.product(*(range(sizes[axis]) for axis in axes)):
        for axis, coordinate in zip(axes, swept, strict=True):
            at[axis] = coordinate
        found.append(_position(sizes, at))
    return tuple(found)


def _axes_of(sizes: Sequence[int], positions: Ranks) -> Axes | None:
    """The axes of more than one coordinate along which the positions lie in their order; None
    for any other set of positions, or another order."""
    ends = zip(*(_coordinates(sizes, positions[end]) for end in (0, -1)), strict=True)
    axes = [axis for axis, (first, last) in enumerate(ends) if first != last]
    if math.prod(sizes[axis] for axis in axes) != len(positions):
        return None
    orders = itertools.permutations(axes)
    return next((o for o in orders if positions == _through(sizes, positions[0], o)), None)


class Partitions:
    """The partitions of the world along the meshes of a graph's DTensors.

    Args:
        meshes: one tensor for each mesh: the ranks of the world, each once, by coordinates.
    """

    def __init__(self, meshes: list[torch.Tensor]) -> None:
        self._meshes = [(tuple(mesh.shape), mesh.flatten().tolist()) for mesh in meshes]
        self._known: dict[Ranks, Partition | None] = {}

    def through(self, ranks: Ranks) -> Partition | None:
        """Return the partition that contains a group, None if the group lies along no axes of
        any mesh. The axes may be in any order: groups that count ranks by column are found."""
        if ranks not in self._known:
            found = (self._along(*mesh, ranks) for mesh in self._meshes)
            self._known[ranks] = next((f for f in found if f is not None), None)
        return self._known[ranks]

    @staticmethod
    def _along(sizes: tuple[int, ...], mesh: list[int], ranks: Ranks) -> Partition | None:
        position = {rank: index for index, rank in enumerate(mesh)}
        if any(rank not in position for rank in ranks):
            return None
        axes = _axes_of(sizes, tuple(position[rank] for rank in ranks))
        if axes is None:
            return None
        firsts = [[0] if axis in axes else range(size) for axis, size in enumerate(sizes)]
        starts = (_position(sizes, at) for at in itertools.product(*firsts))
        groups = (_through(sizes, start, axes) for start in starts)
        return tuple(sorted(tuple(mesh[place] for place in group) for group in groups))


def partitions_of(joint: JointGraph, world_size: int) -> Partitions:
    """Return the partitions that the meshes of the graph's inputs define.

    A mesh that does not contain every rank of the world defines none: an action that needs all
    ranks cannot rely on it.
    """
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
    """Return the partition over which one gather equals a gather over `inner`, then `outer`.

    Member q of an outer group contributes what all members of q's inner group have, in its
    order. None if the result is no partition: a rank occurs twice, as after two gathers over one
    axis, or ranks would not end with the same tensor. Two reduce-scatters in a row leave their
    parts in the order of `joined(second, first)`. Linear in the ranks of the world.
    """
    of = {rank: group for group in inner for rank in group}
    if any(rank not in of for group in outer for rank in group):
        return None
    flat = {tuple(rank for member in group for rank in of[member]) for group in outer}
    ranks = [rank for group in flat for rank in group]
    if len(ranks) != len(set(ranks)) or set(ranks) != set(of):
        return None
    return tuple(sorted(flat))


@dataclass(frozen=True, slots=True)
class RankClasses:
    """The ranks of a mesh, in classes of ranks whose graphs are equal.

    Each axis has classes of coordinates, and a class of ranks is one of each axis. So the
    parallel groups through the ranks of one class have members of the same classes, and one rank
    can represent its class.
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

    def representatives(self) -> dict[int, int]:
        """Return the first rank of every class, with the number of ranks in the class."""
        found = {}
        for kinds in itertools.product(*map(dict.fromkeys, self.labels)):
            axes = list(zip(self.labels, kinds, strict=True))
            first = _position(self.sizes, [labels.index(kind) for labels, kind in axes])
            found[first] = math.prod(labels.count(kind) for labels, kind in axes)
        return found

    def representative_of(self, rank: int) -> int:
        """Return the first rank of a rank's class."""
        places = zip(self.labels, self.coordinates(rank), strict=True)
        return _position(self.sizes, [labels.index(labels[place]) for labels, place in places])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate along each axis."""
        return tuple(_coordinates(self.sizes, rank))

    def axes_of_group(self, ranks: Ranks, rank: int) -> Axes | None:
        """Return the axes of more than one rank along which a group through `rank` lies, the one
        along which it counts first at the end; None for any other set of ranks, or another
        order."""
        return _axes_of(self.sizes, ranks) if rank in ranks else None

    def classes_in_group(self, rank: int, axes: Axes) -> Ranks:
        """Return the representatives of all classes in a group, sorted; all are in the group.

        Args:
            rank: a representative in the group.
            axes: the axes along which the group lies.
        """
        group = _through(self.sizes, rank, axes)
        return tuple(sorted({self.representative_of(member) for member in group}))

    def num_groups(self, rank: int, axes: Axes) -> int:
        """Return the number of equal groups: the parallel ones through all ranks of a class."""
        at = self.coordinates(rank)
        others = [axis for axis in range(len(at)) if axis not in axes]
        return math.prod(self.labels[axis].count(self.labels[axis][at[axis]]) for axis in others)
