"""Gather the parameters that a stage keeps for backward once for several microbatches."""

# The idea: what forward keeps for backward and computes from parameters alone, all-gathers above
# all, is the same for every microbatch. Its nodes become a graph of their own, whose results are
# inputs of forward and backward.

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import (
    Role,
    copy_annotations,
    role_of,
    set_input_name,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_getitem
from graph_trainer.core.graph.signature import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Signature,
    with_parts,
)
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.partition.cut import Halves


@dataclass(frozen=True, slots=True)
class Unshards:
    """What is taken out of the forward of a stage; see `take_unshards`."""

    unshard: JointGraph
    """Takes the inputs of forward that it reads; returns what forward and backward read of it."""
    inputs_read: tuple[int, ...]
    """The indices of the placeholders of forward that `unshard` takes."""
    forward: JointGraph
    """Takes the inputs of forward, then the results of `unshard`; returns what forward did, without
    those saved values that `unshard` makes."""
    saved_by: tuple[int | None, ...]
    """For each saved value of the cut its index in the results of `unshard`; None for those that
    `forward` returns, in order."""


def take_unshards(halves: Halves) -> Unshards:
    """Take the gathers of parameters out of forward whose results are kept for backward.

    Gathers that backward repeats stay where they are. Linear in nodes.
    """
    graph, saved = halves.forward.graph, halves.saved()
    taken = _taken(halves.forward, saved)
    placeholders = halves.forward.placeholders()
    read = {node for taken_node in taken for node in taken_node.all_input_nodes}
    inputs_read = [place for place, node in enumerate(placeholders) if node in read]
    # read by what stays, and by backward
    results = [node for node in taken if any(user not in taken for user in node.users)]
    unshard = _unshard_graph(
        halves.forward, taken, [placeholders[place] for place in inputs_read], results
    )

    forward = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        copies[node] = forward.node_copy(node)
    inputs = list(halves.forward.signature.inputs)
    for node in results:
        copies[node] = forward.placeholder(node.name)
        copies[node].meta["val"] = value_of(node)
        set_input_name(copies[node], node.name)
        inputs.append(Input(InputKind.SAVED, node.name, unwrap(value_of(node))[1]))
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr") and node not in taken:
            copies[node] = forward.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                copy_annotations(node, copies[node])
    place_of = {node: place for place, node in enumerate(results)}
    specs, returned = [], []
    for spec, nodes in with_parts(halves.forward.signature.outputs, halves.forward.output_values()):
        if spec.kind is not OutputKind.SAVED or nodes[0] not in taken:
            specs.append(spec)
            returned += [copies[node] for node in nodes]
    forward.output(tuple(returned))
    return Unshards(
        unshard=unshard,
        inputs_read=tuple(inputs_read),
        forward=_graph_of(
            halves.forward, forward, Signature(tuple(inputs), tuple(specs), backward=False)
        ),
        saved_by=tuple(place_of.get(node) for node in saved),
    )


def _taken(forward: JointGraph, saved: list[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that compute saved values from parameters alone, in graph order."""
    parameters = forward.inputs_of(InputKind.PARAMETER)
    from_parameters = {node for _, nodes in parameters for node in nodes}
    for node in forward.graph.nodes:
        if role_of(node) is Role.UNSHARD and from_parameters.issuperset(node.all_input_nodes):
            from_parameters.add(node)
    needed = {node for node in saved if node in from_parameters}
    for node in reversed(forward.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    # a graph returns tensors, so that all parts of a tuple are taken with it
    needed |= {n for n in from_parameters if is_getitem(n) and n.all_input_nodes[0] in needed}
    ops = (node for node in forward.graph.nodes if node.op != "placeholder")
    return {node: None for node in ops if node in needed}


def _unshard_graph(
    forward: JointGraph, taken: dict[fx.Node, None], inputs: list[fx.Node], results: list[fx.Node]
) -> JointGraph:
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    for node in taken:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copy_annotations(node, copies[node])
    graph.output(tuple(copies[node] for node in results))
    of_inputs = with_parts(forward.signature.inputs, forward.placeholders())
    spec_of = {node: spec for spec, nodes in of_inputs for node in nodes}
    specs = [
        Input(spec_of[node].kind, spec_of[node].name, unwrap(value_of(node))[1]) for node in inputs
    ]
    outputs = [Output(OutputKind.SAVED, node.name, unwrap(value_of(node))[1]) for node in results]
    return _graph_of(forward, graph, Signature(tuple(specs), tuple(outputs), backward=False))


def _graph_of(forward: JointGraph, graph: fx.Graph, signature: Signature) -> JointGraph:
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    part = dataclasses.replace(
        forward,
        graph_module=fx.GraphModule(forward.graph_module, graph),
        signature=signature,
        history=list(forward.history),
        decisions={},
        remarks=[],
    )
    part.validate()
    return part
