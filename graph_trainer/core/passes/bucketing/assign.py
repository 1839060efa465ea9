"""Which collectives share a bucket: the strategies of `bucket_collectives`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from graph_trainer.core.analysis.collectives import collective_inputs, num_bytes
from graph_trainer.core.analysis.unshard_chains import is_layout_only
from graph_trainer.core.graph.annotations import (
    bucket_tag,
    is_backward,
    parameters_of,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.ops import argument
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError

_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")
_EXPERTS = "experts"
_HEAD = "head"


class Route(NamedTuple):
    """What collectives of one bucket have in common."""

    tag: str
    op: str
    group: str
    reduction: str
    """Empty for a gather."""
    dtype: str
    """Of what is reduced, and of complex numbers, which are no bytes; empty for other gathers:
    bytes of any dtype may share a bucket."""
    hops: int
    """How many collectives of the same route the parameter has taken before."""


@dataclass(frozen=True, slots=True)
class Member:
    """A collective that may share a bucket."""

    node: fx.Node
    parameter: str
    position: int
    span: int
    """How many nodes that all ranks have stand before it."""
    bytes: int
    """The larger of what it reads and what it makes."""
    route: Route


def members_of(joint: JointGraph) -> list[Member]:
    """Every tagged collective, in graph order. Linear in nodes.

    Raises:
        PassError: one that names no process group.
    """
    members: list[Member] = []
    hops: dict[tuple[str, Route], int] = {}
    shared = 0
    for position, node in enumerate(joint.graph.nodes):
        # what shards and gradients are padded by and cut to is there on some ranks only
        shared += role_of(node) is None
        tag = bucket_tag(node)
        if tag is None:
            continue
        group, reduction = argument(node, "group_name"), argument(node, "reduce_op")
        if not group:
            raise PassError(
                f"node '{node.name}' ({node.target}) is tagged for a bucket and names no process "
                "group, so nobody knows what it may be merged with: use the functional "
                "collectives, or take its tag away"
            )
        sent = collective_inputs(node)
        apart = reduction is not None or sent[0].dtype.is_complex
        (parameter,) = parameters_of(node)
        first = Route(
            tag,
            str(node.target),
            str(group),
            "" if reduction is None else str(reduction),
            str(sent[0].dtype) if apart else "",
            0,
        )
        taken = hops[(parameter, first)] = hops.get((parameter, first), -1) + 1
        size = max(sum(map(num_bytes, sent)), sum(map(num_bytes, tensors_of(node))))
        route = first._replace(hops=taken)
        members.append(Member(node, parameter, position, shared, size, route))
    return members


def by_size(
    members: Iterable[Member], cap_mib: float | Mapping[str, float], max_span: int
) -> list[list[Member]]:
    """Buckets filled in graph order up to a size. Linear in members.

    Arguments:
        cap_mib: MiB that a bucket holds at most (more only where one member alone does), or that
            by process group; collectives of a group that is not among them stay alone.
        max_span: graph positions from the first member of a bucket to its last, at most; those
            of shards and gradients themselves do not count, of which ranks have unlike numbers.
    """
    closed: list[list[Member]] = []
    open_: dict[Route, tuple[list[Member], int]] = {}
    for member in members:
        cap = cap_mib.get(member.route.group, 0) if isinstance(cap_mib, Mapping) else cap_mib
        bucket, held = open_.get(member.route, ([], 0))
        full = held + member.bytes > cap * MIB
        if bucket and (full or member.span - bucket[0].span > max_span):
            closed.append(bucket)
            bucket, held = [], 0
        bucket.append(member)
        open_[member.route] = (bucket, held + member.bytes)
    return closed + [bucket for bucket, _ in open_.values()]


def by_transformer_block(joint: JointGraph, members: Iterable[Member]) -> list[list[Member]]:
    """One bucket a repeated block and route, experts apart; the rest module by module, but what
    forward reads behind the last block (final norm and output head) together. n log n."""
    place = _places(joint)
    buckets: dict[tuple[Route, str], list[Member]] = {}
    for member in members:
        buckets.setdefault((member.route, place[member.parameter]), []).append(member)
    return list(buckets.values())


def block_of(fqn: str) -> str | None:
    """The repeated block of a parameter: 'layers.3' for 'layers.3.attention.wo.weight'."""
    found = _BLOCK.match(fqn)
    return found.group() if found else None


def _places(joint: JointGraph) -> dict[str, str]:
    """The name of the bucket that each parameter belongs in."""
    read = _first_readers(joint)
    names = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
    end = max((read.get(n, -1) for n in names if block_of(n) is not None), default=-1)
    places = {}
    for name in names:
        block = block_of(name)
        if block is not None:
            apart = _EXPERTS in name.split(".")
            places[name] = f"{block}.{_EXPERTS}" if apart else block
        elif 0 <= end < read.get(name, -1):
            places[name] = _HEAD
        else:
            places[name] = name.rpartition(".")[0]
    return places


def _first_readers(joint: JointGraph) -> dict[str, int]:
    """Position of the first node of forward that computes with each parameter."""
    holds = {
        node: spec.name for spec, nodes in joint.inputs_of(InputKind.PARAMETER) for node in nodes
    }
    first: dict[str, int] = {}
    for position, node in enumerate(joint.graph.nodes):
        found = {holds[n] for n in node.all_input_nodes if n in holds}
        if node.op != "call_function" or not found or is_backward(node):
            continue
        alone = len(found) == 1 and all(n in holds for n in node.all_input_nodes)
        if alone and is_layout_only(node):
            holds[node] = found.pop()
            continue
        for name in found:
            first.setdefault(name, position)
    return first


def without_circles(buckets: Sequence[list[Member]]) -> list[list[Member]]:
    """The buckets of several members, without those that would wait for themselves.

    Only collectives of one parameter depend on each other. Where those of several buckets do so
    in turn (one gradient is reduced over this group and then over that, another the other way
    round), the buckets of the circle are given up, and those behind it. n log n in members.
    """
    ordered = sorted(
        ((member, index) for index, bucket in enumerate(buckets) for member in bucket),
        key=lambda entry: entry[0].position,
    )
    latest: dict[tuple[str, bool], int] = {}
    behind: dict[int, set[int]] = {index: set() for index in range(len(buckets))}
    before = [0] * len(buckets)
    for member, index in ordered:
        way = (member.parameter, bool(member.route.reduction))
        previous = latest.get(way)
        if previous is not None and index not in behind[previous]:
            behind[previous].add(index)
            before[index] += 1
        latest[way] = index
    free = [index for index, count in enumerate(before) if not count]
    for index in free:  # grows while it is walked
        for later in behind[index]:
            before[later] -= 1
            if not before[later]:
                free.append(later)
    return [buckets[index] for index in sorted(free) if len(buckets[index]) > 1]
