"""Regions: the runs of compute nodes that a compiler may take as one program each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graph_trainer.core.analysis.fusible import is_fusible
from graph_trainer.core.graph.annotations import block_of, module_of, phase_of, tensor_of, value_of
from graph_trainer.core.graph.host_copies import is_host_copy
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.graph.ops import (
    ValueStorages,
    collective_kind,
    getitems_of,
    is_getitem,
    runs_once,
    schema_of,
    storages_in,
    value_storages,
    written_arguments,
)


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that run as one program: no collective, copy to the host or wait is between them."""

    nodes: tuple[fx.Node, ...]
    """The nodes that run inside, in the order of the graph; getitems follow their op."""
    inputs: tuple[fx.Node, ...]
    """The nodes outside that it reads, in the order of their first readers. Each is one tensor."""
    outputs: tuple[fx.Node, ...]
    """The nodes inside that are read outside. Each is one tensor with a storage of its own."""
    after: tuple[fx.Node, ...]
    """Views of its outputs that are read outside, and assertions on them: they run after the
    region. A view that is read inside too is in both `nodes` and `after`. So is every write: what
    reads its result outside reads the tensor that it wrote."""


def find_regions(graph: fx.Graph) -> list[Region]:
    """List the parts of a graph that are worth compiling. Linear in nodes.

    A region ends at every collective, copy to host memory or back, and wait, at every random
    number, at a write into something that the region did not make, at a shape that is not fixed,
    and where the nodes of another layer or phase begin: layers that are equal then have equal
    regions. A region returns no views, so that its results share no memory with each other or with
    its inputs, and no tuples: it contains the getitems of its ops, wherever they are in the graph.
    Left out are parts with fewer than two nodes that a compiler can fuse, and parts that read a
    conjugated view.
    """
    storages = value_storages(graph)
    regions = []
    for run in _runs(graph, storages):
        region = _region(run, storages)
        # a compiler knows shape, strides, dtype and device of each input, not what is conjugated
        inputs = [tensor_of(node) for node in region.inputs]
        conjugated = any(tensor.is_conj() or tensor.is_neg() for tensor in inputs)
        fusible = sum(is_fusible(node) for node in region.nodes)
        if region.outputs and not conjugated and fusible > 1:
            regions.append(region)
    return regions


def _runs(graph: fx.Graph, storages: Mapping[fx.Node, ValueStorages]) -> Iterator[list[fx.Node]]:
    """Yield runs of nodes that each fit one region, in the order of the graph."""
    run: list[fx.Node] = []
    inside: set[fx.Node] = set()
    run_part: object = None
    for node in compute_nodes(graph):
        if is_getitem(node):
            continue  # added with its op
        view = _is_view(node, storages[node])
        if view and not run:
            # a region that began with views would differ from that of an equal layer in which a
            # collective is between the views and the rest
            continue
        fits = _fits(node, storages, inside)
        part = (phase_of(node), block_of(module_of(node)))
        if fits and (view or part == run_part):
            nodes = [node, *getitems_of(node)]
            run += nodes
            inside.update(nodes)
            continue
        if view and not fits and inside.isdisjoint(node.all_input_nodes):
            continue  # a view of a value from before the run does not end the run
        yield run
        # a node that fits only because the run made what it views or writes cannot begin a region
        fits = fits and _fits(node, storages, set())
        run = [node, *getitems_of(node)] if fits else []
        inside = set(run)
        run_part = part
    yield run


def _fits(node: fx.Node, storages: Mapping[fx.Node, ValueStorages], inside: set[fx.Node]) -> bool:
    """Return whether a node may run in a region that so far has the nodes `inside`."""
    if schema_of(node) is None or collective_kind(node) is not None or is_host_copy(node):
        return False
    for source in (node, *node.all_input_nodes):
        value = value_of(source)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                return False
            numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
            if any(isinstance(number, torch.SymInt) for number in numbers):
                return False
    if isinstance(value_of(node), tuple | list) and not all(map(is_getitem, node.users)):
        return False
    if not all(_all_of(storages[target], inside) for target in written_arguments(node)):
        return False
    if _asserts(node):
        return node.target.namespace == "aten"  # type: ignore[union-attr]
    if runs_once(node):
        return False
    # either all of its results are new tensors or all are views: a list of both fits no region
    is_new = {s[0] is node for s in storages_in(storages[node])}
    return len(is_new) == 1


def _is_view(node: fx.Node, storages: ValueStorages) -> bool:
    """Return whether a node makes no storage: a view, a list of views, a getitem."""
    if is_getitem(node):
        return True
    if written_arguments(node) or collective_kind(node) is not None or is_host_copy(node):
        return False
    return not _makes(node, storages)


def _makes(node: fx.Node, storages: ValueStorages) -> bool:
    return not is_getitem(node) and any(s[0] is node for s in storages_in(storages))


def _all_of(storages: ValueStorages, makers: set[fx.Node]) -> bool:
    return all(s[0] in makers for s in storages_in(storages))


def _asserts(node: fx.Node) -> bool:
    """Return whether a node only checks a value: it returns and writes nothing."""
    schema = schema_of(node)
    return schema is not None and not schema.returns


def _region(run: list[fx.Node], storages: Mapping[fx.Node, ValueStorages]) -> Region:
    """Decide which nodes of a run are compiled, which run after it, and what it reads and returns.

    From the end, so that all readers of a node are placed before the node.
    """
    members = set(run)
    makers = {n for n in run if not _asserts(n) and _makes(n, storages[n])}
    inside: set[fx.Node] = set()
    outside: set[fx.Node] = set()  # a view of a result may be in both
    results: list[fx.Node] = []
    for node in reversed(run):
        read_outside = any(u not in members or u in outside for u in node.users)
        if node in makers or (is_getitem(node) and node.args[0] in makers):
            inside.add(node)
            if read_outside and isinstance(value_of(node), torch.Tensor):
                results.append(node)
        elif _asserts(node):
            outside.add(node)
        elif _all_of(storages[node], makers):
            # a view of a result, or a write into one
            if read_outside:
                outside.add(node)
            if not read_outside or any(u in inside for u in node.users) or written_arguments(node):
                inside.add(node)
        elif read_outside:  # a view of an input: what reads it outside needs the view itself
            outside.add(node)
        else:
            inside.add(node)
    # a region reads the getitems of an op outside as its inputs: it cannot read their tuple
    inside -= {n for n in inside if is_getitem(n) and n.args[0] not in inside}
    nodes = tuple(n for n in run if n in inside)
    inputs = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
    after = (n for n in run if n in outside and (_asserts(n) or _all_of(storages[n], makers)))
    return Region(nodes, tuple(inputs), tuple(reversed(results)), tuple(after))
