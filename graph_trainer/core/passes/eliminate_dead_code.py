"""Remove unused nodes."""

from __future__ import annotations

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import erase_unused
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext


@graph_pass(stage=Stage.CLEANUP, summary="Remove nodes whose result nothing reads")
def eliminate_dead_code(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Remove every node without a reader that has no effect.

    Unused collectives and their waits are removed too: every rank has the same graph, so every rank
    removes the same ones. Nodes with an effect stay: in-place ops (a buffer may change), random ops
    (they advance the random stream for later ones), sends and receives, assertions, and waits for a
    collective that others read.

    Relies on nothing. Guarantees that the remaining nodes are read or have an effect. Linear in
    nodes: one walk from the end.
    """
    erase_unused(joint.graph)
