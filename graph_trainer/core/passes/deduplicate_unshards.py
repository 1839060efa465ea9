"""Gather every parameter once."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.graph.annotations import Role, role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext


@graph_pass(stage=Stage.STRUCTURE, summary="Let all readings of a parameter share one unshard")
def deduplicate_unshards(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Merge unshard nodes that do the same to the same input.

    A parameter that is read twice (a tied head, a checkpointed block that runs forward again in
    backward) is gathered twice by a plain trace. Afterwards all readers share the first gather,
    those of backward too, so that `tag_fsdp_unshards` alone decides what is gathered again,
    whatever activation checkpointing did.

    Relies on FSDP roles. Guarantees equal values: equal ops on equal inputs. A shard or a gathered
    tensor that is written in place is never shared. Must not run after `rematerialize`, whose
    copies are intended. Linear in nodes.
    """
    first: dict[object, fx.Node] = {}
    writes = LastWrites(joint.graph)
    for node in list(joint.graph.nodes):
        if role_of(node) is not Role.UNSHARD:
            continue
        if any(writes.is_written(n) for n in (node, *node.all_input_nodes)):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            joint.graph.erase_node(node)


def _hashable(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    return (type(value), value)  # 1, 1.0 and True are equal and mean different things
