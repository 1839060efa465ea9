"""Gather over all axes of a mesh at once."""

from __future__ import annotations

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.partitions import joined
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.chained_collectives import fuse_chains
from graph_trainer.core.passes.context import PassContext


@graph_pass(
    stage=Stage.STRUCTURE, summary="Gather a parameter at once that is split over several axes"
)
def fuse_chained_all_gathers(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Gather once what is gathered over one axis of a mesh and then over another.

    The second gather reads what the first reads, over the ranks of both. Their order is that
    in which the two would have put the parts: row by row where the inner axis came first,
    column by column where the outer one did. Where no group has exactly these ranks in this
    order it is made, by all ranks of the world at once: run the pass on all of them.

    Left alone: what another node reads in between; anything in between but views that show
    their input unchanged; groups that are no axes of a mesh with all ranks of the world; and
    parameters of which not every rank holds equally much, since padding stands between their
    gathers on some ranks and all must do the same.

    Relies on FSDP roles, on DTensor parameters, whose meshes tell the other ranks' groups, and
    on all ranks running the same program. Guarantees equal values.

    Raises:
        PassError: a chain names a group that nobody knows.

    Linear in nodes and in ranks of the world.
    """
    fuse_chains(joint, Result.GATHERED, Role.UNSHARD, joined)
