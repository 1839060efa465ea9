"""When each storage of a graph is made and last used, and how many bytes live at every node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graph_trainer.analysis.ops import is_collective, is_wait, storage_roots
from graph_trainer.joint_graph import JointGraph, compute_nodes, value_of

Storage = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Bytes alive while a graph runs, without its inputs."""

    live_bytes: list[int]
    """For every node, in order: bytes made by the graph that are alive while it runs."""
    born: dict[Storage, int]
    """Position of the node that makes a storage."""
    last_use: dict[Storage, int]
    """Position of the last node that reads a storage or one of its views."""
    size: dict[Storage, int]
    """Bytes of each storage the graph makes; its inputs are not among them."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, above parameters, buffers and batch."""
        return max(self.live_bytes, default=0)


def lifetimes(joint: JointGraph) -> Lifetimes:
    """Follow every storage through views, in-place ops, waits and multi-output ops.

    Linear in nodes. A storage lives from its node to the last reader of any of its views;
    what the graph returns lives to the end. The results of a multi-output op live together
    until the last of them is taken out, as the tuple that holds them does. What a collective
    reads lives until it is waited for.
    """
    graph = joint.graph
    roots = storage_roots(graph)
    made = {n: _storages(n) for n in compute_nodes(graph) if roots[n] == (n, 0)}
    size = {storage: size for storages in made.values() for storage, size in storages.items()}
    born: dict[Storage, int] = {}
    last_use: dict[Storage, int] = {}
    order = list(graph.nodes)
    for position, node in enumerate(order):
        for storage in made.get(node, ()):
            born[storage] = last_use[storage] = position
        for source in _read_by(node):
            for storage in made.get(source, (roots[source],)):
                if storage in size:
                    last_use[storage] = position
    change = [0] * (len(order) + 1)
    for storage, size_here in size.items():
        change[born[storage]] += size_here
        change[last_use[storage] + 1] -= size_here
    live, total = [], 0
    for position in range(len(order)):
        total += change[position]
        live.append(total)
    return Lifetimes(live, born, last_use, size)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """What a node reads; a wait also ends what its collective reads."""
    sources = node.all_input_nodes
    if is_wait(node) and is_collective(sources[0]):
        return [*sources, *sources[0].all_input_nodes]
    return sources


def _storages(node: fx.Node) -> dict[Storage, int]:
    """What a node allocates: bytes by (node, output index). Results that are no tensor, such
    as a gradient that was not asked for, keep their place in the count."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return {
        (node, index): storage_bytes(part)
        for index, part in enumerate(values)
        if isinstance(part, torch.Tensor)
    }


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a (fake) tensor's elements span: fewer than it has where it repeats some,
    more where it skips some."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((count - 1) * step for count, step in steps)) * tensor.dtype.itemsize
