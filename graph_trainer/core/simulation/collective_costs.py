"""What a collective costs: seconds on its links, and scratch memory on a CPU."""

from __future__ import annotations

import functools
import math
from collections import Counter

from torch import fx

from graph_trainer.core.analysis.collectives import Collective, collective_inputs
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import collective_kind, is_collective
from graph_trainer.core.simulation.hardware import Hardware


def collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Return the seconds from start to end of a collective that shares its links with no other.

    The table of `collective_kinds` has the bytes that pass each link. A ring of n ranks sends n - 1
    messages in sequence. Recursive doubling sends log2(n), but the data of a rank crosses nodes
    through the network card of that rank alone, while a ring of nodes uses all cards of a node.
    (Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH,
    2005; the bandwidth terms are those that nccl-tests calls bus bandwidth.)
    """
    size = len(collective.ranks)
    if size == 1:
        return 0.0
    kind = collective.row
    moved = kind.link_bytes(collective.input_bytes, collective.output_bytes, size)
    nodes, fewest, most = placement(collective.ranks, hardware.devices_per_node)
    if nodes == 1:
        ring_bandwidth = tree_bandwidth = hardware.node_bytes_per_second
        ring_latency = (size - 1) * hardware.node_latency_seconds
        tree_latency = math.ceil(math.log2(size)) * hardware.node_latency_seconds
    else:
        ring_bandwidth = fewest * hardware.network_bytes_per_second
        if fewest > 1:
            ring_bandwidth = min(ring_bandwidth, hardware.node_bytes_per_second)
        tree_bandwidth = hardware.network_bytes_per_second
        inside = (size - nodes) * hardware.node_latency_seconds
        ring_latency = inside + (nodes - 1) * hardware.network_latency_seconds
        tree_latency = (
            math.ceil(math.log2(most)) * hardware.node_latency_seconds
            + math.ceil(math.log2(nodes)) * hardware.network_latency_seconds
        )

    def seconds(latency: float, bandwidth: float) -> float:
        return kind.rounds * latency + moved / (bandwidth * hardware.link_efficiency)

    if kind.through_one_card:
        return hardware.collective_seconds + seconds(ring_latency, tree_bandwidth)
    fastest = min(seconds(ring_latency, ring_bandwidth), seconds(tree_latency, tree_bandwidth))
    return hardware.collective_seconds + fastest


@functools.cache
def placement(ranks: Ranks, devices_per_node: int) -> tuple[int, int, int]:
    """Return the number of nodes that a group spans, and the fewest and the most ranks on a node.

    Ranks fill one node after another, as launchers place them: 0 to 7 on the first node of eight.
    """
    per_node = Counter(rank // devices_per_node for rank in ranks)
    return len(per_node), min(per_node.values()), max(per_node.values())


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
