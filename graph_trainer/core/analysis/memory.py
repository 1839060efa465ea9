"""How many bytes of each category are alive at every node of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from graph_trainer.core.analysis.lifetimes import SCRATCH, lifetimes, live_bytes
from graph_trainer.core.graph.annotations import Role, is_backward, owner_of, role_of, tensors_of
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, is_collective, storage_roots
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.torch_private import inputs_of


class Category(StrEnum):
    """What memory is used for. The first four belong to the caller and are always alive."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers_and_batch"
    GRADIENTS = "gradients"
    UNSHARDED = "unsharded_parameters"
    ACTIVATIONS = "activations"
    """Made by forward and read by backward."""
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication_buffers"
    """Read by collectives and no other op, or an intermediate result of a gradient reduction."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One storage that the graph makes."""

    node: fx.Node
    index: int
    """Index of the node's result, or `SCRATCH`."""
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
    """Bytes alive on one rank while a step runs, with those of the caller."""

    by_category: dict[Category, list[int]]
    """Bytes alive at every node, in graph order."""
    total: list[int]
    """The sum of all categories at every node."""
    storages: list[LiveStorage]
    """The storages that the graph makes, in the order in which it makes them."""
    host_bytes: int = 0
    """The most bytes that copies in host memory take at once. The total includes them only where
    host memory is the device's, as on a CPU."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max(self.total)

    @property
    def peak_position(self) -> int:
        """Position of the first node at the peak."""
        return self.total.index(self.peak_bytes)

    def peak_by_category(self) -> dict[Category, int]:
        """Return the bytes of each category at the peak."""
        return {category: live[self.peak_position] for category, live in self.by_category.items()}

    def live_at(self, position: int) -> list[LiveStorage]:
        """Return the storages that the graph has made and still needs at a node, largest first."""
        live = [s for s in self.storages if s.born <= position <= s.last and s.bytes]
        return sorted(live, key=lambda s: (-s.bytes, s.born))


def memory_of(
    joint: JointGraph,
    *,
    optimizer_bytes: int = 0,
    accumulated_bytes: int = 0,
    not_allocated: set[Storage] | None = None,
    kept_until: Mapping[Storage, int] | None = None,
    scratch: Mapping[fx.Node, int] | None = None,
    host_is_device: bool = False,
    expert_imbalance: float = 1.0,
    earlier_microbatches: int = 0,
) -> Memory:
    """Compute the bytes alive at every node, by category. Linear in nodes.

    Args:
        optimizer_bytes: optimizer state that is alive during the step.
        accumulated_bytes: gradients of earlier microbatches that are alive during the step.
        not_allocated: storages that a fused kernel keeps in registers.
        kept_until: position up to which a storage is kept alive although the graph no longer
            reads it.
        scratch, host_is_device, expert_imbalance: as for `lifetimes`.
        earlier_microbatches: those of a pipeline whose forward has run and whose backward has not,
            each with its batch and all activations that forward keeps for backward. Parameters
            that it keeps are gathered once for all of them.
    """
    lives = lifetimes(
        joint,
        scratch=scratch,
        host_is_device=host_is_device,
        expert_imbalance=expert_imbalance,
    )
    last_use = dict(lives.last_use)
    for storage, place in (kept_until or {}).items():
        if storage in last_use:
            last_use[storage] = max(place, last_use[storage])
    order = list(joint.graph.nodes)
    in_registers = not_allocated or set()
    size = {storage: num for storage, num in lives.size.items() if storage not in in_registers}
    roots = storage_roots(joint.graph)
    gradients = {roots[node] for _, node in joint.gradients()}
    # storages that collectives read and no other op computes with
    sent: set[Storage] = set()
    computed: set[Storage] = set()
    for node in order:
        read = {roots[source] for source in inputs_of(node)}
        if is_collective(node):
            sent |= read
        else:
            computed |= read - {roots[node]}  # a view or a wait computes nothing with its input
    backward = [place for place, node in enumerate(order) if is_backward(node)]

    def category_of(storage: Storage) -> Category:
        node, index = storage
        role = role_of(node)
        if index == SCRATCH:
            return Category.COMMUNICATION
        if storage in gradients:
            return Category.GRADIENTS
        if role is Role.REDUCE_GRAD or (storage in sent and storage not in computed):
            return Category.COMMUNICATION
        if role is Role.UNSHARD:
            return Category.UNSHARDED
        if is_backward(node) or not backward:
            return Category.TEMPORARIES
        read_by_backward = backward[0] <= last_use[storage] <= backward[-1]
        return Category.ACTIVATIONS if read_by_backward else Category.TEMPORARIES

    storages = []
    for storage, num in size.items():
        node, index = storage
        born = lives.born[storage]
        category = category_of(storage)
        storages.append(LiveStorage(node, index, category, num, born, last_use[storage]))
    always = {
        Category.PARAMETERS: given_bytes(joint, InputKind.PARAMETER),
        Category.OPTIMIZER_STATE: optimizer_bytes,
        Category.BUFFERS: given_bytes(joint, InputKind.BUFFER, InputKind.BATCH),
        Category.GRADIENTS: accumulated_bytes,
    }
    activations = sum(s.bytes for s in storages if s.category is Category.ACTIVATIONS)
    always[Category.ACTIVATIONS] = earlier_microbatches * activations
    always[Category.BUFFERS] += earlier_microbatches * given_bytes(joint, InputKind.BATCH)
    by_category = {}
    for c in Category:
        lifespans = [(s.born, s.last, s.bytes) for s in storages if s.category is c]
        by_category[c] = live_bytes(len(order), lifespans, always.get(c, 0))
    total = [sum(alive) for alive in zip(*by_category.values(), strict=True)]
    in_order = sorted(storages, key=lambda s: s.born)
    return Memory(by_category, total, in_order, lives.host_bytes)


def given_bytes(joint: JointGraph, *kinds: InputKind) -> int:
    """Return the bytes of all inputs of some kinds on this rank."""
    total = 0
    for kind in kinds:
        for _, nodes in joint.inputs_of(kind):
            total += sum(storage_bytes(tensor) for node in nodes for tensor in tensors_of(node))
    return total
