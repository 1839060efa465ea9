"""Gather every parameter once."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.graph.annotations import Role, merge_tags, role_of, tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aten, runs_once
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

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

    Relies on FSDP roles. Guarantees equal values: equal ops on equal inputs. The comparison of
    inputs ignores views and padding, so that all ranks merge the same gathers: only a rank whose
    shard has fewer rows pads it, and its pads may differ from one reading to the next. A shard or
    a gathered tensor that is written in place is never shared. Must not run after `rematerialize`,
    whose copies are intended. Linear in nodes.
    """
    writes = writes_of(joint.graph)
    numbers = ValueNumbers()
    first: dict[object, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if writes.touched_by(node):
            numbers.number_alone(node)
            continue
        unshards = role_of(node) is Role.UNSHARD
        if (source := _unpadded(node)) is not None:
            numbers.number_alike(node, source)
        elif unshards or (len(node.all_input_nodes) == 1 and not runs_once(node)):
            numbers.number(node, numbers.call(node))
        else:
            numbers.number_alone(node)
        if unshards:
            # numbers ignore padding: shapes tell gathers of differently padded inputs apart
            shapes = [t.shape for n in node.all_input_nodes for t in tensors_of(n)]
            earlier = first.setdefault((numbers.call(node), *shapes), node)
            if earlier is not node:
                merge_tags(earlier, node)
                node.replace_all_uses_with(earlier)
                joint.graph.erase_node(node)


def _unpadded(node: fx.Node) -> fx.Node | None:
    """Return the node whose elements a view shows in the same order, or that padding appends to."""
    if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
        first, *rest = node.args[0]
        filled = all(isinstance(n, fx.Node) and n.target in _FILLED for n in rest)
        return first if filled and isinstance(first, fx.Node) else None
    return node.all_input_nodes[0] if node.target in _VIEWS_AND_PADS else None
