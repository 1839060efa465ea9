"""Replace collectives in a row, each over one axis of a mesh, by one over all of these axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import Shard

from graph_trainer.core.analysis.mesh_groups import (
    Partition,
    dtensors_of,
    joined,
    meshes_of,
    partition_of,
)
from graph_trainer.core.graph.annotations import Role, parameter_of, phase_of, role_of
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    erase_unused,
    is_wait,
    plain_kind,
    schema_of,
    written_arguments,
)
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.normalize_views import shows_the_same
from graph_trainer.core.sharding.process_groups import groups_within
from graph_trainer.core.torch_private import StridedShard
from graph_trainer.core.torch_private_groups import group_backend, group_ranks
from graph_trainer.errors import PassError

Join = Callable[[Partition, Partition], Partition | None]


@graph_pass(
    stage=Stage.STRUCTURE, summary="Gather a parameter at once that is split over several axes"
)
def fuse_chained_all_gathers(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Gather once what is gathered over one axis of a mesh and then over another.

    The second gather reads what the first reads, over the ranks of both. Their order is the one
    in which the two gathers would have put the parts: row by row where the inner axis came first,
    column by column where the outer one did. Where no group has exactly these ranks in this
    order it is made, by all ranks of the world at once: run the pass on all of them.

    Not changed: a first gather or a view of it that another node reads; gathers with anything
    between them but views that show their input unchanged; groups that are not axes of a mesh
    with all ranks of the world; and parameters of which not every rank stores equally much, since
    their gathers are padded on some ranks and all ranks must do the same.

    Relies on FSDP roles, on DTensor parameters, whose meshes give the other ranks' groups, and
    on all ranks running the same program. Guarantees equal values. Linear in nodes and in ranks of
    the world.

    Raises:
        PassError: a chain names a group that this process does not have.
    """
    _fuse_chains(joint, context.agreement, Result.GATHERED, Role.UNSHARD, joined)


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
    gradients. Not in the default list: the sum has another order, so values may differ by
    rounding. Linear in nodes and in ranks of the world.
    """
    # rank (i, j) keeps part j of part i: the order of a gather over the second, then the first
    _fuse_chains(
        joint,
        context.agreement,
        Result.SCATTERED,
        Role.REDUCE_GRAD,
        lambda first, second: joined(second, first),
    )


def _fuse_chains(
    joint: JointGraph, agreement: Agreement, result: Result, role: Role, join: Join
) -> None:
    """Let the last of each chain of one op read what the first reads, over the ranks of all. A
    chain of three extends one of two.

    Both must have `role`, for the same parameter: how other ranks store parameters is known, and so
    it is known that they have the same chains. `join` returns the partition over which one
    collective does what two do, given theirs in order.
    """
    pairs = {
        node: before
        for node in joint.graph.nodes
        if (kind := plain_kind(node)) is not None
        and kind.result is result
        and (before := _before(node)) is not None
        and role_of(before) is role_of(node) is role
        and parameter_of(before) == parameter_of(node)
        and phase_of(before) is phase_of(node)
    }
    if not pairs:
        return
    even = _evenly_sharded(joint)
    writes = writes_of(joint.graph)
    join = cache(join)
    meshes = meshes_of(joint, dist.get_world_size()) if dist.is_initialized() else []
    partition_on = cache(partial(partition_of, meshes))

    def partition_around(node: fx.Node) -> Partition | None:
        # the partition that the group of a collective belongs to, where a mesh gives it
        name = str(argument(node, "group_name"))
        try:
            ranks, backend = group_ranks(name), group_backend(name)
        except (RuntimeError, ValueError) as error:
            raise PassError(
                f"node '{node.name}' ({node.target}) communicates over the group '{name}', and "
                "this process has no process group of that name; run passes where the graph "
                "was captured, before its process groups are destroyed"
            ) from error
        return partition_on(ranks) if meshes and backend == dist.get_backend() else None

    # by the collective that is to do what several do, the first of these, and the world's ranks in
    # groups, each over the ranks of all of these
    chains: dict[fx.Node, tuple[fx.Node, Partition]] = {}
    for node, previous in pairs.items():
        if parameter_of(node) not in even:
            continue
        first, inner = chains.get(previous) or (previous, partition_around(previous))
        outer = partition_around(node)
        if inner is None or outer is None:
            continue
        if writes.between(first, node, first.all_input_nodes[0]):
            continue  # what the first one sends has changed by then
        partition = join(inner, outer)
        if partition is not None:
            chains.pop(previous, None)
            chains[node] = (first, partition)
    groups = groups_within([partition for _, partition in chains.values()], agreement)
    for node, (first, partition) in chains.items():
        schema = schema_of(node)
        assert schema is not None
        given: dict[str, Any] = {e.name: argument(node, e.name) for e in schema.arguments}
        given["input"] = argument(first, "input")
        given |= {"group_size": len(partition[0]), "group_name": groups[partition]}
        node.args, node.kwargs = tuple(given.values()), {}
    if chains:
        erase_unused(joint.graph)


def _before(node: fx.Node) -> fx.Node | None:
    """Return the collective of the same kind and reduction that a collective reads unchanged.

    Between them are views and the wait. None where another node reads one of these or the first
    collective, or where a view changes what it shows.
    """
    sent = read = argument(node, "input")
    while isinstance(read, fx.Node) and not is_wait(read):
        if aliased_input(read) is None or written_arguments(read) or len(read.users) != 1:
            return None
        read = aliased_input(read)
    if not isinstance(read, fx.Node) or len(read.users) != 1:
        return None
    (first,) = read.all_input_nodes
    if (
        first.target is not node.target
        or len(first.users) != 1
        or argument(first, "reduce_op") != argument(node, "reduce_op")
        or not shows_the_same(sent, read)
    ):
        return None
    return first


def _evenly_sharded(joint: JointGraph) -> set[str]:
    """Return the parameters of which every rank stores equally much.

    Then no rank pads what it sends or cuts what it receives, and all have the same chains. Nothing
    is known of a parameter that is not a DTensor.
    """
    even = set()
    for spec, tensor in dtensors_of(joint):
        parts = [1] * tensor.ndim
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if isinstance(placement, (Shard, StridedShard)):
                parts[placement.dim] *= size
        even_here = all(n % count == 0 for n, count in zip(tensor.shape, parts, strict=True))
        if spec.kind is InputKind.PARAMETER and even_here:
            even.add(spec.name)
    return even
