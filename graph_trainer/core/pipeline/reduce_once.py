"""Reduce gradients of a stage once a schedule, and add up those of its microbatches before."""

# The idea: a sum over ranks is linear, so the sum over microbatches may come first. All nodes from
# the reduction of a gradient on become a graph of their own. Backward adds what they read to inputs
# in place, at once, so that a gradient lives no longer than it did.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    infer_value,
    module_of,
    role_of,
    set_input_name,
    tensor_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aten, is_collective
from graph_trainer.core.graph.signature import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Signature,
    with_parts,
)
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.partition.cut import TensorOutput, as_input, copy_part, part_of
from graph_trainer.core.passes.pass_list import PassConfig


@dataclass(frozen=True, slots=True)
class ReduceOnce:
    """The two graphs of a backward; see `reduce_once`."""

    backward: JointGraph
    """Takes the inputs of backward, then the sums of gradients of earlier microbatches, and adds
    its own to these in place; returns the gradients that no ranks reduce."""
    reduce_grad: JointGraph
    """Takes the sums; returns the gradients of the parameters."""

    def zeros(self, device: torch.device) -> list[torch.Tensor]:
        """Make the sums of no microbatch, in the dtypes in which ranks reduce them."""
        fakes = [tensor_of(node) for node in self.reduce_grad.placeholders()]
        sums = [
            torch.empty_strided(f.shape, f.stride(), dtype=f.dtype, device=device) for f in fakes
        ]
        return [tensor.zero_() for tensor in sums]


def reduces_once(passes: PassConfig) -> bool:
    """Return whether the stages of a pipeline reduce their gradients once a step.

    The sums of all gradients are then alive unsharded, as the parameters are that are kept. So the
    policy that keeps none reduces in every microbatch. So does `bitwise`, since the order of the
    sums is another one.
    """
    return not passes.bitwise and passes.reshard_after_forward != "always"


def unreduced_bytes(joint: JointGraph) -> int:
    """Return the bytes of the sums that `reduce_once` keeps over microbatches. Linear in nodes."""
    summed = _summed(_reduced(joint))
    return sum(tensor_of(node).numel() * dtype.itemsize for node, dtype in summed.items())


def reduce_once(backward: JointGraph) -> ReduceOnce | None:
    """Split a backward graph where ranks reduce its gradients, without changing it.

    Relies on all nodes from the first one of role REDUCE_GRAD on being linear in the gradient, as
    those of SimpleFSDP and of buckets are. Linear in nodes.

    Args:
        backward: of `cut`.

    Returns:
        None where no collective reduces gradients.
    """
    reduced = _reduced(backward)
    if not reduced:
        return None
    summed = _summed(reduced)
    outputs = list(with_parts(backward.signature.outputs, backward.output_values()))
    of_ranks = [(spec, nodes) for spec, nodes in outputs if nodes[0] in reduced]
    others = [(spec, nodes) for spec, nodes in outputs if nodes[0] not in reduced]
    taken = [as_input(node, InputKind.ACCUMULATED, node.name) for node in summed]
    reduce_grad = copy_part(backward, reduced, taken, of_ranks, backward=True)
    sums = [torch.empty_like(tensor_of(n), dtype=dtype) for n, dtype in summed.items()]
    _take(reduce_grad, sums)
    rest = {n: None for n in backward.graph.nodes if n.op == "call_function" and n not in reduced}
    inputs = [
        (replace(spec, requires_grad=False), nodes)  # its gradient may be none of the outputs
        for spec, nodes in with_parts(backward.signature.inputs, backward.placeholders())
    ]
    unsummed = copy_part(
        *(backward, rest, inputs, [*others, *map(_unreduced, summed)]), backward=True
    )
    return ReduceOnce(_adding(unsummed, sums), reduce_grad)


def _unreduced(node: fx.Node) -> TensorOutput:
    """Describe a gradient that is not reduced yet as an output."""
    return Output(OutputKind.INPUT_GRADIENT, node.name, unwrap(tensor_of(node))[1]), (node,)


def _take(reduce_grad: JointGraph, sums: list[torch.Tensor]) -> None:
    """Give the inputs the dtypes of sums, and remove the casts to these."""
    for node, value in zip(reduce_grad.placeholders(), sums, strict=True):
        node.meta["val"] = value
    for node in list(reduce_grad.graph.nodes):
        if node.op != "call_function":
            continue
        source = next(iter(node.all_input_nodes), None)
        is_cast = node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
        if is_cast and source is not None and tensor_of(source).dtype == node.kwargs["dtype"]:
            node.replace_all_uses_with(source)
            reduce_grad.graph.erase_node(node)
        else:
            infer_value(node)
    inputs = [
        replace(spec, layout=unwrap(value)[1])
        for spec, value in zip(reduce_grad.signature.inputs, sums, strict=True)
    ]
    reduce_grad.signature = replace(reduce_grad.signature, inputs=tuple(inputs))
    reduce_grad.graph_module.recompile()
    reduce_grad.validate()


def _adding(backward: JointGraph, sums: list[torch.Tensor]) -> JointGraph:
    """Replace the last outputs by inputs to which the graph adds them in place.

    Args:
        backward: is changed.
        sums: the fake tensors of the inputs.
    """
    graph, signature = backward.graph, backward.signature
    values = backward.output_values()
    others, gradients = values[: -len(sums)], values[-len(sums) :]
    before = backward.placeholders()[-1]
    inputs = []
    for gradient, value in zip(gradients, sums, strict=True):
        name = f"sum_{gradient.name}"
        with graph.inserting_after(before):
            before = graph.placeholder(name)
        before.meta["val"] = value
        set_input_name(before, name)
        layout = unwrap(value)[1]
        inputs.append(Input(InputKind.ACCUMULATED, name, layout, mutated=True))
        with graph.inserting_after(gradient if gradient.op == "call_function" else before):
            added = graph.call_function(aten.add_.Tensor, (before, gradient))
        added.meta["val"] = value
        annotate_node(added, annotation(phase=Phase.BACKWARD, module=module_of(gradient)))
    backward.output_node().args = (tuple(others),)
    outputs = signature.outputs[: -len(sums)]
    return part_of(backward, graph, Signature((*signature.inputs, *inputs), outputs, backward=True))


def _reduced(joint: JointGraph) -> dict[fx.Node, torch.dtype]:
    """Return the nodes that reduce gradients, in order, with the dtype that is sent; none where no
    collective does."""
    nodes: dict[fx.Node, None] = {}
    for node in joint.graph.nodes:
        follows = any(source in nodes for source in node.all_input_nodes)
        if node.op == "call_function" and (follows or role_of(node) is Role.REDUCE_GRAD):
            nodes[node] = None
    if not any(is_collective(node) for node in nodes):
        return {}
    # from the end: the dtype of the first collective that a node leads to, else its own
    sent: dict[fx.Node, torch.dtype] = {}
    for node in reversed(nodes):
        user = next((user for user in node.users if user in nodes), None)
        if is_collective(node):
            sent[node] = tensor_of(node.all_input_nodes[0]).dtype
        else:
            sent[node] = tensor_of(node).dtype if user is None else sent[user]
    return {node: sent[node] for node in nodes}


def _summed(reduced: dict[fx.Node, torch.dtype]) -> dict[fx.Node, torch.dtype]:
    """Return what `reduced` reads of other nodes, in order, with the dtype of its sum."""
    summed: dict[fx.Node, torch.dtype] = {}
    for node, dtype in reduced.items():
        summed.update({s: dtype for s in node.all_input_nodes if s not in reduced})
    return summed
