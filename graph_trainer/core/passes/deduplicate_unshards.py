"""Gather every parameter once."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import Role, merge_tags, role_of, tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import runs_once
from graph_trainer.core.graph.writes import Writes
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

aten = torch.ops.aten

_FILLED = {aten.new_zeros.default, aten.zeros.default}
_VIEWS_AND_PADS = {
    aten.constant_pad_nd.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
}


@graph_pass(stage=Stage.STRUCTURE, summary="Let all readings of a parameter share one unshard")
def deduplicate_unshards(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Merge unshard nodes that do the same to the same input.

    A parameter that is read twice (a tied head, a checkpointed block that runs forward again in
    backward) is gathered twice by a plain trace. Afterwards all readers share the first gather,
    those of backward too, so that `tag_fsdp_unshards` alone decides what is gathered again,
    whatever activation checkpointing did.

    Relies on FSDP roles. Guarantees equal values: equal ops on equal inputs, where an input is
    followed to what it was made from, past views and padding. So ranks decide alike: a rank whose
    shard has fewer rows pads it, at each reading and in more than one way. A shard or a gathered
    tensor that is written in place is never shared. Must not run after `rematerialize`, whose
    copies are intended. Linear in nodes.
    """
    first_with: dict[str, fx.Node] = {}
    described: dict[fx.Node, str] = {}
    writes = Writes(joint.graph)

    def is_written(node: fx.Node) -> bool:
        return any(writes.is_written(n) for n in (node, *node.all_input_nodes))

    def made_from(node: fx.Node) -> str:
        """Describe what a node computes: equal for nodes with equal elements before padding."""
        if node in described:
            return described[node]
        # the node whose elements a view shows in the same order, or that padding appends to
        source = node.all_input_nodes[0] if node.target in _VIEWS_AND_PADS else None
        if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
            first, *rest = node.args[0]
            filled = all(isinstance(n, fx.Node) and n.target in _FILLED for n in rest)
            source = first if filled and isinstance(first, fx.Node) else None
        if is_written(node):
            described[node] = node.name
        elif source is not None:
            described[node] = made_from(source)
        else:
            one = len(node.all_input_nodes) == 1 and not runs_once(node)
            described[node] = call(node) if one else node.name
        return described[node]

    def call(node: fx.Node) -> str:
        # as text, in which 1, 1.0 and True differ and a node is its unique name
        args = fx.map_arg((node.args, sorted(node.kwargs.items())), made_from)
        return f"{node.target}{args!r}"

    for node in list(joint.graph.nodes):
        if role_of(node) is not Role.UNSHARD or is_written(node):
            continue
        shapes = [t.shape for n in node.all_input_nodes for t in tensors_of(n)]
        earlier = first_with.setdefault(f"{call(node)} {shapes}", node)
        if earlier is not node:
            merge_tags(earlier, node)
            node.replace_all_uses_with(earlier)
            joint.graph.erase_node(node)
