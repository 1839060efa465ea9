"""Replace consecutive collectives, each over one axis of a mesh, by one over all of these axes."""

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
    """Gather a parameter once if it is gathered over one axis of a mesh and then over another.

    The second gather reads the input of the first, over the ranks of both. The order of the ranks
    is the order in which the two gathers would have put the parts: row by row if the inner axis
    came first, column by column if the outer one did. If no group has exactly these ranks in this
    order, all ranks of the world make it together: run the pass on all of them.

    Not changed are gathers if another node reads the first one or a view of it; gathers with other
    nodes between them than views that change nothing; groups that are not axes of a mesh with all
    ranks of the world; and parameters of which some ranks store less than others, because some
    ranks pad their gathers and all ranks must make the same change.

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
    """Reduce a gradient once if it is reduced over one axis of a mesh and then over another.

    As `fuse_chained_all_gathers`, with the same conditions, for the reductions of gradients. Not in
    the default list: the sum has another order, so values may differ by rounding. Linear in nodes
    and in ranks of the world.
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
    """Let the last collective of each chain read the input of the first, over the ranks of all.

    A chain of three extends one of two. All must have `role`, for the same parameter: the graph
    shows how other ranks store parameters, and so that they have the same chains.

    Args:
        join: returns the partition over which one collective equals two, from the partitions of
            these, in their order.
    """
    previous_of = _consecutive(joint, result, role)
    if not previous_of:
        return
    even = _evenly_sharded(joint)
    writes = writes_of(joint.graph)
    join = cache(join)
    meshes = meshes_of(joint, dist.get_world_size()) if dist.is_initialized() else []
    partition_on = cache(partial(partition_of, meshes))

    def partition_around(node: fx.Node) -> Partition | None:
        """Return the partition with the group of a collective, if it lies along axes of a mesh."""
        name = str(argument(node, "group_name"))
        try:
            ranks = group_ranks(name)
            backend = group_backend(name)
        except (RuntimeError, ValueError) as error:
            raise PassError(
                f"node '{node.name}' ({node.target}) communicates over the group '{name}', and "
                "this process has no process group of that name; run passes where the graph "
                "was captured, before its process groups are destroyed"
            ) from error
        return partition_on(ranks) if meshes and backend == dist.get_backend() else None

    # by the last collective of a chain, the first one and the partition over the ranks of all
    chains: dict[fx.Node, tuple[fx.Node, Partition]] = {}
    for node, previous in previous_of.items():
        if parameter_of(node) not in even:
            continue
        first: fx.Node = previous
        inner: Partition | None
        if previous in chains:
            first, inner = chains[previous]
        else:
            inner = partition_around(previous)
        outer = partition_around(node)
        if inner is None or outer is None:
            continue
        if writes.between(first, node, first.all_input_nodes[0]):
            continue  # the input of the first collective has changed by then
        partition = join(inner, outer)
        if partition is not None:
            chains.pop(previous, None)
            chains[node] = (first, partition)
    groups = groups_within([partition for _, partition in chains.values()], agreement)
    left_out: set[fx.Node] = set()
    for node, (first, partition) in chains.items():
        schema = schema_of(node)
        assert schema is not None
        arguments: dict[str, Any] = {e.name: argument(node, e.name) for e in schema.arguments}
        left_out.add(arguments["input"])
        arguments["input"] = argument(first, "input")
        arguments["group_size"] = len(partition[0])
        arguments["group_name"] = groups[partition]
        node.args = tuple(arguments.values())
        node.kwargs = {}
    erase_unused(joint.graph, among=left_out)


def _consecutive(joint: JointGraph, result: Result, role: Role) -> dict[fx.Node, fx.Node]:
    """Map each collective to the one before it, where both have the role for one parameter."""
    previous_of = {}
    for node in joint.graph.nodes:
        kind = plain_kind(node)
        if kind is None or kind.result is not result or role_of(node) is not role:
            continue
        previous = _previous(node)
        if (
            previous is not None
            and role_of(previous) is role
            and parameter_of(previous) == parameter_of(node)
            and phase_of(previous) is phase_of(node)
        ):
            previous_of[node] = previous
    return previous_of


def _previous(node: fx.Node) -> fx.Node | None:
    """Return the collective of the same kind and reduction that a collective reads unchanged.

    Views and the wait are between them. None if another node reads one of these or the first
    collective, or if a view changes shape, strides or offset.
    """
    sent = source = argument(node, "input")
    while isinstance(source, fx.Node) and not is_wait(source):
        if aliased_input(source) is None or written_arguments(source) or len(source.users) != 1:
            return None
        source = aliased_input(source)
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return None
    (previous,) = source.all_input_nodes
    if (
        previous.target is not node.target
        or len(previous.users) != 1
        or argument(previous, "reduce_op") != argument(node, "reduce_op")
        or not shows_the_same(sent, source)
    ):
        return None
    return previous


def _evenly_sharded(joint: JointGraph) -> set[str]:
    """Return the parameters of which all ranks store the same number of elements.

    Then no rank pads what it sends or cuts what it receives, and all ranks have the same chains.
    Only DTensors show this.
    """
    even = set()
    for spec, tensor in dtensors_of(joint):
        parts = [1] * tensor.ndim
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if isinstance(placement, (Shard, StridedShard)):
                parts[placement.dim] *= size
        is_even = all(n % count == 0 for n, count in zip(tensor.shape, parts, strict=True))
        if spec.kind is InputKind.PARAMETER and is_even:
            even.add(spec.name)
    return even
