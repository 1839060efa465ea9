"""Assign collectives to buckets: the strategies of `bucket_collectives`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
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
    """The properties that all collectives of one bucket share."""

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
    """The number of nodes before it that exist on all ranks."""
    bytes: int
    """The larger of input and output."""
    route: Route


def members_of(joint: JointGraph) -> list[Member]:
    """Find every tagged collective, in graph order. Linear in nodes.

    Raises:
        PassError: a tagged collective names no process group.
    """
    members: list[Member] = []
    num_earlier: dict[tuple[str, Route], int] = defaultdict(int)
    span = 0
    for position, node in enumerate(joint.graph.nodes):
        # nodes that pad shards and cut gradients exist on some ranks only
        if role_of(node) is None:
            span += 1
        tag = bucket_tag(node)
        if tag is None:
            continue
        group = argument(node, "group_name")
        reduction = argument(node, "reduce_op")
        if not group:
            raise PassError(
                f"node '{node.name}' ({node.target}) is tagged for a bucket and names no process "
                "group, so that it cannot be merged: use the functional collectives, or remove its "
                "tag"
            )
        sent = collective_inputs(node)
        one_dtype = reduction is not None or sent[0].dtype.is_complex
        (parameter,) = parameters_of(node)
        route = Route(
            tag=tag,
            op=str(node.target),
            group=str(group),
            reduction="" if reduction is None else str(reduction),
            dtype=str(sent[0].dtype) if one_dtype else "",
            hops=0,
        )
        hops = num_earlier[parameter, route]
        num_earlier[parameter, route] += 1
        sent_bytes = sum(map(nbytes_of, sent))
        received_bytes = sum(map(nbytes_of, tensors_of(node)))
        members.append(
            Member(
                node=node,
                parameter=parameter,
                position=position,
                span=span,
                bytes=max(sent_bytes, received_bytes),
                route=route._replace(hops=hops),
            )
        )
    return members


def by_size(
    members: Iterable[Member], cap_mib: float | Mapping[str, float], max_span: int
) -> list[list[Member]]:
    """Fill buckets in graph order up to a size. Linear in members.

    Args:
        cap_mib: the most MiB of a bucket (more only if one member alone is larger), or the same by
            process group; collectives of other groups are not merged.
        max_span: the most nodes from the first member of a bucket to its last, without nodes of
            FSDP, whose number differs between ranks.
    """
    closed: list[list[Member]] = []
    open_buckets: dict[Route, list[Member]] = defaultdict(list)
    bytes_of_bucket: dict[Route, int] = defaultdict(int)
    for member in members:
        route = member.route
        cap = cap_mib.get(route.group, 0) if isinstance(cap_mib, Mapping) else cap_mib
        bucket = open_buckets[route]
        is_full = bytes_of_bucket[route] + member.bytes > cap * MIB
        if bucket and (is_full or member.span - bucket[0].span > max_span):
            closed.append(bucket)
            bucket = open_buckets[route] = []
            bytes_of_bucket[route] = 0
        bucket.append(member)
        bytes_of_bucket[route] += member.bytes
    return [*closed, *open_buckets.values()]


def by_transformer_block(joint: JointGraph, members: Iterable[Member]) -> list[list[Member]]:
    """Make one bucket for each route and part of the model, as `transformer_parts` names them.

    n log n.
    """
    part_of = transformer_parts(joint)
    buckets: dict[tuple[Route, str], list[Member]] = defaultdict(list)
    for member in members:
        buckets[member.route, part_of[member.parameter]].append(member)
    return list(buckets.values())


def transformer_parts(joint: JointGraph, *, separate_experts: bool = True) -> dict[str, str]:
    """Return by parameter the part of the model that it belongs to. Linear in nodes.

    A repeated block is a part, and its experts are another with `separate_experts`. Of the other
    parameters, those that forward reads after the last block (final norm and output head) are the
    part "head", and the rest belong to their modules.
    """
    parameter_in = computed_from_one_parameter(joint, is_form_in_forward)
    # the position of the first node of forward that computes with each parameter
    first_read: dict[str, int] = {}
    experts: set[str] = set()
    for position, node in enumerate(joint.graph.nodes):
        if node.op != "call_function" or node in parameter_in or is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in parameter_in:
                first_read.setdefault(parameter_in[source], position)
                # each expert multiplies its tokens: the op shows experts under any name
                if "grouped_mm" in str(node.target):
                    experts.add(parameter_in[source])
    names = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
    in_blocks = [first_read.get(name, -1) for name in names if block_of(name) is not None]
    blocks_end = max(in_blocks, default=-1)
    part_of = {}
    for name in names:
        block = block_of(name)
        if block is not None:
            is_separate = separate_experts and name in experts
            part_of[name] = f"{block}.experts" if is_separate else block
        elif 0 <= blocks_end < first_read.get(name, -1):
            part_of[name] = "head"
        else:
            part_of[name] = name.rpartition(".")[0]
    return part_of


def without_cycles(buckets: Sequence[list[Member]]) -> list[list[Member]]:
    """Drop the buckets of one member, and those that would wait for themselves.

    Only collectives of one parameter depend on each other. If the collectives of several buckets
    depend on each other in a cycle (one gradient is reduced over a first group and then over a
    second, another over the second first), drops all buckets of the cycle, and those that depend on
    it. n log n in members.
    """
    members: list[tuple[int, int, Member]] = []
    for index, bucket in enumerate(buckets):
        members += [(member.position, index, member) for member in bucket]
    members.sort(key=lambda entry: entry[0])
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(buckets)), ()))
    latest: dict[tuple[str, bool], int] = {}  # the last bucket for a parameter or its gradient
    for _, index, member in members:
        chain = (member.parameter, bool(member.route.reduction))
        if chain in latest:
            sorter.add(index, latest[chain])
        latest[chain] = index
    with contextlib.suppress(CycleError):  # buckets that depend on no cycle still become ready
        sorter.prepare()
    without_cycle: list[int] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        without_cycle += ready
        sorter.done(*ready)
    return [buckets[index] for index in sorted(without_cycle) if len(buckets[index]) > 1]
