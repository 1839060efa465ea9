"""Assign collectives to buckets: the strategies of `bucket_collectives`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from torch import fx

from graph_trainer.core.analysis.collectives import collective_inputs
from graph_trainer.core.analysis.parameter_flow import computed_from_one_parameter
from graph_trainer.core.analysis.unshard_chains import is_form_in_forward
from graph_trainer.core.graph.annotations import (
    block_of,
    bucket_tag,
    is_backward,
    parameters_of,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError


class Route(NamedTuple):
    """What collectives of one bucket have in common."""

    tag: str
    op: str
    group: str
    reduction: str
    """Empty for a gather."""
    dtype: str
    """Set for reductions, and for complex numbers, which cannot be viewed as bytes; empty for
    other gathers, whose buckets may mix dtypes."""
    hops: int
    """How many collectives of the same route come before it for the parameter."""


@dataclass(frozen=True, slots=True)
class Member:
    """A collective that may share a bucket."""

    node: fx.Node
    parameter: str
    position: int
    span: int
    """How many nodes before it exist on all ranks."""
    bytes: int
    """The larger of input and output."""
    route: Route


def members_of(joint: JointGraph) -> list[Member]:
    """Find every tagged collective, in graph order; a PassError where one names no process group.
    Linear in nodes."""
    members: list[Member] = []
    hops: dict[tuple[str, Route], int] = {}
    shared = 0
    for position, node in enumerate(joint.graph.nodes):
        # nodes that pad shards and cut gradients exist on some ranks only
        shared += role_of(node) is None
        tag = bucket_tag(node)
        if tag is None:
            continue
        group, reduction = argument(node, "group_name"), argument(node, "reduce_op")
        if not group:
            raise PassError(
                f"node '{node.name}' ({node.target}) is tagged for a bucket and names no process "
                "group, so it is unknown what it may be merged with: use the functional "
                "collectives, or remove its tag"
            )
        sent = collective_inputs(node)
        one_dtype = reduction is not None or sent[0].dtype.is_complex
        (parameter,) = parameters_of(node)
        first = Route(
            tag,
            str(node.target),
            str(group),
            "" if reduction is None else str(reduction),
            str(sent[0].dtype) if one_dtype else "",
            0,
        )
        taken = hops[(parameter, first)] = hops.get((parameter, first), -1) + 1
        size = max(sum(map(nbytes_of, each)) for each in (sent, tensors_of(node)))
        route = first._replace(hops=taken)
        members.append(Member(node, parameter, position, shared, size, route))
    return members


def by_size(
    members: Iterable[Member], cap_mib: float | Mapping[str, float], max_span: int
) -> list[list[Member]]:
    """Fill buckets in graph order up to a size. Linear in members.

    Args:
        cap_mib: MiB of a bucket, at most (more only where one member alone is larger), or the same
            by process group; collectives of a group that is not given are not merged.
        max_span: nodes from the first member of a bucket to its last, at most; nodes of FSDP do
            not count, since their number differs between ranks.
    """
    closed: list[list[Member]] = []
    open_: dict[Route, tuple[list[Member], int]] = {}
    for member in members:
        cap = cap_mib.get(member.route.group, 0) if isinstance(cap_mib, Mapping) else cap_mib
        bucket, filled = open_.get(member.route, ([], 0))
        full = filled + member.bytes > cap * MIB
        if bucket and (full or member.span - bucket[0].span > max_span):
            closed.append(bucket)
            bucket, filled = [], 0
        bucket.append(member)
        open_[member.route] = (bucket, filled + member.bytes)
    return closed + [bucket for bucket, _ in open_.values()]


def by_transformer_block(joint: JointGraph, members: Iterable[Member]) -> list[list[Member]]:
    """Make one bucket a repeated block and route, another for its experts; one a module for the
    rest, but one for all that forward reads after the last block (final norm and output head).
    n log n."""
    # the position of the first node of forward that computes with each parameter
    shows = computed_from_one_parameter(joint, is_form_in_forward)
    read: dict[str, int] = {}
    experts: set[str] = set()
    for position, node in enumerate(joint.graph.nodes):
        if node.op != "call_function" or node in shows or is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in shows:
                read.setdefault(shows[source], position)
                # one product of each expert with its tokens, whatever a model names them
                if "grouped_mm" in str(node.target):
                    experts.add(shows[source])
    names = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
    end = max((read.get(n, -1) for n in names if block_of(n) is not None), default=-1)
    places = {}
    for name in names:
        block = block_of(name)
        if block is not None:
            places[name] = f"{block}.experts" if name in experts else block
        elif 0 <= end < read.get(name, -1):
            places[name] = "head"
        else:
            places[name] = name.rpartition(".")[0]
    buckets: dict[tuple[Route, str], list[Member]] = {}
    for member in members:
        buckets.setdefault((member.route, places[member.parameter]), []).append(member)
    return list(buckets.values())


def without_cycles(buckets: Sequence[list[Member]]) -> list[list[Member]]:
    """Drop the buckets of one member, and those that would wait for themselves.

    Only collectives of one parameter depend on each other. Where those of several buckets depend on
    each other in a cycle (one gradient is reduced over this group and then over that one, another
    the other way round), all buckets of the cycle are dropped, and those that come after it.
    n log n in members.
    """
    ordered = sorted(
        ((member, index) for index, bucket in enumerate(buckets) for member in bucket),
        key=lambda entry: entry[0].position,
    )
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(buckets)), ()))
    latest: dict[tuple[str, bool], int] = {}
    for member, index in ordered:
        chain = (member.parameter, bool(member.route.reduction))
        if chain in latest:
            sorter.add(index, latest[chain])
        latest[chain] = index
    with contextlib.suppress(CycleError):  # what does not depend on a cycle still becomes ready
        sorter.prepare()
    free: list[int] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        free += ready
        sorter.done(*ready)
    return [buckets[index] for index in sorted(free) if len(buckets[index]) > 1]
