"""Mark the collectives that may travel with others."""

from __future__ import annotations

from enum import StrEnum

from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    parameters_of,
    role_of,
    set_bucket_tag,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import has_effect, is_collective, is_wait, plain_kind
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.bucketing.rewrite import prepared_from
from graph_trainer.core.passes.context import PassContext


class Travel(StrEnum):
    """The tags: collectives of one tag may be merged, of two never."""

    UNSHARD_FORWARD = "unshard_forward"
    UNSHARD_BACKWARD = "unshard_backward"
    REDUCE_SCATTER = "reduce_scatter_grad"
    ALL_REDUCE = "all_reduce_grad"


@graph_pass(
    stage=Stage.COMMUNICATION,
    summary="Mark gathers of parameters and reductions of gradients that may be merged",
)
def tag_buckets(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Write a bucket tag on every collective that `bucket_collectives` may merge.

    A gather is tagged when it and all that comes before it read one parameter and nothing else;
    a reduction when all that comes behind it leads to the gradient of one parameter and nowhere
    else. So nothing of another parameter depends on it, and a bucket waits for no part of itself.
    What is written in place, or waited for more than once, is left alone, and so is what two
    parameters share already.

    Relies on FSDP roles and phases. Changes metadata only. Linear in nodes.
    """
    writes = LastWrites(joint.graph)
    source = _sources(joint, writes)
    goal = _goals(joint, writes)
    for node in joint.graph.nodes:
        if not is_collective(node) or not _is_plain(node, writes):
            continue
        tag = _tag(node)
        known = goal if role_of(node) is Role.REDUCE_GRAD else source
        if tag is not None and known.get(node) in parameters_of(node):
            set_bucket_tag(node, tag)


def _tag(node: fx.Node) -> Travel | None:
    kind = plain_kind(node)
    if kind is None or not kind.mergeable:
        return None
    if role_of(node) is Role.REDUCE_GRAD and kind.reduces:
        return Travel.REDUCE_SCATTER if kind.result is Result.SCATTERED else Travel.ALL_REDUCE
    if role_of(node) is Role.UNSHARD and kind.result is Result.GATHERED:
        return Travel.UNSHARD_BACKWARD if is_backward(node) else Travel.UNSHARD_FORWARD
    return None


def _is_plain(node: fx.Node, writes: LastWrites) -> bool:
    """Waited for once, written by nobody, and dense, as a part of a bucket will be."""
    users = list(node.users)
    return (
        len(users) == 1
        and is_wait(users[0])
        and all(t.is_contiguous() for t in tensors_of(node))
        and not any(writes.is_written(n) for n in (node, *prepared_from(node)))
    )


def _moves(node: fx.Node, writes: LastWrites) -> bool:
    """Whether a node gives the same wherever it stands, and from whatever storage: it has no
    effect, nobody writes what it makes or reads, and it knows no place in a storage."""
    return not (
        has_effect(node)
        or "as_strided" in str(node.target)
        or any(writes.is_written(n) for n in (node, *node.all_input_nodes))
    )


def _sources(joint: JointGraph, writes: LastWrites) -> dict[fx.Node, str]:
    """The parameter of every node that one is read by and nothing else, in whatever form."""
    source = {
        node: spec.name for spec, nodes in joint.inputs_of(InputKind.PARAMETER) for node in nodes
    }
    for node in joint.graph.nodes:
        found = {source.get(n) for n in node.all_input_nodes}
        name = found.pop() if len(found) == 1 else None
        if name is not None and node.op == "call_function" and _moves(node, writes):
            source[node] = name
    return source


def _goals(joint: JointGraph, writes: LastWrites) -> dict[fx.Node, str]:
    """The parameter of every node that leads to its gradient and nowhere else."""
    output = joint.output_node()
    returned: dict[fx.Node, set[str]] = {}
    for parameter, node in joint.gradients():
        returned.setdefault(node, set()).add(parameter)
    others = set(joint.output_values()) - returned.keys()
    goal: dict[fx.Node, str] = {}
    for node in reversed(joint.graph.nodes):
        if node.op != "call_function" or node in others:
            continue
        found: set[str | None] = {goal.get(user) for user in node.users if user is not output}
        found |= returned.get(node, set())
        name = found.pop() if len(found) == 1 else None
        if name is not None and _moves(node, writes):
            goal[node] = name
    return goal
