"""Turn in-place writes to temporaries into ops that make a new tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import Phase, phase_of, tensor_of, tensors_of
from graph_trainer.core.graph.data_sizes import sized
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument_nodes, aten, is_random, schema_of, storage_roots
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext


@graph_pass(stage=Stage.CLEANUP, summary="Replace in-place writes to temporaries")
def functionalize_writes(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Replace an in-place op by the op of the same name that makes a new tensor, where no other
    node can observe the write: `index_put_` everywhere, and elementwise ops in forward, which
    backward could not run again (RMSNorm adds its epsilon in place).

    Applies if an op of this graph allocated the written tensor and no other node has read it
    before. All later readers read the new tensor. Writes into inputs and views stay, because other
    nodes read their storage, and so do ops with tensors of another dtype, whose result could get
    that dtype.

    Guarantees equal values; afterwards the tensor may be recomputed and moved like any other.
    Linear in nodes and their readers.
    """
    graph = joint.graph
    roots = storage_roots(graph)
    replaced: set[fx.Node] = set()
    for node in list(graph.nodes):
        op = _without_write(node)
        if op is None:
            continue
        target = node.args[0]
        assert isinstance(target, fx.Node)
        # after an earlier write to the same temporary, the target is a tensor that this pass made
        is_new = roots[target] == (target, 0) or target in replaced
        # the new tensor is a copy, whose strides must be those of the target
        value = sized(tensor_of(target))
        same_strides = torch.empty_like(value).stride() == value.stride()
        if target.op != "call_function" or not is_new or not same_strides:
            continue
        if any(user < node for user in target.users):
            continue
        if target in argument_nodes(node.args[1:]):
            continue  # it indexes or fills itself with itself
        node.target = op
        replaced.add(node)
        target.replace_all_uses_with(node)
        node.replace_input_with(node, target)  # this node still reads the target


def _without_write(node: fx.Node) -> Any:
    """Return the op without a write for an in-place op; None for a node that is not replaced."""
    if node.target is aten.index_put_.default:
        return aten.index_put.default
    schema = schema_of(node)
    if schema is None or phase_of(node) is not Phase.FORWARD:
        return None
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_"):
        return None
    tags = node.target.tags  # type: ignore[union-attr]
    types = {tensor.dtype for n in node.all_input_nodes for tensor in tensors_of(n)}
    if torch.Tag.pointwise not in tags or is_random(node) or len(types) != 1:
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    return getattr(packet, schema.overload_name or "default", None)
