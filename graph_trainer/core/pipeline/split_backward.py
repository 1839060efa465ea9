"""Split the backward of a stage: the gradient of what it received, then those of its weights."""

# The idea: the stage before waits for the gradient of its outputs alone, so what this gradient
# needs runs first, and the rest whenever the rank has nothing better to do. The nodes of the first
# part are found by walking back from the gradient; all others are the second part.

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.lifetimes import bytes_kept
from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    is_getitem,
    storage_roots,
    written_arguments,
)
from graph_trainer.core.graph.signature import InputKind, OutputKind, with_parts
from graph_trainer.core.partition.cut import as_input, as_saved, copy_part


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The two graphs of a backward; see `split_backward`."""

    of_input: JointGraph
    """Takes the inputs of backward; returns the gradients of what the stage received, then the
    values that `of_weights` reads."""
    of_weights: JointGraph
    """Takes the inputs of backward of `reads`, then the values that `of_input` kept; returns the
    gradients of the parameters."""
    reads: tuple[int, ...]
    """The indices of backward's inputs that `of_weights` takes."""

    def kept_bytes(self) -> int:
        """Return the bytes that live between the two parts, beside what forward keeps.

        That is what the first keeps for the second, where a storage counts once, and the gradients
        with which backward begins, where the second reads them.
        """
        outputs = with_parts(self.of_input.signature.outputs, self.of_input.output_values())
        kept = [n for spec, nodes in outputs if spec.kind is OutputKind.SAVED for n in nodes]
        received = given_bytes(self.of_weights, InputKind.OUTPUT_GRADIENT)
        return bytes_kept(self.of_input.graph, kept) + received


def split_backward(backward: JointGraph) -> SplitBackward:
    """Split a backward graph in two, without changing it.

    No node is in both parts, and both keep the order of the graph. The first stage of a pipeline
    has no gradient to pass on, and nothing in its first part. The second part may read tensors of
    the first, and no numbers that data decide, such as the tokens that an expert receives. Linear
    in nodes.

    Args:
        backward: of `cut` of a graph of `capture_stage`.
    """
    outputs = list(with_parts(backward.signature.outputs, backward.output_values()))
    of_input = [(s, nodes) for s, nodes in outputs if s.kind is OutputKind.INPUT_GRADIENT]
    of_weights = [(s, nodes) for s, nodes in outputs if s.kind is OutputKind.GRADIENT]
    first = _needed(backward, [node for _, nodes in of_input for node in nodes])
    second = {n: None for n in backward.graph.nodes if n.op == "call_function" and n not in first}
    sources = {source for node in second for source in node.all_input_nodes}
    sources.update(node for _, nodes in of_weights for node in nodes)
    kept = [node for node in first if node in sources]
    inputs = list(with_parts(backward.signature.inputs, backward.placeholders()))
    places = [place for place, node in enumerate(backward.placeholders()) if node in sources]
    parts = [(spec, node) for spec, nodes in inputs for node in nodes]
    taken = [as_input(node, spec.kind, spec.name) for spec, node in parts if node in sources]
    taken += [as_input(node, InputKind.SAVED, node.name) for node in kept]
    passed_on = [*of_input, *map(as_saved, kept)]
    return SplitBackward(
        of_input=copy_part(backward, first, inputs, passed_on, backward=True),
        of_weights=copy_part(backward, second, taken, of_weights, backward=True),
        reads=tuple(places),
    )


def _needed(backward: JointGraph, gradients: list[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that gradients need, in order.

    What is written in place stays in order by staying together: if a needed node touches a storage
    that backward writes, all nodes that touch it are needed too.
    """
    roots = storage_roots(backward.graph)
    touching: dict[Storage, list[fx.Node]] = defaultdict(list)
    written: set[Storage] = set()
    ops = [node for node in backward.graph.nodes if node.op == "call_function"]
    for node in ops:
        written.update(roots[target] for target in written_arguments(node))
        for value in {node, *node.all_input_nodes}:
            touching[roots[value]].append(node)
    needed: set[fx.Node] = set()
    open_nodes = list(gradients)
    while open_nodes:
        node = open_nodes.pop()
        if node in needed or node.op != "call_function":
            continue
        needed.add(node)
        open_nodes += node.all_input_nodes
        for storage in {roots[value] for value in (node, *node.all_input_nodes)} & written:
            open_nodes += touching.pop(storage, [])
    # a graph returns tensors, so that all parts of a tuple are taken with it
    needed.update(n for n in ops if is_getitem(n) and n.all_input_nodes[0] in needed)
    return {node: None for node in ops if node in needed}
