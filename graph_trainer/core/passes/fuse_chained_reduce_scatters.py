"""Reduce over all axes of a mesh at once."""

from __future__ import annotations

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.partitions import joined
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.chained_collectives import fuse_chains
from graph_trainer.core.passes.context import PassContext


@graph_pass(
    stage=Stage.STRUCTURE,
    summary="Reduce a gradient at once that is split over several axes",
    default=False,
    changes_sums=True,
)
def fuse_chained_reduce_scatters(
    joint: JointGraph, options: NoOptions, context: PassContext
) -> None:
    """Reduce once what is reduced over one axis of a mesh and then over another.

    The mirror of `fuse_chained_all_gathers`, with the same conditions, on the reductions of
    gradients. Not in the default list: the sum is the same but for its order, so values may
    differ by rounding.

    Linear in nodes and in ranks of the world.
    """
    # rank (i, j) keeps part j of part i: the order of a gather over the second, then the first
    fuse_chains(
        joint, Result.SCATTERED, Role.REDUCE_GRAD, lambda first, second: joined(second, first)
    )
