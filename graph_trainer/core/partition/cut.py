"""Cut a joint graph into a forward graph and a backward graph, where its phases say."""

# The idea: which nodes are forward's is known from their phases, so nothing is searched. The work
# is in what backward reads of forward. A value is saved as it is where forward leaves it alone
# after the reader's place in the joint graph; where forward writes it later, backward would read
# what the joint graph never showed it, and a clone made right before that write is saved instead.

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass

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
    """Takes the inputs of forward that it reads, as they are, then the saved values and the
    gradient of the loss; returns the gradients."""
    inputs_read: tuple[int, ...]
    """Which placeholders of `forward` `backward` takes."""

    def saved(self) -> list[fx.Node]:
        """List the nodes of `forward` whose results backward takes, in order."""
        outputs = with_parts(self.forward.signature.outputs, self.forward.output_values())
        return [n for spec, nodes in outputs if spec.kind is OutputKind.SAVED for n in nodes]

    def saved_bytes(self) -> int:
        """Return the bytes that are kept from forward to backward, beside inputs of forward.

        A storage counts once, however many of its views are saved. Linear in nodes.
        """
        return bytes_kept(self.forward.graph, self.saved())


def cut(joint: JointGraph) -> Halves:
    """Cut a joint graph in two; it stays as it was.

    To forward belongs what is marked as forward's or loss's, what that reads, and every wait for a
    collective that forward starts: a wait takes no memory, and so no unfinished tensor is saved.
    All else is backward's. Both keep the order of the joint graph, however interleaved. What
    backward reads of forward is saved: inputs of forward as they are, views as views. A value that
    forward overwrites after backward has read it is cloned before.

    Backward takes the gradient of the loss in place of the ones that the joint graph makes.
    n log n in nodes.

    Raises:
        PassError: the graph has no backward, or cannot be cut; the message names the node.
    """
    if not joint.signature.backward:
        raise PassError(
            "the graph was captured without backward, so there is nothing to partition: capture "
            "with backward=True"
        )
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
    forward = {node for node in forward if node.op == "call_function"}
    # the gradients with which backward begins: inputs, or the node that makes ones
    given = [n for _, nodes in joint.inputs_of(InputKind.OUTPUT_GRADIENT) for n in nodes]
    seeds = given or [n for n in joint.graph.nodes if loss_gradient_of(n) is not None]
    if not given and len(seeds) != 1 and any(joint.gradients()):
        raise PassError(
            f"{len(seeds)} nodes are marked as the gradient of the loss, with which backward "
            "begins, and there must be one: a pass that replaces a node copies its annotations"
        )
    for seed in seeds:
        for node in (*seed.users, seed):
            if node in forward:
                raise PassError(
                    f"forward's node '{node.name}' ({node.target}) depends on '{seed.name}', the "
                    "gradient with which backward begins: correct its phase, or that of its readers"
                )
    read, cloned = _reads(joint, forward, seeds)
    inputs = [node for node in joint.placeholders() if node not in seeds]
    places = [place for place, node in enumerate(inputs) if node in read]
    forward_half, saved = _forward_half(joint, forward, inputs, read, cloned)
    taken = [inputs[place] for place in places]
    return Halves(forward_half, _backward_half(joint, forward, seeds, taken, saved), tuple(places))


def _forward_outputs(joint: JointGraph) -> list[tuple[Output, tuple[fx.Node, ...]]]:
    pairs = with_parts(joint.signature.outputs, joint.output_values())
    return [(spec, nodes) for spec, nodes in pairs if spec.kind is not OutputKind.GRADIENT]


_Cloned = dict[tuple[fx.Node, fx.Node], fx.Node]
"""By value and backward reader, the node of forward that overwrites the value after the reader."""


def _reads(
    joint: JointGraph, forward: set[fx.Node], seeds: list[fx.Node]
) -> tuple[set[fx.Node], _Cloned]:
    """Return what backward reads of forward and of its inputs: as forward leaves it, or cloned."""
    roots = storage_roots(joint.graph)
    readable = forward.union(joint.placeholders()).difference(seeds)
    gradients = [node for _, node in joint.gradients()]
    by_forward: dict[Storage, list[fx.Node]] = defaultdict(list)
    by_backward: dict[Storage, fx.Node] = {}
    for node in joint.graph.nodes:
        for target in written_arguments(node):
            if node in forward:
                by_forward[roots[target]].append(node)
            else:
                by_backward.setdefault(roots[target], node)
    saved: set[fx.Node] = set()
    cloned: _Cloned = {}
    for node in joint.graph.nodes:
        for value in gradients if node.op == "output" else node.all_input_nodes:
            writer = by_backward.get(roots[value])
            if node in forward:
                if writer is not None and writer < node:
                    raise PassError(
                        f"forward's node '{node.name}' ({node.target}) reads '{value.name}', which "
                        f"backward's '{writer.name}' has written in place before: move one of the "
                        "two, or correct its phase"
                    )
                continue
            if value not in readable or node in seeds:
                continue
            if isinstance(value_of(value), torch.SymInt):
                raise PassError(
                    f"backward's node '{node.name}' ({node.target}) reads '{value.name}', a number "
                    "that data decide in forward, such as the tokens that an expert receives; a "
                    "graph of its own takes tensors only: run forward and backward as one graph, "
                    "with gt.compile or TrainStep.partitioned = False"
                )
            if not isinstance(value_of(value), torch.Tensor):
                raise PassError(
                    f"backward's node '{node.name}' ({node.target}) reads '{value.name}' "
                    f"({value.target}) of forward, whose result is a "
                    f"{type(value_of(value)).__name__} and cannot be saved: let it read the "
                    "tensors inside"
                )
            # which write of forward comes next after the reader, if any
            writers = by_forward[roots[value]]
            place = bisect.bisect(writers, node)
            if place == len(writers):
                saved.add(value)
            elif writer is None:
                cloned[value, node] = writers[place]
            else:
                raise PassError(
                    f"forward ('{writers[place].name}') and backward ('{writer.name}') write "
                    f"'{value.name}' in place in turns, which two graphs cannot do: write into a "
                    "copy in one of them"
                )
    return saved, cloned


_Saved = dict[tuple[fx.Node, fx.Node | None], fx.Node]
"""By value of the joint graph and backward reader (None for all of them), the forward graph's node
that is saved."""


def _forward_half(
    joint: JointGraph,
    forward: set[fx.Node],
    inputs: list[fx.Node],
    read: set[fx.Node],
    cloned: _Cloned,
) -> tuple[JointGraph, _Saved]:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    saved: _Saved = {}
    # what `rematerialize` has acted on is not saved; tags that it has not are for a later partition
    unacted = any(to_be_recomputed(node) for node in read)
    readers: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for (value, reader), writer in cloned.items():
        readers[writer][value].append(reader)
    for node in joint.graph.nodes:
        for value, several in readers[node].items():
            clone = graph.call_function(torch.ops.aten.clone.default, (made[value],))
            annotate_node(clone, annotation(phase=Phase.FORWARD))
            infer_value(clone)
            saved |= {(value, reader): clone for reader in several}
        if node in forward or node in inputs or node.op == "get_attr":
            made[node] = graph.node_copy(node, made.__getitem__)
            if node in forward:
                copy_annotations(node, made[node])
                kept = recompute_policy(node) is CheckpointPolicy.MUST_SAVE
                if kept or (unacted and to_be_recomputed(node)):
                    carry_recompute_policy(node, made[node])
            if phase_of(node) is Phase.BACKWARD:
                annotate_node(made[node], annotation(phase=Phase.LOSS))
        if node in forward and node in read:
            saved[node, None] = made[node]
    outputs = _forward_outputs(joint)
    returned = list(dict.fromkeys(saved.values()))
    for node in returned:
        mark_saved_in_cut(node.all_input_nodes[0] if is_getitem(node) else node)
    graph.output((*(made[n] for _, nodes in outputs for n in nodes), *returned))
    specs = [spec for spec, _ in outputs]
    specs += [Output(OutputKind.SAVED, n.name, unwrap(value_of(n))[1]) for n in returned]
    takes = (s for s in joint.signature.inputs if s.kind is not InputKind.OUTPUT_GRADIENT)
    signature = Signature(tuple(takes), tuple(specs), backward=False)
    return _half(joint, graph, signature), saved


def _backward_half(
    joint: JointGraph,
    forward: set[fx.Node],
    seeds: list[fx.Node],
    given: list[fx.Node],
    saved: _Saved,
) -> JointGraph:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    pairs = with_parts(joint.signature.inputs, joint.placeholders())
    spec_of = {node: spec for spec, nodes in pairs for node in nodes}
    inputs: list[Input] = []

    def take(source: fx.Node, kind: InputKind, name: str) -> fx.Node:
        node = graph.placeholder(source.name)
        node.meta["val"] = value_of(source)
        set_input_name(node, name)
        inputs.append(Input(kind, name, unwrap(value_of(source))[1]))
        return node

    for node in given:
        made[node] = take(node, spec_of[node].kind, spec_of[node].name)
    taken = {node: take(node, InputKind.SAVED, node.name) for node in dict.fromkeys(saved.values())}
    clones = {key: taken[node] for key, node in saved.items() if key[1] is not None}
    made |= {value: taken[node] for (value, reader), node in saved.items() if reader is None}
    for node in seeds:
        name = spec_of[node].name if node in spec_of else "loss"
        made[node] = take(node, InputKind.OUTPUT_GRADIENT, name)

    def read(reader: fx.Node, value: fx.Node) -> fx.Node:
        return clones.get((value, reader)) or made[value]

    for node in joint.graph.nodes:
        if node.op in ("placeholder", "output") or node in forward or node in made:
            continue
        made[node] = graph.node_copy(node, functools.partial(read, node))
        if node.op == "call_function":
            copy_annotations(node, made[node])
    end = joint.output_node()
    graph.output(tuple(read(end, node) for _, node in joint.gradients()))
    specs = tuple(s for s in joint.signature.outputs if s.kind is OutputKind.GRADIENT)
    signature = Signature(tuple(inputs), specs, joint.signature.parameters_without_grad)
    return _half(joint, graph, signature)


def _half(joint: JointGraph, graph: fx.Graph, signature: Signature) -> JointGraph:
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    half = dataclasses.replace(
        joint,
        graph_module=fx.GraphModule(joint.graph_module, graph),
        signature=signature,
        history=list(joint.history),
        decisions={},
        remarks=[],
    )
    half.validate()
    return half
