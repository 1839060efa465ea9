"""Mark the collectives that may be merged with others."""

from __future__ import annotations

from enum import StrEnum

from torch import fx

from graph_trainer.core.analysis.parameter_flow import (
    computed_from_one_parameter,
    leading_to_one_gradient,
)
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    parameters_of,
    role_of,
    set_bucket_tag,
    tensors_of,
)
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import has_effect, is_wait, plain_kind
from graph_trainer.core.graph.writes import Writes, writes_of
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.bucketing.rewrite import prepared_from
from graph_trainer.core.passes.context import PassContext


class BucketTag(StrEnum):
    """The tags. Only collectives of the same tag may be merged."""

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

    A gather is tagged if it depends on one parameter and nothing else, a reduction if it leads to
    the gradient of one parameter and nothing else. So collectives of other parameters do not depend
    on it, and no bucket waits for a part of itself. Not tagged are collectives whose tensors are
    written in place, collectives with several waits, and those that two parameters share already.

    Relies on FSDP roles and phases. Changes metadata only. Linear in nodes.
    """
    writes = writes_of(joint.graph)
    source = computed_from_one_parameter(joint, lambda node: _moves(node, writes))
    goal = leading_to_one_gradient(joint, lambda node: _moves(node, writes))
    for node in joint.graph.nodes:
        kind = plain_kind(node)
        if kind is None or not kind.mergeable:
            continue
        if role_of(node) is Role.REDUCE_GRAD and kind.reduces:
            scatters = kind.result is Result.SCATTERED
            tag = BucketTag.REDUCE_SCATTER if scatters else BucketTag.ALL_REDUCE
            parameter = goal.get(node)
        elif role_of(node) is Role.UNSHARD and kind.result is Result.GATHERED:
            tag = BucketTag.UNSHARD_BACKWARD if is_backward(node) else BucketTag.UNSHARD_FORWARD
            parameter = source.get(node)
        else:
            continue
        if parameter in parameters_of(node) and _is_plain(node, writes):
            set_bucket_tag(node, tag)


def _is_plain(node: fx.Node, writes: Writes) -> bool:
    """Return whether a collective has one wait, contiguous results, as those of a bucket, and no
    writes in place into its result or its inputs."""
    users = list(node.users)
    return (
        len(users) == 1
        and is_wait(users[0])
        and all(t.is_contiguous() for t in tensors_of(node))
        and not any(writes.is_written(n) for n in (node, *prepared_from(node)))
    )


def _moves(node: fx.Node, writes: Writes) -> bool:
    """Return whether a node may move and read another storage.

    It then has no effect, its tensors are never written, and it uses no storage offset.
    """
    uses_offset = "as_strided" in str(node.target)
    return not (has_effect(node) or uses_offset or writes.touched_by(node))
