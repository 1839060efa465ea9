"""What backends allocate inside a collective, beside what the graph gives them."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.collectives import collective_inputs, num_bytes
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import collective_name, is_collective


def gloo_scratch(joint: JointGraph) -> dict[fx.Node, int]:
    """Bytes that gloo allocates while a collective of a graph is under way. Linear in nodes.

    An all-gather receives into a copy, a reduce-scatter is an all-reduce of a copy, and several
    tensors at once are sent as a copy of all of them. Everything else happens in place. nccl
    allocates its buffers once, for a group, and nothing for a collective.
    """
    found = {node: _gloo_bytes(node) for node in joint.graph.nodes if is_collective(node)}
    return {node: num for node, num in found.items() if num}


def _gloo_bytes(node: fx.Node) -> int:
    kind = collective_name(node)
    sent = collective_inputs(node)
    if kind.startswith("reduce_scatter"):
        return sum(map(num_bytes, sent))
    together = kind.startswith(("all_gather", "all_reduce")) and len(sent) > 1
    received = tensors_of(node) if kind.startswith("all_gather") else []
    return sum(map(num_bytes, received)) + (sum(map(num_bytes, sent)) if together else 0)
