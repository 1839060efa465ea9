"""Two collectives in a row that one over more ranks replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor, Shard

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.partitions import Partition, partitions_of
from graph_trainer.core.capture.subclasses import wrap
from graph_trainer.core.graph.annotations import (
    Role,
    parameter_of,
    phase_of,
    role_of,
    value_of,
)
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.ops import (
    LastWrites,
    aliased_input,
    argument,
    is_wait,
    plain_kind,
    schema_of,
    written_arguments,
)
from graph_trainer.core.passes.normalize_views import shows_the_same
from graph_trainer.core.sharding.process_groups import groups_within
from graph_trainer.core.torch_private import StridedShard, group_backend, group_ranks
from graph_trainer.errors import PassError

Join = Callable[[Partition, Partition], Partition | None]


@dataclass(frozen=True, slots=True)
class _Before:
    """The collective whose result another one reads as it is."""

    node: fx.Node
    between: tuple[fx.Node, ...]
    """Wait and views between the two, each before those that it reads."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """Collectives of which the last is to do what all of them do."""

    first: fx.Node
    partition: Partition
    """Of the world, into groups that all of them together are over."""
    gone: tuple[fx.Node, ...] = ()
    """The others with what lies between, each before those that it reads."""


def fuse_chains(joint: JointGraph, result: Result, role: Role, join: Join) -> None:
    """Let the last of each chain of one op read what the first reads, over a group of them all.

    Arguments:
        result: of the kind, whose op takes `input`, `group_size` and `group_name`.
        role: that both need, with the same parameter: of parameters is known how other ranks
            hold them, and so that other ranks have the same chains.
        join: the partition over which one collective does what two do, given theirs in order.

    Raises:
        PassError: a collective of a chain names a group that nobody knows.

    Linear in nodes, and in ranks of the world for each pair of groups.
    """
    pairs = {
        node: before
        for node in joint.graph.nodes
        if (kind := plain_kind(node)) is not None
        and kind.result is result
        and (before := _before(node)) is not None
        and _same_for_fsdp(before.node, node, role)
    }
    chains = _chains(joint, pairs, join) if pairs else {}
    groups = groups_within([chain.partition for chain in chains.values()])
    for node, chain in chains.items():
        _let(
            node,
            input=argument(chain.first, "input"),
            group_size=len(chain.partition[0]),
            group_name=groups[chain.partition],
        )
        for each in chain.gone:
            joint.graph.erase_node(each)


def _let(node: fx.Node, **changed: Any) -> None:
    """Change some arguments of a node."""
    schema = schema_of(node)
    assert schema is not None
    names = [entry.name for entry in schema.arguments]
    node.args = tuple(changed.get(name, argument(node, name)) for name in names)
    node.kwargs = {}


def _before(node: fx.Node) -> _Before | None:
    """The same op with the same reduction, if nothing but its wait and views that show what it
    made unchanged lie between, and nothing else reads any of them."""
    sent = read = argument(node, "input")
    between: list[fx.Node] = []
    while isinstance(read, fx.Node) and not is_wait(read):
        if aliased_input(read) is None or written_arguments(read) or len(read.users) != 1:
            return None
        between.append(read)
        read = aliased_input(read)
    if not isinstance(read, fx.Node) or len(read.users) != 1:
        return None
    (first,) = read.all_input_nodes
    if (
        first.target is not node.target
        or len(first.users) != 1
        or argument(first, "reduce_op") != argument(node, "reduce_op")
        or not shows_the_same(sent, read)  # type: ignore[arg-type]
    ):
        return None
    return _Before(first, (*between, read))


def _same_for_fsdp(first: fx.Node, second: fx.Node, role: Role) -> bool:
    return (
        role_of(first) is role_of(second) is role
        and parameter_of(first) == parameter_of(second)
        and phase_of(first) is phase_of(second)
    )


def _chains(joint: JointGraph, pairs: dict[fx.Node, _Before], join: Join) -> dict[fx.Node, _Chain]:
    """The chains by their last collective; a chain of three grows from one of two."""
    even = _evenly_sharded(joint)
    pairs = {node: before for node, before in pairs.items() if parameter_of(node) in even}
    if not pairs:
        return {}
    partition_of = _group_reader(joint)
    writes = LastWrites(joint.graph)
    joined = cache(join)
    chains: dict[fx.Node, _Chain] = {}
    for node, before in pairs.items():
        first, own = partition_of(before.node), partition_of(node)
        so_far = chains.get(before.node)
        if so_far is None and first is not None:
            so_far = _Chain(before.node, first)
        if so_far is None or own is None:
            continue
        if writes.between(so_far.first, node, so_far.first.all_input_nodes[0]):
            continue  # what the first one sends is something else by now
        partition = joined(so_far.partition, own)
        if partition is not None:
            chains.pop(before.node, None)
            gone = (*before.between, before.node, *so_far.gone)
            chains[node] = _Chain(so_far.first, partition, gone)
    return chains


def _evenly_sharded(joint: JointGraph) -> set[str]:
    """The parameters of which every rank holds equally much.

    Then no rank pads what it sends or cuts what it gets, and all have the same chains. Nothing
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
    """A function from a collective to the partition that its group belongs to, None where no
    mesh tells it. It raises PassError for a group that nobody knows."""
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
