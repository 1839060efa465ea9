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
    """Merge equal unshard nodes on the same input.

    A plain trace gathers a parameter twice if it is read twice (a tied head, a checkpointed block
    that runs forward again in backward). Afterwards all readers share the first gather, also those
    of backward, so that only `tag_fsdp_unshards` decides about repeated gathers, and not activation
    checkpointing.

    Relies on FSDP roles. Guarantees equal values: equal ops on equal inputs. The comparison of
    inputs ignores views and padding, so that all ranks merge the same gathers: only a rank whose
    shard has fewer rows pads it, and may pad it differently at each reading. A shard or a gathered
    tensor that is written in place is never shared. Must not run after `rematerialize`, whose
    copies are intended. Linear in nodes.
    """
    writes = writes_of(joint.graph)
    numbers = ValueNumbers()
    first_unshard: dict[object, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if writes.touched_by(node):
            numbers.number_alone(node)
            continue
        is_unshard = role_of(node) is Role.UNSHARD
        source = _unpadded(node)
        if source is not None:
            numbers.number_alike(node, source)
        elif is_unshard or (len(node.all_input_nodes) == 1 and not runs_once(node)):
            numbers.number(node, numbers.call(node))
        else:
            numbers.number_alone(node)
        if is_unshard:
            # numbers ignore padding: gathers of differently padded inputs differ in their shapes
            shapes = [t.shape for n in node.all_input_nodes for t in tensors_of(n)]
            first = first_unshard.setdefault((numbers.call(node), *shapes), node)
            if first is not node:
                merge_tags(first, node)
                node.replace_all_uses_with(first)
                joint.graph.erase_node(node)


def _unpadded(node: fx.Node) -> fx.Node | None:
    """Return the input that a view shows in the same order, or that padding extends at its end."""
    if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
        source, *padding = node.args[0]
        is_padding = all(isinstance(n, fx.Node) and n.target in _FILLED for n in padding)
        return source if is_padding and isinstance(source, fx.Node) else None
    return node.all_input_nodes[0] if node.target in _VIEWS_AND_PADS else None
