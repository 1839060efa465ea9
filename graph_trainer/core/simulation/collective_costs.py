"""What a collective costs: seconds on its links, and scratch memory on a CPU."""

from __future__ import annotations

import functools
import math
import typing
from collections import Counter
from typing import NamedTuple

from torch import fx

from graph_trainer.core.analysis.collectives import collective_inputs
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.collective_kinds import CollectiveKind, Ranks, kind_named
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import collective_kind, is_collective
from graph_trainer.core.simulation.hardware import Hardware, Link, Protocol


class Parts(NamedTuple):
    """The time of a collective that shares its links with no other."""

    latency_seconds: float
    """Messages on their way: no link is busy."""
    transfer_seconds: float
    """Bytes on a link."""
    link: Link
    """That link: the network's if the ranks are on several nodes."""


class Sizes(typing.Protocol):
    """What the time of a collective depends on; a `Collective` has it."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def row(self) -> CollectiveKind: ...
    @property
    def input_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def largest_split_bytes(self) -> int: ...


def collective_seconds(collective: Sizes, hardware: Hardware) -> float:
    """Return the seconds from start to end of a collective, the sum of `collective_parts`."""
    parts = collective_parts(collective, hardware)
    return parts.latency_seconds + parts.transfer_seconds


def collective_parts(collective: Sizes, hardware: Hardware) -> Parts:
    """Return latency and transfer of a collective that shares its links with no other.

    A library times each of its algorithms and protocols by a latency and a bandwidth, and runs the
    fastest. This is the model of NCCL 2.28, src/graph/tuning.cc (`ncclTopoTuneModel`,
    `ncclTopoGetAlgoTime`), without its corrections by size, NVLink SHARP and PAT: rings for all
    collectives, trees for all-reduces over several nodes, and messages between all pairs for
    all-to-alls. Linear in the number of protocols.
    """
    size = len(collective.ranks)
    if size == 1:
        return Parts(0.0, 0.0, Link.NODE)
    kind = collective.row
    place = placement(collective.ranks, hardware.devices_per_node)
    ways = []
    for protocol in hardware.protocols:
        if not kind.pairwise:
            ways.append(_ring(collective, place, protocol, hardware))
            if kind.as_tree and place.nodes > 1 and protocol.tree_latency_seconds is not None:
                ways.append(_tree(collective, place, protocol, hardware))
        elif protocol.sends_pairs:
            ways.append(_pairs(collective, place, protocol, hardware))
    return min(ways, key=lambda parts: parts.latency_seconds + parts.transfer_seconds)


def send_seconds(sender: int, receiver: int, num_bytes: int, hardware: Hardware) -> float:
    """Return the seconds in which a rank sends a tensor to another, over links with no other load.

    The messages of an all-to-all are NCCL's sends and receives, so that one message takes as long
    as an all-to-all of two ranks.
    """
    return collective_seconds(_Message((sender, receiver), num_bytes), hardware)


class _Message(NamedTuple):
    """A send and its receive, as an all-to-all of two ranks."""

    ranks: tuple[int, int]
    largest_split_bytes: int

    @property
    def row(self) -> CollectiveKind:
        return kind_named("all_to_all_single")

    @property
    def input_bytes(self) -> int:
        return 2 * self.largest_split_bytes

    @property
    def output_bytes(self) -> int:
        return 2 * self.largest_split_bytes


def _ring(c: Sizes, place: Placement, protocol: Protocol, hardware: Hardware) -> Parts:
    """Return the parts of a ring, in which the data pass from rank to rank.

    All but one of the ranks forward each part once a round. While a ring spans nodes, hosts post
    its messages one after another. With one rank of each node, no step within a node overlaps
    those between nodes, which then take as long as in a tree.
    """
    size, rounds = len(c.ranks), c.row.rounds
    between = place.nodes - 1
    within = size - 1 - between
    step, step_between = protocol.node_latency_seconds, protocol.network_latency_seconds
    if between:
        step = max(step, protocol.post_seconds)
    if place.most == 1 and protocol.tree_latency_seconds is not None:
        step_between = protocol.tree_latency_seconds
    latency = protocol.base_seconds + rounds * (within * step + between * step_between)
    moved = c.row.link_bytes(c.input_bytes, c.output_bytes, size)
    bandwidth, link = _bandwidth(place, protocol, protocol.bandwidth_share, hardware)
    return Parts(latency, moved / bandwidth, link)


def _tree(c: Sizes, place: Placement, protocol: Protocol, hardware: Hardware) -> Parts:
    """Return the parts of an all-reduce in a tree of nodes, in which a chain links the ranks of a
    node: up the tree to its root, and down again."""
    assert protocol.tree_latency_seconds is not None and protocol.tree_bandwidth_share is not None
    chain = (place.most - 1) * protocol.node_latency_seconds
    depth = math.ceil(math.log2(place.nodes)) * protocol.tree_latency_seconds
    moved = 2 * max(c.input_bytes, c.output_bytes)
    bandwidth, link = _bandwidth(place, protocol, protocol.tree_bandwidth_share, hardware)
    return Parts(protocol.base_seconds + 2 * (chain + depth), moved / bandwidth, link)


def _bandwidth(
    place: Placement, protocol: Protocol, share: float, hardware: Hardware
) -> tuple[float, Link]:
    """Return the bytes per second of a ring or tree, and the link that it keeps busy.

    Rings pass from node to node through the network cards of all their ranks on a node at once. One
    that spans nodes is counted on the link that bounds it, as messages between all pairs are.
    """
    bandwidth = hardware.node_bytes_per_second * hardware.node_efficiency
    link, limit = Link.NODE, protocol.node_limit_bytes_per_second
    if place.nodes > 1:
        limit = protocol.network_limit_bytes_per_second
        cards = place.fewest * hardware.network_bytes_per_second * hardware.network_efficiency
        if place.most == 1 or cards <= bandwidth:
            bandwidth, link = cards, Link.NETWORK
    bandwidth *= share
    return bandwidth if limit is None else min(bandwidth, limit), link


def _pairs(c: Sizes, place: Placement, protocol: Protocol, hardware: Hardware) -> Parts:
    """Return the parts of an all-to-all, in which each rank sends a message to every other one.

    A rank's messages to other nodes pass through its network card alone, those within the node
    beside them. All pairs of ranks have an equal part of a link, so the slowest pair ends last: if
    the splits are uneven, bytes count as if every pair exchanged the largest split. (NVIDIA in
    nccl-tests issues 130 and 267; NCCL gives each peer the same number of channels.)
    """
    size = len(c.ranks)
    within, outside = place.fewest - 1, size - place.fewest
    latency = protocol.base_seconds + within * protocol.node_latency_seconds
    if outside:  # the hosts post all messages; the last one is on its way when all others are done
        step = max(protocol.node_latency_seconds, protocol.post_seconds)
        latency = protocol.base_seconds + (size - 2) * step + protocol.network_latency_seconds
    split = max(c.largest_split_bytes, max(c.input_bytes, c.output_bytes) / size)
    part = split / protocol.bandwidth_share
    node = part * within / (hardware.node_bytes_per_second * hardware.node_efficiency)
    network = part * outside / (hardware.network_bytes_per_second * hardware.network_efficiency)
    link = Link.NETWORK if outside and network >= node else Link.NODE
    return Parts(latency, max(node, network), link)


class Placement(NamedTuple):
    """How the ranks of a group are spread over nodes."""

    nodes: int
    fewest: int
    """Ranks on the node that has the fewest of them."""
    most: int


@functools.cache
def placement(ranks: Ranks, devices_per_node: int) -> Placement:
    """Return how a group spans nodes.

    Ranks fill one node after another, as launchers place them: 0 to 7 on the first node of eight.
    """
    per_node = Counter(rank // devices_per_node for rank in ranks)
    return Placement(len(per_node), min(per_node.values()), max(per_node.values()))


def scratch_bytes(joint: JointGraph, device: str) -> dict[fx.Node, int]:
    """Return the bytes of scratch memory of each collective that allocates some while it runs.

    On a CPU `OrderedGloo` runs, and the table of `collective_kinds` has its bytes. NCCL allocates
    its buffers once for a group, outside the caching allocator. Linear in nodes.
    """
    scratch: dict[fx.Node, int] = {}
    if device != "cpu":
        return scratch
    for node in joint.graph.nodes:
        kind = collective_kind(node)
        if kind is not None and is_collective(node):
            sent = [nbytes_of(t) for t in collective_inputs(node)]
            received = [nbytes_of(t) for t in tensors_of(node)]
            num = kind.cpu_bytes(sent, received)
            if num:
                scratch[node] = num
    return scratch
