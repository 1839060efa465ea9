"""The graphs of a stage: forward, backward, and the gathers that all microbatches share."""

# The idea: what forward keeps for backward and computes from parameters alone, all-gathers above
# all, is the same for every microbatch. Its nodes become a graph of their own, whose results are
# inputs of forward and backward.

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import Role, role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_getitem
from graph_trainer.core.graph.signature import InputKind, OutputKind, with_parts
from graph_trainer.core.partition.cut import as_input, as_saved, copy_part, cut


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
    forward = halves.forward
    inputs = list(with_parts(forward.signature.inputs, placeholders))
    parts = [(spec, node) for spec, nodes in inputs for node in nodes]
    taken = [as_input(node, spec.kind, spec.name) for spec, node in parts if node in read]
    stays = {n for n in forward.graph.nodes if n.op == "call_function" and n not in unshard_nodes}
    gathered = [as_input(node, InputKind.SAVED, node.name) for node in results]
    outputs = [
        (spec, nodes)
        for spec, nodes in with_parts(forward.signature.outputs, forward.output_values())
        if spec.kind is not OutputKind.SAVED or nodes[0] not in unshard_nodes
    ]
    place_of = {node: place for place, node in enumerate(results)}
    return StageGraphs(
        unshard=copy_part(forward, unshard_nodes, taken, [*map(as_saved, results)]),
        unshard_reads=tuple(unshard_reads),
        forward=copy_part(forward, stays, [*inputs, *gathered], outputs),
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
