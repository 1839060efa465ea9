"""Remove nodes that nothing reads."""

from __future__ import annotations

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import erase_unused
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext


@graph_pass(stage=Stage.CLEANUP, summary="Remove nodes whose result nothing reads")
def eliminate_dead_code(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Remove every node without a reader that has no effect.

    Unread collectives and their waits go too: every rank has the same graph, so every rank
    drops the same ones. What has an effect stays: in-place ops (a buffer may change), random
    ops (they move the random stream that later ones read), sends and receives, assertions,
    and waits for a collective that others read.

    Relies on nothing. Guarantees that what is left is read or has an effect. One walk from
    the end: linear in nodes.
    """
    erase_unused(joint.graph)
