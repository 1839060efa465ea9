"""Turn in-place index_put_ on temporaries into index_put."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument_nodes, storage_roots
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

aten = torch.ops.aten


@graph_pass(stage=Stage.CLEANUP, summary="Replace in-place index_put_ on temporaries")
def functionalize_index_put(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Replace `index_put_` by `index_put` where no other node can observe the write.

    Applies where an op of this graph allocated the written tensor and no other node has read it
    before. All later readers read the new tensor. Inputs and views are not changed: their storage
    is visible to others.

    Guarantees equal values; afterwards the tensor may be recomputed and moved like any other.
    Linear in nodes and their readers.
    """
    graph = joint.graph
    targets = [n for n in graph.nodes if n.target is aten.index_put_.default]
    if not targets:
        return
    roots = storage_roots(graph)
    for node in targets:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        # after an earlier write to the same temporary, the target is an index_put by now
        owns = roots[target] == (target, 0) or target.target is aten.index_put.default
        # index_put makes a copy, whose strides must be those of the target
        value = tensor_of(target)
        dense = torch.empty_like(value).stride() == value.stride()
        if target.op != "call_function" or not owns or not dense:
            continue
        if any(user < node for user in target.users):
            continue
        if target in argument_nodes(node.args[1:]):
            continue  # it indexes or fills itself with itself
        node.target = aten.index_put.default
        target.replace_all_uses_with(node)
        node.replace_input_with(node, target)  # all readers but this one
