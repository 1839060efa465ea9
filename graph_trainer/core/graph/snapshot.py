"""A joint graph put aside, and put back."""

from __future__ import annotations

from typing import Any

from torch import fx

from graph_trainer.core.graph.joint_graph import JointGraph


def copy_graph(joint: JointGraph) -> JointGraph:
    """A copy with nodes of the same names and order that no change of either graph shows in.

    Fake tensors, the attributes that get_attr nodes read, and subgraphs of higher-order ops are
    shared: passes replace those and do not write into them. Linear in nodes.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(joint.graph, copies)
    output = graph.output(returned)
    output.meta = joint.output_node().meta
    for node in (*copies.values(), output):
        # node_copy shares the values, the dictionary of annotations among them
        node.meta = {key: _unshared(value) for key, value in node.meta.items()}
    kind = type(joint.graph_module).__name__
    graph_module = fx.GraphModule(joint.graph_module, graph, class_name=kind)
    graph_module.meta = dict(joint.graph_module.meta)
    return JointGraph(
        graph_module,
        joint.signature,
        joint.batch,
        joint.model_type,
        joint.training,
        history=list(joint.history),
        remarks=list(joint.remarks),
        decisions=dict(joint.decisions),
    )


def put_back(joint: JointGraph, copy: JointGraph) -> None:
    """Make `joint` what it was when `copy` was made of it.

    The copy's graph module becomes that of `joint`, with the attributes that its graph reads:
    those that were replaced, deleted or added meanwhile stay behind with the old module.
    """
    joint.graph_module = copy.graph_module
    joint.signature = copy.signature
    joint.history[:] = copy.history
    joint.decisions = dict(copy.decisions)
    joint.remarks = list(copy.remarks)


def _unshared(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list, set) else value
