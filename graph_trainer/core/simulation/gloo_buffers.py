"""Scratch memory that gloo allocates inside collectives."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.collectives import collective_inputs, num_bytes
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import collective_kind, is_collective


def gloo_scratch(joint: JointGraph) -> dict[fx.Node, int]:
    """Return the bytes that gloo allocates while each collective runs, where it does.

    The table of `collective_kinds` says how many. nccl allocates its buffers once for a group,
    and nothing for a collective. Linear in nodes.
    """
    found = {}
    for node in joint.graph.nodes:
        kind = collective_kind(node)
        if kind is not None and is_collective(node):
            sent = [num_bytes(t) for t in collective_inputs(node)]
            found[node] = kind.gloo_bytes(sent, [num_bytes(t) for t in tensors_of(node)])
    return {node: scratch for node, scratch in found.items() if scratch}
