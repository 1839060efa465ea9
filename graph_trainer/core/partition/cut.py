"""Cut a joint graph into a forward graph and a backward graph, by the phases of its nodes."""

# The idea: phases show which nodes belong to forward, so nothing is searched. The work is in the
# values of forward that backward reads. A value is saved itself if forward does not write it after
# the reader's place in the joint graph. If forward writes it later, backward would read the new
# contents, and a clone made right before that write is saved instead.

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.lifetimes import bytes_kept
from graph_trainer.core.graph.annotations import (
    Phase,
    annotate_node,
    annotation,
    carry_recompute_policy,
    copy_annotations,
    infer_value,
    loss_gradient_of,
    mark_saved_in_cut,
    phase_of,
    recompute_policy,
    set_input_name,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    is_getitem,
    is_wait,
    storage_roots,
    written_arguments,
)
from graph_trainer.core.graph.signature import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Signature,
    with_parts,
)
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.passes.rematerialize import to_be_recomputed
from graph_trainer.errors import PassError


@dataclass(frozen=True, slots=True)
class Halves:
    """The two graphs of a step."""

    forward: JointGraph
    """Takes the joint graph's inputs; returns the loss, then the saved values."""
    backward: JointGraph
    """Takes the inputs of forward that it reads, then the saved values and the gradient of the
    loss; returns the gradients."""
    inputs_read: tuple[int, ...]
    """The indices of the placeholders of `forward` that `backward` takes too."""

    def saved(self) -> list[fx.Node]:
        """List the nodes of `forward` whose results backward takes, in order."""
        outputs = with_parts(self.forward.signature.outputs, self.forward.output_values())
        return [n for spec, nodes in outputs if spec.kind is OutputKind.SAVED for n in nodes]

    def saved_bytes(self) -> int:
        """Return the bytes that are kept from forward to backward, beside inputs of forward.

        A storage counts once, also if several of its views are saved. Linear in nodes.
        """
        return bytes_kept(self.forward.graph, self.saved())


def cut(joint: JointGraph, *, reads_numbers: bool = False) -> Halves:
    """Cut a joint graph in two, without changing it.

    Forward has the nodes of the phases forward and loss, the nodes that these read, and every wait
    for a collective that forward starts: a wait takes no memory, and without it an unfinished
    tensor would be saved. Backward has all other nodes. Both keep the order of the joint graph,
    also where their nodes alternate. The values of forward that backward reads are saved, views as
    views; inputs of forward are passed to backward. A value that forward overwrites after backward
    has read it is cloned before.

    Backward takes the gradient of the loss in place of the tensor of ones that the joint graph
    makes. n log n in nodes.

    Args:
        reads_numbers: whether backward may read from tensors of forward the numbers that data
            decide, such as the tokens that an expert receives; torch.compile cannot.

    Raises:
        PassError: the graph has no backward, or cannot be cut; the message names the node.
    """
    if not joint.signature.backward:
        raise PassError(
            "the graph was captured without backward, so there is nothing to partition: capture "
            "with backward=True"
        )
    forward = _forward_nodes(joint)
    seeds = _seeds(joint)
    for seed in seeds:
        for node in (*seed.users, seed):
            if node in forward:
                raise PassError(
                    f"forward's node '{node.name}' ({node.target}) depends on '{seed.name}', the "
                    "gradient with which backward begins: correct its phase, or that of its readers"
                )
    read, overwritten, numbers = _reads(joint, forward, seeds)
    if numbers and not reads_numbers:
        number = next(iter(numbers))
        raise PassError(
            f"backward reads '{number.name}' of forward, a number that data decide, such as the "
            "tokens that an expert receives, and a separate graph takes tensors only: run forward "
            "and backward as one graph, with gt.compile or TrainStep.partitioned = False"
        )
    inputs = [node for node in joint.placeholders() if node not in seeds]
    places = [place for place, node in enumerate(inputs) if node in read]
    forward_half, saved = _forward_half(joint, forward, inputs, read, overwritten)
    inputs_read = [inputs[place] for place in places]
    backward_half = _backward_half(joint, forward - numbers, seeds, inputs_read, saved)
    return Halves(forward_half, backward_half, tuple(places))


def _forward_nodes(joint: JointGraph) -> set[fx.Node]:
    """Return the ops that belong to forward."""
    forward = {node for _, nodes in _forward_outputs(joint) for node in nodes}
    for node in reversed(joint.graph.nodes):
        if node in forward or phase_of(node) in (Phase.FORWARD, Phase.LOSS):
            forward |= {node, *node.all_input_nodes}
    # from the top, so that a wait for one part of a tuple follows the part
    for node in joint.graph.nodes:
        if is_wait(node) or is_getitem(node):
            source = node.all_input_nodes[0]
            if source in forward and source.op == "call_function":
                forward.add(node)
    return {node for node in forward if node.op == "call_function"}


def _seeds(joint: JointGraph) -> list[fx.Node]:
    """Return the gradients with which backward begins: inputs, or the node that makes ones."""
    inputs = [n for _, nodes in joint.inputs_of(InputKind.OUTPUT_GRADIENT) for n in nodes]
    if inputs:
        return inputs
    ones = [node for node in joint.graph.nodes if loss_gradient_of(node) is not None]
    if len(ones) != 1 and any(joint.gradients()):
        raise PassError(
            f"{len(ones)} nodes are marked as the gradient of the loss, with which backward "
            "begins, and there must be one: a pass that replaces a node must copy its annotations"
        )
    return ones


def _forward_outputs(joint: JointGraph) -> list[tuple[Output, tuple[fx.Node, ...]]]:
    outputs = with_parts(joint.signature.outputs, joint.output_values())
    return [(spec, nodes) for spec, nodes in outputs if not spec.kind.is_gradient]


_Overwritten = dict[tuple[fx.Node, fx.Node], fx.Node]
"""By value and backward reader, the node of forward that overwrites the value after the reader."""


def _reads(
    joint: JointGraph, forward: set[fx.Node], seeds: list[fx.Node]
) -> tuple[set[fx.Node], _Overwritten, set[fx.Node]]:
    """Return the values of forward and inputs that backward reads: those that forward does not
    write after the reader, and those that it overwrites; and the nodes of forward that make numbers
    which backward reads, and so makes again."""
    roots = storage_roots(joint.graph)
    readable = forward.union(joint.placeholders()).difference(seeds)
    outputs = with_parts(joint.signature.outputs, joint.output_values())
    gradients = [node for spec, nodes in outputs if spec.kind.is_gradient for node in nodes]
    forward_writers: dict[Storage, list[fx.Node]] = defaultdict(list)
    first_backward_writer: dict[Storage, fx.Node] = {}
    for node in joint.graph.nodes:
        for target in written_arguments(node):
            if node in forward:
                forward_writers[roots[target]].append(node)
            else:
                first_backward_writer.setdefault(roots[target], node)
    numbers = _numbers_read(joint, forward, gradients)
    read: set[fx.Node] = set()
    overwritten: _Overwritten = {}
    for node in joint.graph.nodes:
        for value in gradients if node.op == "output" else node.all_input_nodes:
            backward_writer = first_backward_writer.get(roots[value])
            if node in forward and node not in numbers:
                if backward_writer is not None and backward_writer < node:
                    raise PassError(
                        f"forward's node '{node.name}' ({node.target}) reads '{value.name}', which "
                        f"backward's '{backward_writer.name}' has written in place before: move "
                        "one of the two, or correct its phase"
                    )
                continue
            if value not in readable or value in numbers or node in seeds:
                continue
            if not isinstance(value_of(value), torch.Tensor):
                raise PassError(
                    f"backward's node '{node.name}' ({node.target}) reads '{value.name}' "
                    f"({value.target}) of forward, whose result is a "
                    f"{type(value_of(value)).__name__} and cannot be saved: let it read the "
                    "tensors inside"
                )
            # the next write of forward after the reader, if any
            writers = forward_writers[roots[value]]
            index = bisect.bisect(writers, node)
            if index == len(writers):
                read.add(value)
            elif backward_writer is None:
                overwritten[value, node] = writers[index]
            else:
                raise PassError(
                    f"forward ('{writers[index].name}') and backward ('{backward_writer.name}') "
                    f"write '{value.name}' in place in turns, which two graphs cannot do: write "
                    "into a copy in one of them"
                )
    return read, overwritten, numbers


def _numbers_read(
    joint: JointGraph, forward: set[fx.Node], gradients: list[fx.Node]
) -> set[fx.Node]:
    """Return the nodes of forward whose results are numbers that backward reads, or that these
    numbers are computed from."""
    numbers: set[fx.Node] = set()
    for node in reversed(joint.graph.nodes):
        if node in forward and node not in numbers:
            continue
        values = gradients if node.op == "output" else node.all_input_nodes
        numbers.update(
            value
            for value in values
            if value in forward and isinstance(value_of(value), torch.SymInt)
        )
    return numbers


@dataclass(slots=True)
class _Saved:
    """The nodes of the forward graph whose results are saved."""

    nodes: list[fx.Node] = field(default_factory=list)
    """All of them, in the order in which forward returns them."""
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """By value of the joint graph."""
    clones: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    """By value of the joint graph and backward reader, for values that forward overwrites."""


def _forward_half(
    joint: JointGraph,
    forward: set[fx.Node],
    inputs: list[fx.Node],
    read: set[fx.Node],
    overwritten: _Overwritten,
) -> tuple[JointGraph, _Saved]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    saved = _Saved()
    # if `rematerialize` has run, no value that is tagged for recomputation is read; if it has not,
    # the tags are carried to a later partition
    has_open_tags = any(to_be_recomputed(node) for node in read)
    # by node that overwrites values, the values with the backward readers of what they were before
    readers: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for (value, reader), writer in overwritten.items():
        readers[writer][value].append(reader)
    for node in joint.graph.nodes:
        for value, readers_of_value in readers[node].items():
            clone = graph.call_function(torch.ops.aten.clone.default, (copies[value],))
            annotate_node(clone, annotation(phase=Phase.FORWARD))
            infer_value(clone)
            saved.nodes.append(clone)
            saved.clones.update({(value, reader): clone for reader in readers_of_value})
        if node in forward or node in inputs or node.op == "get_attr":
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node in forward:
                copy_annotations(node, copy)
                is_kept = recompute_policy(node) is CheckpointPolicy.MUST_SAVE
                if is_kept or (has_open_tags and to_be_recomputed(node)):
                    carry_recompute_policy(node, copy)
            if phase_of(node) is Phase.BACKWARD:
                annotate_node(copy, annotation(phase=Phase.LOSS))
        if node in forward and node in read:
            saved.nodes.append(copies[node])
            saved.values[node] = copies[node]
    for node in saved.nodes:
        mark_saved_in_cut(node.all_input_nodes[0] if is_getitem(node) else node)
    outputs = _forward_outputs(joint)
    returned = [copies[node] for _, nodes in outputs for node in nodes]
    graph.output((*returned, *saved.nodes))
    specs = [spec for spec, _ in outputs]
    for node in saved.nodes:
        _, layout = unwrap(value_of(node))
        specs.append(Output(OutputKind.SAVED, node.name, layout))
    kept_inputs = [s for s in joint.signature.inputs if s.kind is not InputKind.OUTPUT_GRADIENT]
    signature = Signature(tuple(kept_inputs), tuple(specs), backward=False)
    return part_of(joint, graph, signature), saved


def _backward_half(
    joint: JointGraph,
    forward: set[fx.Node],
    seeds: list[fx.Node],
    inputs_read: list[fx.Node],
    saved: _Saved,
) -> JointGraph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs_of_joint = with_parts(joint.signature.inputs, joint.placeholders())
    spec_of = {node: spec for spec, nodes in inputs_of_joint for node in nodes}
    inputs: list[Input] = []

    def add_input(source: fx.Node, kind: InputKind, name: str) -> fx.Node:
        node = graph.placeholder(source.name)
        node.meta["val"] = value_of(source)
        set_input_name(node, name)
        _, layout = unwrap(value_of(source))
        inputs.append(Input(kind, name, layout))
        return node

    for node in inputs_read:
        copies[node] = add_input(node, spec_of[node].kind, spec_of[node].name)
    saved_inputs = {node: add_input(node, InputKind.SAVED, node.name) for node in saved.nodes}
    for value, node in saved.values.items():
        copies[value] = saved_inputs[node]
    clones = {key: saved_inputs[node] for key, node in saved.clones.items()}
    for node in seeds:
        name = spec_of[node].name if node in spec_of else "loss"
        copies[node] = add_input(node, InputKind.OUTPUT_GRADIENT, name)

    def read(reader: fx.Node, value: fx.Node) -> fx.Node:
        return clones.get((value, reader)) or copies[value]

    for node in joint.graph.nodes:
        if node.op in ("placeholder", "output") or node in forward or node in copies:
            continue
        copies[node] = graph.node_copy(node, functools.partial(read, node))
        if node.op == "call_function":
            copy_annotations(node, copies[node])
    output = joint.output_node()
    specs, returned = [], []
    for spec, nodes in with_parts(joint.signature.outputs, joint.output_values()):
        if spec.kind.is_gradient:
            specs.append(spec)
            returned += [read(output, node) for node in nodes]
    graph.output(tuple(returned))
    signature = Signature(tuple(inputs), tuple(specs), joint.signature.parameters_without_grad)
    return part_of(joint, graph, signature)


TensorInput = tuple[Input, tuple[fx.Node, ...]]
TensorOutput = tuple[Output, tuple[fx.Node, ...]]


def as_input(node: fx.Node, kind: InputKind, name: str) -> TensorInput:
    """Describe a plain tensor as an input of a part."""
    return Input(kind, name, unwrap(value_of(node))[1]), (node,)


def as_saved(node: fx.Node) -> TensorOutput:
    """Describe a plain tensor as an output that a part keeps for another one."""
    return Output(OutputKind.SAVED, node.name, unwrap(value_of(node))[1]), (node,)


def copy_part(
    joint: JointGraph,
    nodes: Container[fx.Node],
    inputs: Sequence[TensorInput],
    outputs: Sequence[TensorOutput],
    *,
    backward: bool = False,
) -> JointGraph:
    """Copy some nodes of a joint graph, in its order, into a graph of their own. Linear in nodes.

    Args:
        nodes: ops of the joint graph.
        inputs: what the part takes, inputs or ops of the joint graph, with these nodes.
        outputs: what it returns, with the nodes of the joint graph.
        backward: whether the part has nodes of backward.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for spec, of_tensor in inputs:
        for node in of_tensor:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = value_of(node)
            set_input_name(copies[node], spec.name)
    for node in joint.graph.nodes:
        if node.op == "get_attr" or node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                copy_annotations(node, copies[node])
    graph.output(tuple(copies[node] for _, returned in outputs for node in returned))
    specs = tuple(spec for spec, _ in inputs), tuple(spec for spec, _ in outputs)
    return part_of(joint, graph, Signature(*specs, backward=backward))


def part_of(joint: JointGraph, graph: fx.Graph, signature: Signature) -> JointGraph:
    """Make a joint graph of a part of another one, with a signature of its own.

    Args:
        graph: copies of nodes of the joint graph; its `get_attr` nodes that none reads go.
    """
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    part = dataclasses.replace(
        joint,
        graph_module=fx.GraphModule(joint.graph_module, graph),
        signature=signature,
        history=list(joint.history),
        decisions={},
        remarks=[],
    )
    part.validate()
    return part
