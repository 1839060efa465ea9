"""How many bytes of what kind are alive at every node of a step, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from graph_trainer.core.analysis.lifetimes import SCRATCH, lifetimes, storage_bytes
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    owner_of,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.ops import Storage, is_collective, storage_roots


class Category(StrEnum):
    """What memory is used for. The first four are the caller's and live all the time."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers_and_batch"
    GRADIENTS = "gradients"
    UNSHARDED = "unsharded_parameters"
    ACTIVATIONS = "activations"
    """Made by forward and read by backward."""
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication_buffers"
    """Sent by a collective and read by nothing else, or reduced on the way to a gradient."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One storage that the graph makes."""

    node: fx.Node
    index: int
    """Which of the node's results; `SCRATCH` for what it allocates inside."""
    category: Category
    bytes: int
    born: int
    """Position of the node that makes it."""
    last: int
    """Position of the last node that reads it."""

    @property
    def owner(self) -> str:
        """FQN of the parameter or the module that it belongs to."""
        return owner_of(self.node)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive on one rank while a step runs, the caller's included."""

    by_category: dict[Category, list[int]]
    """For every node, in graph order: bytes of each category alive while it runs."""
    total: list[int]
    """Their sum at every node."""
    storages: list[LiveStorage]
    """What the graph makes, in the order in which it is made."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max(self.total)

    @property
    def peak_position(self) -> int:
        """Position of the first node at which so many are alive."""
        return self.total.index(self.peak_bytes)

    def peak_by_category(self) -> dict[Category, int]:
        """What the peak is made of."""
        return {category: live[self.peak_position] for category, live in self.by_category.items()}

    def live_at(self, position: int) -> list[LiveStorage]:
        """What the graph has made and still needs at a node, the largest first."""
        live = [s for s in self.storages if s.born <= position <= s.last and s.bytes]
        return sorted(live, key=lambda s: (-s.bytes, s.born))


def memory_of(
    joint: JointGraph,
    *,
    optimizer_bytes: int = 0,
    accumulated_bytes: int = 0,
    not_allocated: set[Storage] | None = None,
    held_longer: Mapping[Storage, int] | None = None,
    scratch: Mapping[fx.Node, int] | None = None,
) -> Memory:
    """Bytes alive at every node, by category. Linear in nodes.

    Arguments:
        optimizer_bytes: optimizer state that is alive during the step.
        accumulated_bytes: gradients of earlier microbatches that are alive during the step.
        not_allocated: storages that a fused kernel keeps in registers.
        held_longer: positions up to which something else holds a storage that the graph no
            longer reads.
        scratch: bytes that a node allocates inside, as `lifetimes` has them.
    """
    lives = lifetimes(joint, scratch=scratch)
    last_use = lives.last_use | {
        s: max(place, lives.last_use[s])
        for s, place in (held_longer or {}).items()
        if s in lives.last_use
    }
    order = list(joint.graph.nodes)
    size = {s: b for s, b in lives.size.items() if not not_allocated or s not in not_allocated}
    category = _categories(joint, list(size), last_use, order)
    storages = [
        LiveStorage(*storage, category[storage], num, lives.born[storage], last_use[storage])
        for storage, num in size.items()
    ]
    change = {c: [0] * (len(order) + 1) for c in Category}
    for storage in storages:
        change[storage.category][storage.born] += storage.bytes
        change[storage.category][storage.last + 1] -= storage.bytes
    always = _given(joint) | {
        Category.OPTIMIZER_STATE: optimizer_bytes,
        Category.GRADIENTS: accumulated_bytes,
    }
    by_category: dict[Category, list[int]] = {}
    total = [0] * len(order)
    for c in Category:
        alive, series = always.get(c, 0), []
        for place in range(len(order)):
            alive += change[c][place]
            series.append(alive)
            total[place] += alive
        by_category[c] = series
    return Memory(by_category, total, sorted(storages, key=lambda s: s.born))


def given_bytes(joint: JointGraph, kind: InputKind) -> int:
    """Bytes of all inputs of one kind on this rank."""
    return sum(
        storage_bytes(t)
        for _, nodes in joint.inputs_of(kind)
        for node in nodes
        for t in tensors_of(node)
    )


def _given(joint: JointGraph) -> dict[Category, int]:
    others = given_bytes(joint, InputKind.BUFFER) + given_bytes(joint, InputKind.BATCH)
    return {
        Category.PARAMETERS: given_bytes(joint, InputKind.PARAMETER),
        Category.BUFFERS: others,
    }


def _categories(
    joint: JointGraph,
    storages: list[Storage],
    last_use: dict[Storage, int],
    order: list[fx.Node],
) -> dict[Storage, Category]:
    roots = storage_roots(joint.graph)
    gradients = {roots[node] for _, node in joint.gradients()}
    sent_only = _only_sent(order, roots)
    backward_from = next(
        (place for place, node in enumerate(order) if is_backward(node)), len(order)
    )
    last_backward = next(
        (place for place in range(len(order) - 1, -1, -1) if is_backward(order[place])), -1
    )

    def category(storage: Storage) -> Category:
        node, index = storage
        if index == SCRATCH:
            return Category.COMMUNICATION
        if storage in gradients:
            return Category.GRADIENTS
        role = role_of(node)
        if role is Role.REDUCE_GRAD or (storage in sent_only):
            return Category.COMMUNICATION
        if role is Role.UNSHARD:
            return Category.UNSHARDED
        read_by_backward = backward_from <= last_use[storage] <= last_backward
        if not is_backward(node) and read_by_backward:
            return Category.ACTIVATIONS
        return Category.TEMPORARIES

    return {storage: category(storage) for storage in storages}


def _only_sent(order: list[fx.Node], roots: dict[fx.Node, Storage]) -> set[Storage]:
    """Storages that collectives read and nothing else computes with."""
    sent: set[Storage] = set()
    computed: set[Storage] = set()
    for node in order:
        for source in node.all_input_nodes:
            if roots[node] == roots[source] and not is_collective(node):
                continue  # a view of it or a wait for it
            (sent if is_collective(node) else computed).add(roots[source])
    return sent - computed
