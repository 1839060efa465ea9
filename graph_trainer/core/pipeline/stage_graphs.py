"""The graphs of a stage: forward, backward, and the gathers that all microbatches share."""

# The idea: what forward keeps for backward and computes from parameters alone, all-gathers above
# all, is the same for every microbatch. Its nodes become a graph of their own, whose results are
# inputs of forward and backward.

from __future__ import annotations

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
from graph_trainer.core.partition.cut import cut, part_of


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The graphs that a stage runs; see `stage_graphs`."""

    unshard: JointGraph
    """Returns what forward and backward read of the parameters that are kept."""
    unshard_reads: tuple[int, ...]
    """The indices of the joint graph's inputs that `unshard` takes; empty where it gathers
    nothing."""
    forward: JointGraph
    """Takes the inputs of the joint graph but the gradients of outputs, then the results of
    `unshard`; returns the loss or the outputs, then the values that it saves."""
    backward: JointGraph
    """Takes `backward_reads`, the saved values and the gradients of the loss or the outputs."""
    backward_reads: tuple[int, ...]
    """The indices of the joint graph's inputs that `backward` takes."""
    saved_by: tuple[int | None, ...]
    """For each saved value its index in the results of `unshard`; None for those that `forward`
    returns, in order."""


def stage_graphs(joint: JointGraph) -> StageGraphs:
    """Cut a joint graph in forward and backward, and take out of forward the gathers of parameters
    whose results are kept for backward.

    Gathers that backward repeats stay where they are. n log n in nodes.

    Raises:
        PassError: the graph cannot be cut.
    """
    halves = cut(joint, reads_numbers=True)
    saved = halves.saved()
    unshard_nodes = _unshard_nodes(halves.forward, saved)
    placeholders = halves.forward.placeholders()
    read = {source for node in unshard_nodes for source in node.all_input_nodes}
    unshard_reads = [place for place, node in enumerate(placeholders) if node in read]
    # read by what stays, and by backward
    results = [n for n in unshard_nodes if any(user not in unshard_nodes for user in n.users)]
    inputs = [placeholders[place] for place in unshard_reads]
    place_of = {node: place for place, node in enumerate(results)}
    return StageGraphs(
        unshard=_unshard_graph(halves.forward, unshard_nodes, inputs, results),
        unshard_reads=tuple(unshard_reads),
        forward=_rest_of_forward(halves.forward, unshard_nodes, results),
        backward=halves.backward,
        backward_reads=halves.inputs_read,
        saved_by=tuple(place_of.get(node) for node in saved),
    )


def _unshard_nodes(forward: JointGraph, saved: list[fx.Node]) -> dict[fx.Node, None]:
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
    forward: JointGraph,
    unshard_nodes: dict[fx.Node, None],
    inputs: list[fx.Node],
    results: list[fx.Node],
) -> JointGraph:
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    for node in unshard_nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copy_annotations(node, copies[node])
    graph.output(tuple(copies[node] for node in results))
    of_inputs = with_parts(forward.signature.inputs, forward.placeholders())
    spec_of = {node: spec for spec, nodes in of_inputs for node in nodes}
    specs = [
        Input(spec_of[node].kind, spec_of[node].name, unwrap(value_of(node))[1]) for node in inputs
    ]
    outputs = [Output(OutputKind.SAVED, node.name, unwrap(value_of(node))[1]) for node in results]
    return part_of(forward, graph, Signature(tuple(specs), tuple(outputs), backward=False))


def _rest_of_forward(
    forward: JointGraph, unshard_nodes: dict[fx.Node, None], results: list[fx.Node]
) -> JointGraph:
    """Return forward with the results of the unshard graph as further inputs."""
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in forward.placeholders()}
    inputs = list(forward.signature.inputs)
    for node in results:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = value_of(node)
        set_input_name(copies[node], node.name)
        inputs.append(Input(InputKind.SAVED, node.name, unwrap(value_of(node))[1]))
    for node in forward.graph.nodes:
        if node.op in ("call_function", "get_attr") and node not in unshard_nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                copy_annotations(node, copies[node])
    outputs, returned = [], []
    for spec, nodes in with_parts(forward.signature.outputs, forward.output_values()):
        if spec.kind is not OutputKind.SAVED or nodes[0] not in unshard_nodes:
            outputs.append(spec)
            returned += [copies[node] for node in nodes]
    graph.output(tuple(returned))
    return part_of(forward, graph, Signature(tuple(inputs), tuple(outputs), backward=False))
