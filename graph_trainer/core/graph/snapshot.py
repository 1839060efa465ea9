"""Copy a joint graph, and restore it from the copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from graph_trainer.core.graph.content import copy_facts
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.torch_private import LazyGraphModule, set_arguments


def copy_graph(joint: JointGraph) -> JointGraph:
    """Copy a joint graph: the copy has nodes of the same names in the same order.

    Changing one graph does not change the other. They share fake tensors, the attributes that
    get_attr nodes read, and the subgraphs of higher-order ops: passes replace those and do not
    write into them. Linear in nodes.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        copies[node] = node_like(graph, node, copies.__getitem__, node.name)
        copies[node].meta = {
            key: value.copy() if type(value) in (dict, list, set) else value
            for key, value in node.meta.items()
        }
    copy_facts(joint.graph, graph, copies)
    # a lazy module generates its code when it is called: most copies never are
    class_name = type(joint.graph_module).__name__
    graph_module = LazyGraphModule(joint.graph_module, graph, class_name=class_name)
    graph_module.meta = dict(joint.graph_module.meta)
    return dataclasses.replace(
        joint,
        graph_module=graph_module,
        history=list(joint.history),
        decisions=dict(joint.decisions),
        remarks=list(joint.remarks),
    )


def node_like(
    graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], fx.Node], name: str
) -> fx.Node:
    """Add a copy of a node to a graph, without `meta`, and return it.

    `read` maps each input of the node to that of the copy. Takes half of the time of
    `Graph.node_copy`, which looks for sizes in arguments.
    """
    copy = graph.create_node(node.op, node.target, name=name, type_expr=node.type)
    kwargs = fx.map_arg(node.kwargs, read) if node.kwargs else {}
    set_arguments(copy, fx.map_arg(node.args, read), kwargs)
    return copy


def restore_graph(joint: JointGraph, copy: JointGraph) -> None:
    """Restore `joint` to its state at the time of the copy.

    The copy's graph module becomes that of `joint`, with the attributes that its graph reads;
    attributes that were replaced or added after the copy remain on the old module only.
    """
    joint.graph_module = copy.graph_module
    joint.signature = copy.signature
    joint.history[:] = copy.history
    joint.decisions = dict(copy.decisions)
    joint.remarks = list(copy.remarks)
