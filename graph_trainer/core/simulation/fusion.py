"""Which nodes a compiler fuses into one kernel, and which storages it then never writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from graph_trainer.core.analysis.fusible import free_nodes, fusible_nodes, has_own_buffer
from graph_trainer.core.analysis.regions import find_regions
from graph_trainer.core.graph.annotations import phase_of, value_of
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, storage_roots
from graph_trainer.core.torch_private import inputs_of

# Nodes that are further apart in the graph are not fused: Inductor scores fusions by the distance
# of their nodes, since a fusion over a long distance keeps a buffer alive.
_REACH = 128


@dataclass(frozen=True, slots=True)
class Fusion:
    """Groups of nodes that become one kernel."""

    group: dict[fx.Node, int]
    """The group of every fusible node. The nodes of a group run as one kernel."""
    kept_inside: set[Storage]
    """Storages that only nodes of their group read: they are never allocated."""


NO_FUSION = Fusion({}, set())
"""An eager backend runs every node as a separate kernel."""


def fuse(
    joint: JointGraph,
    may_fuse: Callable[[fx.Node], bool] = lambda node: True,
    looks_through: Callable[[fx.Node], bool] = lambda node: False,
    part_of: Callable[[fx.Node], object] = phase_of,
) -> Fusion:
    """Group elementwise and reducing nodes as a compiler would. Linear in nodes.

    A node joins the groups of all fusible nodes that it reads, and merges these groups, if all are
    of one part, near each other, and no unfusible node lies on a path between them. For the last
    condition each node has a depth, the number of unfusible nodes on the longest path to it, and
    a group has nodes of one depth. A group that a node reads and does not join gets no further
    nodes, so no two groups can depend on each other.

    The compiler sees the nodes of `may_fuse`; those of `looks_through` neither fuse nor separate
    others. Parts are the phases, or whatever else nothing is fused across.
    """
    graph = joint.graph
    free, could_fuse = free_nodes(graph), fusible_nodes(graph)
    depth: dict[fx.Node, int] = {}
    groups = _Groups()
    source_of: dict[fx.Node, fx.Node] = {}  # the node that a chain of views starts from
    place = -1
    for node in graph.nodes:
        if looks_through(node):
            source_of[node] = node
            depth[node] = max((depth[n] for n in inputs_of(node)), default=0)
            continue
        place += 1
        fusible, view = could_fuse[node] and may_fuse(node), free[node]
        inputs = inputs_of(node)
        source_of[node] = source_of[next(iter(inputs))] if view and inputs else node
        barrier = 0 if fusible or view else 1
        depth[node] = max((depth[n] for n in inputs), default=0) + barrier
        if fusible:
            sources = [source_of[n] for n in inputs]
            groups.add(node, place, [s for s in sources if depth[s] == depth[node]], part_of(node))
    group = groups.by_node()
    # results that only nodes of their group read are never allocated
    roots = storage_roots(graph)
    own = (node for node in group if not has_own_buffer(node))
    inside = {roots[node] for node in own if roots[node] == (node, 0)}
    for node in graph.nodes:
        if free[node]:
            continue
        for source in inputs_of(node):
            root = roots[source]
            if root in inside and group.get(node) != group[root[0]]:
                inside.discard(root)
    return Fusion(group, inside)


def fuse_in_regions(joint: JointGraph) -> Fusion:
    """Group the nodes of each region alone (see `find_regions`). Linear in nodes."""
    regions = find_regions(joint.graph)
    region = {n: place for place, r in enumerate(regions) for n in r.nodes}
    fusion = fuse(joint, region.__contains__, part_of=region.get)
    returned = {(n, 0) for r in regions for n in r.outputs}
    return Fusion(fusion.group, fusion.kept_inside - returned)


def read_until(joint: JointGraph, fusion: Fusion) -> dict[Storage, int]:
    """Return the position until which kernels need storages that they are the last to read.

    A kernel reads and writes at once. So what it reads last is there until it has written its last
    result, unless a result of the same bytes takes its place. Linear in nodes.
    """
    roots = storage_roots(joint.graph)
    last_reader: dict[Storage, tuple[int, fx.Node]] = {}
    end: dict[int, int] = {}
    results: dict[int, Counter[int]] = defaultdict(Counter)
    for place, node in enumerate(joint.graph.nodes):
        for source in inputs_of(node):
            last_reader[roots[source]] = (place, node)
        group = fusion.group.get(node)
        if group is not None and roots[node] == (node, 0) and (node, 0) not in fusion.kept_inside:
            end[group] = place
            results[group][_bytes((node, 0))] += 1
    until = {}
    for storage, (place, node) in last_reader.items():
        group = fusion.group.get(node)
        if group is None or fusion.group.get(storage[0]) == group or end.get(group, 0) <= place:
            continue
        size = _bytes(storage)
        if results[group][size]:
            results[group][size] -= 1
        else:
            until[storage] = end[group]
    return until


def _bytes(storage: Storage) -> int:
    node, index = storage
    value = value_of(node)
    result = value[index] if isinstance(value, (tuple, list)) else value
    return nbytes_of(result) if isinstance(result, torch.Tensor) else 0


class _Groups:
    """Disjoint groups of nodes, identified by the position of their first node."""

    def __init__(self) -> None:
        self._group: dict[fx.Node, int] = {}
        self._part: dict[int, object] = {}
        self._merged_into: dict[int, int] = {}
        self._closed: set[int] = set()

    def add(self, node: fx.Node, place: int, sources: list[fx.Node], part: object) -> None:
        """Merge the groups of the nodes that a node reads, where allowed, and add the node."""
        groups = {self._merged(self._group[s]) for s in sources if s in self._group}
        joined = {g for g in groups - self._closed if self._part[g] == part and place - g <= _REACH}
        self._closed |= groups - joined
        first = min(joined, default=place)
        for each in joined - {first}:
            self._merged_into[each] = first
        self._group[node] = first
        self._part[first] = part

    def by_node(self) -> dict[fx.Node, int]:
        """Return the group of every node after all merges."""
        return {node: self._merged(group) for node, group in self._group.items()}

    def _merged(self, group: int) -> int:
        path = []
        while group in self._merged_into:
            path.append(group)
            group = self._merged_into[group]
        self._merged_into |= dict.fromkeys(path, group)
        return group
