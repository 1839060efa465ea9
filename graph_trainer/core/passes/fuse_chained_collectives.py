"""Replace collectives in a row, each over one axis of a mesh, by one over all of these axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor, Shard

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.mesh_groups import Partition, joined, partitions_of
from graph_trainer.core.capture.subclasses import wrap
from graph_trainer.core.graph.annotations import Role, parameter_of, phase_of, role_of, value_of
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    is_wait,
    plain_kind,
    schema_of,
    written_arguments,
)
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.normalize_views import shows_the_same
from graph_trainer.core.sharding.process_groups import groups_within
from graph_trainer.core.torch_private import StridedShard, group_backend, group_ranks
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
    between them but views that show their input unchanged; groups that are no axes of a mesh
    with all ranks of the world; and parameters of which not every rank stores equally much, since
    their gathers are padded on some ranks and all ranks must do the same.

    Relies on FSDP roles, on DTensor parameters, whose meshes give the other ranks' groups, and
    on all ranks running the same program. Guarantees equal values.

    Raises:
        PassError: a chain names a group that this process does not have.

    Linear in nodes and in ranks of the world.
    """
    _fuse_chains(joint, Result.GATHERED, Role.UNSHARD, joined)


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
    rounding.

    Linear in nodes and in ranks of the world.
    """
    # rank (i, j) keeps part j of part i: the order of a gather over the second, then the first
    _fuse_chains(
        joint, Result.SCATTERED, Role.REDUCE_GRAD, lambda first, second: joined(second, first)
    )


@dataclass(frozen=True, slots=True)
class _Chain:
    """Collectives of which the last is to do what all of them do."""

    first: fx.Node
    partition: Partition
    """The world's ranks in groups, each over the ranks of all collectives of the chain."""
    removed: tuple[fx.Node, ...] = ()
    """All nodes of the chain but the last, each before those that it reads."""


def _fuse_chains(joint: JointGraph, result: Result, role: Role, join: Join) -> None:
    """Let the last of each chain of one op read what the first reads, over the ranks of all.

    Args:
        result: of the kind, whose op takes `input`, `group_size` and `group_name`.
        role: what both do, for the same parameter: how other ranks store parameters is known, and
            so it is known that they have the same chains.
        join: the partition over which one collective does what two do, given theirs in order.

    Raises:
        PassError: a collective of a chain names a group that this process does not have.
    """
    pairs = {
        node: before
        for node in joint.graph.nodes
        if (kind := plain_kind(node)) is not None
        and kind.result is result
        and (before := _before(node))
        and _same_for_fsdp(before[-1], node, role)
    }
    chains = _chains(joint, pairs, join) if pairs else {}
    groups = groups_within([chain.partition for chain in chains.values()])
    for node, chain in chains.items():
        _set_arguments(
            node,
            input=argument(chain.first, "input"),
            group_size=len(chain.partition[0]),
            group_name=groups[chain.partition],
        )
        for each in chain.removed:
            joint.graph.erase_node(each)


def _set_arguments(node: fx.Node, **changed: Any) -> None:
    schema = schema_of(node)
    assert schema is not None
    names = [entry.name for entry in schema.arguments]
    node.args = tuple(changed.get(name, argument(node, name)) for name in names)
    node.kwargs = {}


def _before(node: fx.Node) -> list[fx.Node]:
    """Find the collective of the same kind and reduction that a collective reads unchanged.

    Returns:
        what lies between (views and the wait) and then the collective, each before what it reads;
        nothing where another node reads any of these, or where a view changes what it shows.
    """
    sent = read = argument(node, "input")
    between: list[fx.Node] = []
    while isinstance(read, fx.Node) and not is_wait(read):
        if aliased_input(read) is None or written_arguments(read) or len(read.users) != 1:
            return []
        between.append(read)
        read = aliased_input(read)
    if not isinstance(read, fx.Node) or len(read.users) != 1:
        return []
    (first,) = read.all_input_nodes
    if (
        first.target is not node.target
        or len(first.users) != 1
        or argument(first, "reduce_op") != argument(node, "reduce_op")
        or not shows_the_same(sent, read)  # type: ignore[arg-type]
    ):
        return []
    return [*between, read, first]


def _same_for_fsdp(first: fx.Node, second: fx.Node, role: Role) -> bool:
    return (
        role_of(first) is role_of(second) is role
        and parameter_of(first) == parameter_of(second)
        and phase_of(first) is phase_of(second)
    )


def _chains(
    joint: JointGraph, pairs: dict[fx.Node, list[fx.Node]], join: Join
) -> dict[fx.Node, _Chain]:
    """Return the chains by their last collective; a chain of three extends one of two."""
    even = _evenly_sharded(joint)
    partition_of = _group_reader(joint)
    writes = LastWrites(joint.graph)
    join = cache(join)
    chains: dict[fx.Node, _Chain] = {}
    for node, before in pairs.items():
        if parameter_of(node) not in even:
            continue
        previous = before[-1]
        first, second = partition_of(previous), partition_of(node)
        so_far = chains.get(previous)
        if so_far is None and first is not None:
            so_far = _Chain(previous, first)
        if so_far is None or second is None:
            continue
        if writes.between(so_far.first, node, so_far.first.all_input_nodes[0]):
            continue  # what the first one sends has changed by then
        partition = join(so_far.partition, second)
        if partition is not None:
            chains.pop(previous, None)
            chains[node] = _Chain(so_far.first, partition, (*before, *so_far.removed))
    return chains


def _evenly_sharded(joint: JointGraph) -> set[str]:
    """Return the parameters of which every rank stores equally much.

    Then no rank pads what it sends or cuts what it receives, and all have the same chains. Nothing
    is known of a parameter that is no DTensor.
    """
    even = set()
    for spec, nodes in joint.inputs_of(InputKind.PARAMETER):
        if spec.layout.subclass is not DTensor:
            continue
        tensor = wrap([value_of(n) for n in nodes], spec.layout)
        assert isinstance(tensor, DTensor)
        parts = [1] * tensor.ndim
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if isinstance(placement, (Shard, StridedShard)):
                parts[placement.dim] *= size
        if all(size % count == 0 for size, count in zip(tensor.shape, parts, strict=True)):
            even.add(spec.name)
    return even


def _group_reader(joint: JointGraph) -> Callable[[fx.Node], Partition | None]:
    """Make a function from a collective to the partition that its group belongs to.

    It returns None where no mesh gives the partition, and raises PassError for a group that this
    process does not have.
    """
    known: dict[str, Partition | None] = {}
    partitions = partitions_of(joint, dist.get_world_size()) if dist.is_initialized() else None

    def read(node: fx.Node) -> Partition | None:
        name = str(argument(node, "group_name"))
        if name not in known:
            try:
                ranks, backend = group_ranks(name), group_backend(name)
            except (RuntimeError, ValueError) as error:
                raise PassError(
                    f"node '{node.name}' ({node.target}) communicates over the group '{name}', and "
                    "this process has no process group of that name; run passes where the graph "
                    "was captured, before its process groups are destroyed"
                ) from error
            same = partitions is not None and backend == dist.get_backend()
            known[name] = partitions.through(ranks) if same and partitions else None
        return known[name]

    return read
