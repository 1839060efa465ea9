"""Which nodes a compiler fuses into one kernel, and which storages it then never writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from graph_trainer.core.analysis.fsdp_copies import fsdp_copies
from graph_trainer.core.analysis.fusible import free_nodes, fusible_nodes, has_own_buffer
from graph_trainer.core.analysis.regions import find_regions
from graph_trainer.core.graph.annotations import phase_of, value_of
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, is_collective, storage_roots
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
    is_compiled: Callable[[fx.Node], bool] = lambda node: False
    """Whether a compiler sees a node, and may generate its kernels if it is in no group too."""


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

    Args:
        may_fuse: which nodes the compiler sees.
        looks_through: nodes that neither fuse nor separate others.
        part_of: the part of a node, its phase for example: nodes of two parts are not fused.
    """
    graph = joint.graph
    is_free = free_nodes(graph)
    is_fusible = fusible_nodes(graph)
    depth: dict[fx.Node, int] = {}
    groups = _Groups()
    source_of: dict[fx.Node, fx.Node] = {}  # the node at which a chain of views starts
    place = -1
    for node in graph.nodes:
        inputs = inputs_of(node)
        depth_of_inputs = max((depth[n] for n in inputs), default=0)
        if looks_through(node):
            source_of[node] = node
            depth[node] = depth_of_inputs
            continue
        place += 1
        fusible = is_fusible[node] and may_fuse(node)
        source_of[node] = source_of[next(iter(inputs))] if is_free[node] and inputs else node
        depth[node] = depth_of_inputs if fusible or is_free[node] else depth_of_inputs + 1
        if fusible:
            sources = [source_of[n] for n in inputs]
            same_depth = [source for source in sources if depth[source] == depth[node]]
            groups.add(node, place, same_depth, part_of(node))
    group = groups.by_node()
    in_registers = (node for node in group if not has_own_buffer(node))
    return Fusion(group, _read_inside(graph, group, in_registers), may_fuse)


def _read_inside(
    graph: fx.Graph, group: Mapping[fx.Node, int], nodes: Iterable[fx.Node]
) -> set[Storage]:
    """Return the storages that nodes allocate and only nodes of their group read."""
    is_free = free_nodes(graph)
    roots = storage_roots(graph)
    inside = {(node, 0) for node in nodes if roots[node] == (node, 0)}
    for node in graph.nodes:
        if is_free[node]:
            continue
        for source in inputs_of(node):
            root = roots[source]
            if root in inside and group.get(node) != group[root[0]]:
                inside.discard(root)
    return inside


def with_fused_copies(joint: JointGraph, fusion: Fusion) -> Fusion:
    """Add a group for the copies before each of FSDP's collectives, and one for those after it.

    A fusion's other groups must have no node with an FSDP role. Linear in nodes.
    """
    is_free = free_nodes(joint.graph)
    copies = fsdp_copies(joint.graph)
    groups: dict[tuple[bool, fx.Node], int] = {}
    group = dict(fusion.group)
    for place, node in enumerate(joint.graph.nodes):
        is_after = node in copies.after
        if is_free[node] or is_collective(node) or not (is_after or node in copies.before):
            continue
        collective = copies.after[node] if is_after else copies.before[node]
        group[node] = groups.setdefault((is_after, collective), place)
    before = [node for node in copies.before if node in group]
    kept_inside = fusion.kept_inside | _read_inside(joint.graph, group, before)
    return replace(fusion, group=group, kept_inside=kept_inside)


def fuse_in_regions(joint: JointGraph) -> Fusion:
    """Group nodes within each region only (see `find_regions`). Linear in nodes."""
    regions = find_regions(joint.graph)
    region_of: dict[fx.Node, int] = {}
    returned: set[Storage] = set()
    for index, region in enumerate(regions):
        region_of.update(dict.fromkeys(region.nodes, index))
        returned.update((node, 0) for node in region.outputs)
    fusion = fuse(joint, region_of.__contains__, part_of=region_of.get)
    return Fusion(fusion.group, fusion.kept_inside - returned, region_of.__contains__)


def read_until(joint: JointGraph, fusion: Fusion) -> dict[Storage, int]:
    """Return the position until which kernels need the storages that they are the last to read.

    A kernel reads and writes at the same time. So a storage that it reads last is needed until the
    kernel has written its last result, unless a result of the same bytes takes its place. Linear in
    nodes.
    """
    roots = storage_roots(joint.graph)
    last_reader: dict[Storage, fx.Node] = {}
    position: dict[fx.Node, int] = {}
    last_result: dict[int, int] = {}  # by group, the position
    num_results: dict[int, Counter[int]] = defaultdict(Counter)  # by group and bytes
    for place, node in enumerate(joint.graph.nodes):
        position[node] = place
        for source in inputs_of(node):
            last_reader[roots[source]] = node
        group = fusion.group.get(node)
        if group is not None and roots[node] == (node, 0) and (node, 0) not in fusion.kept_inside:
            last_result[group] = place
            num_results[group][_bytes((node, 0))] += 1
    until = {}
    for storage, node in last_reader.items():
        group = fusion.group.get(node)
        if group is None or fusion.group.get(storage[0]) == group:
            continue
        if last_result.get(group, 0) <= position[node]:
            continue
        size = _bytes(storage)
        if num_results[group][size]:
            num_results[group][size] -= 1
        else:
            until[storage] = last_result[group]
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
        joined = set()
        for group in groups - self._closed:
            if self._part[group] == part and place - group <= _REACH:
                joined.add(group)
        self._closed |= groups - joined
        first = min(joined, default=place)
        for group in joined - {first}:
            self._merged_into[group] = first
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
