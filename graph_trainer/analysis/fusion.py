"""Which nodes a compiler makes one kernel of, and what it then never writes to memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graph_trainer.analysis.lifetimes import Storage
from graph_trainer.analysis.ops import (
    aliased_input,
    aten,
    is_collective,
    is_getitem,
    is_random,
    is_wait,
    schema_of,
    storage_roots,
    written_arguments,
)
from graph_trainer.joint_graph import JointGraph, Phase, phase_of

# Two nodes that are further apart in the graph are not fused: Inductor scores fusions by how
# near their nodes are, and what is far apart keeps a buffer alive.
_REACH = 128

_FUSIBLE_REDUCTIONS = {
    "aten::sum",
    "aten::mean",
    "aten::amax",
    "aten::amin",
    "aten::var_mean",
    "aten::var",
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
    "aten::nll_loss_forward",
    "aten::nll_loss_backward",
    "aten::gather",
}
_FUSIBLE_COPIES = {
    "aten::_to_copy",
    "aten::clone",
    "aten::cat",
    "aten::arange",
    "aten::full",
    "aten::zeros",
    "aten::zeros_like",
    "aten::ones",
    "aten::ones_like",
    "aten::scalar_tensor",
    "aten::silu_backward",
    "aten::gelu_backward",
    "aten::embedding",
    "aten::native_dropout_backward",
    "aten::view_as_complex",
    "aten::constant_pad_nd",
}


@dataclass(frozen=True, slots=True)
class Fusion:
    """Groups of nodes that become one kernel."""

    group: dict[fx.Node, int]
    """The group of every fusible node; nodes of a group run as one kernel."""
    kept_inside: set[Storage]
    """Storages that only their own group reads: they are never allocated."""


def no_fusion() -> Fusion:
    """Every node its own kernel, as an eager backend runs them."""
    return Fusion({}, set())


def fuse(joint: JointGraph) -> Fusion:
    """Group elementwise and reducing nodes as a compiler would. Linear in nodes.

    A node joins the group of a fusible node that it reads when both are of one phase, near one
    another, and nothing that cannot be fused lies on a path between them: every node has a
    depth, the number of unfusible nodes on the longest way to it, and a group is of one depth.
    """
    graph = joint.graph
    roots = storage_roots(graph)
    depth: dict[fx.Node, int] = {}
    position: dict[fx.Node, int] = {}
    group: dict[fx.Node, int] = {}
    phases: dict[int, Phase | None] = {}
    source_of: dict[fx.Node, fx.Node] = {}  # behind views
    started: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        position[node] = place
        fusible, view = is_fusible(node), is_free(node)
        inputs = node.all_input_nodes
        source_of[node] = source_of[inputs[0]] if view and inputs else node
        barrier = 0 if fusible or view else 1
        depth[node] = max((depth[n] for n in inputs), default=0) + barrier
        if not fusible:
            continue
        for n in inputs:
            found = group.get(source_of[n])
            if (
                found is not None
                and depth[n] == depth[node]
                and phases[found] is phase_of(node)
                and place - started[found] <= _REACH
            ):
                group[node] = found
                break
        else:
            group[node] = place
            phases[place], started[place] = phase_of(node), place
    return Fusion(group, _kept_inside(graph, roots, group))


def _kept_inside(
    graph: fx.Graph, roots: dict[fx.Node, Storage], group: dict[fx.Node, int]
) -> set[Storage]:
    inside = {roots[node] for node in group if roots[node] == (node, 0)}
    for node in graph.nodes:
        if is_free(node):
            continue
        for source in node.all_input_nodes:
            root = roots[source]
            if root in inside and group.get(node) != group[root[0]]:
                inside.discard(root)
    return inside


def is_free(node: fx.Node) -> bool:
    """Whether a node computes nothing: a view, a wait, one result of several."""
    if node.op != "call_function":
        return node.op != "output"
    if is_getitem(node) or is_wait(node):
        return True
    schema = schema_of(node)
    if schema is None or is_collective(node):
        return False
    listed = bool(schema.returns) and schema.returns[0].alias_info is not None
    return (aliased_input(node) is not None or listed) and not written_arguments(node)


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler can make a node part of a kernel with its neighbours."""
    schema = schema_of(node)
    if schema is None or is_free(node) or is_collective(node) or is_random(node):
        return False
    if schema.name in _FUSIBLE_REDUCTIONS or schema.name in _FUSIBLE_COPIES:
        return True
    assert isinstance(node.target, type(aten.add.Tensor))
    return torch.Tag.pointwise in node.target.tags
