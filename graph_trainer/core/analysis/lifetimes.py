"""When each storage of a graph is made and last used, and the bytes alive at every node."""

# The idea: one pass over the nodes sets, for each storage (what ops allocate, not their views), the
# place of its last reader. A collective is asynchronous: what it reads and writes is in use until
# the wait, so the wait counts as a reader of both. Then bytes alive at a place are a running sum:
# each storage adds its bytes where it is made and takes them off after its last reader.

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensors_of, value_of
from graph_trainer.core.graph.collective_kinds import Effect
from graph_trainer.core.graph.content import once_per_graph, once_per_node
from graph_trainer.core.graph.data_sizes import (
    has_data_sizes,
    nbytes_of,
    storage_bytes,
    uneven_experts,
)
from graph_trainer.core.graph.host_copies import is_copy_to_host
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import (
    Storage,
    ValueStorages,
    collective_kinds,
    storages_in,
    value_storages,
)
from graph_trainer.core.torch_private import inputs_of

SCRATCH = -1
"""In place of the index of a result: the scratch memory of a node."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Storages that a graph makes, with the bytes alive while it runs; without its inputs."""

    live_bytes: list[int]
    """For every node, in graph order: bytes made by the graph that are alive while it runs."""
    born: dict[Storage, int]
    """Position of the node that makes a storage."""
    last_use: dict[Storage, int]
    """Position of the last node that reads a storage or one of its views."""
    size: dict[Storage, int]
    """Bytes of each storage."""
    host_bytes: int
    """The most bytes that copies in host memory take at once."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, beside parameters, buffers and batch."""
        return max(self.live_bytes, default=0)


def lifetimes(
    joint: JointGraph,
    *,
    scratch: Mapping[fx.Node, int] | None = None,
    host_is_device: bool = False,
    expert_imbalance: float = 1.0,
) -> Lifetimes:
    """Follow every storage through views, in-place ops, waits and multi-output ops.

    A storage is alive from its node to the last reader of any of its views; an output of the
    graph is alive to the end. The results of a multi-output op are alive until the last of them is
    taken out of their tuple. The inputs and results of a collective are alive until the last wait
    for its results, or to the end if there is none. Linear in nodes.

    Args:
        scratch: bytes of scratch memory by node, as `scratch_bytes` returns them: the storage
            `(node, SCRATCH)`. It is alive while the node runs, that of a collective until its
            wait.
        host_is_device: whether host memory is the device's, as on a CPU. If not, copies in host
            memory count in `host_bytes` alone, with a power of two bytes each, as torch's allocator
            of pinned memory takes.
        expert_imbalance: sizes are those where the experts of this rank receive so many times the
            rows to expect.
    """
    if not scratch and not host_is_device and expert_imbalance == 1:
        return _plain_lifetimes(joint.graph)
    return _lifetimes(joint.graph, scratch or {}, host_is_device, expert_imbalance)


def _lifetimes(
    graph: fx.Graph,
    scratch: Mapping[fx.Node, int],
    host_is_device: bool,
    expert_imbalance: float,
) -> Lifetimes:
    uses = _uses(graph)
    size = dict(_sizes(graph))
    if expert_imbalance != 1:
        size |= _uneven_sizes(graph, expert_imbalance)
    born = {storage: uses.position[storage[0]] for storage in size}
    last_use = {storage: uses.last.get(storage, place) for storage, place in born.items()}
    for node, num in scratch.items():
        storage = (node, SCRATCH)
        size[storage] = num
        born[storage] = uses.position[node]
        last_use[storage] = uses.waited.get(node, born[storage])
    on_host = {s: num for s, num in size.items() if is_copy_to_host(s[0])}
    if not host_is_device:
        # rounded up to a power of two
        on_host = {s: 1 << (num - 1).bit_length() for s, num in on_host.items() if num}
        size = {s: num for s, num in size.items() if s not in on_host}

    def live(of: Mapping[Storage, int]) -> list[int]:
        lifespans = ((born[s], last_use[s], num) for s, num in of.items())
        return live_bytes(len(uses.position), lifespans)

    return Lifetimes(live(size), born, last_use, size, max(live(on_host), default=0))


@once_per_graph
def _plain_lifetimes(graph: fx.Graph) -> Lifetimes:
    return _lifetimes(graph, scratch={}, host_is_device=False, expert_imbalance=1.0)


def bytes_kept(graph: fx.Graph, nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the storages that the values of `nodes` keep. Linear in nodes.

    Each storage counts once, without inputs of the graph and copies in host memory.
    """
    storages = value_storages(graph)
    size = _sizes(graph)
    kept = {storage for node in nodes for storage in storages_in(storages[node])}
    return sum(size.get(s, 0) for s in kept if not is_copy_to_host(s[0]))


def live_bytes(nodes: int, lifespans: Iterable[tuple[int, int, int]], always: int = 0) -> list[int]:
    """Return the bytes alive at each of `nodes` nodes, with `always` more bytes at each.

    Args:
        lifespans: for each storage the positions of the first and the last node at which it is
            alive, from 0 to nodes - 1, and its bytes.
    """
    change = [always, *[0] * nodes]
    for first, last, num in lifespans:
        change[first] += num
        change[last + 1] -= num
    return list(itertools.accumulate(change[:nodes]))


@dataclass(frozen=True, slots=True)
class _Uses:
    """When storages are read. Sizes do not matter here."""

    position: dict[fx.Node, int]
    last: dict[Storage, int]
    """Position of the last reader of a storage, views and waits included."""
    waited: dict[fx.Node, int]
    """Position of the last wait for each collective that is waited for."""


@once_per_graph
def _uses(graph: fx.Graph) -> _Uses:
    storages = value_storages(graph)
    kinds = collective_kinds(graph)
    position = {node: place for place, node in enumerate(graph.nodes)}
    last: dict[Storage, int] = {}
    waited: dict[fx.Node, int] = {}
    pending: dict[Storage, list[fx.Node]] = defaultdict(list)

    def use(nodes: Iterable[fx.Node], place: int) -> None:
        for node in nodes:
            result = storages[node]
            if isinstance(result, tuple):  # one storage, as most nodes have
                last[result] = place
            else:
                last.update(dict.fromkeys(storages_in(result), place))

    for node, place in position.items():
        use(inputs_of(node), place)
        kind = kinds[node]
        if kind is None:
            continue
        if kind.effect is Effect.STARTS:
            for storage in storages_in(storages[node]):
                pending[storage].append(node)
        elif kind.effect is Effect.WAITS:
            for storage in storages_in(storages[node]):
                for collective in pending.pop(storage, ()):
                    use((collective, *inputs_of(collective)), place)
                    waited[collective] = place
    # without a wait: in use to the end
    for collective in itertools.chain.from_iterable(pending.values()):
        use((collective, *inputs_of(collective)), len(position) - 1)
    return _Uses(position, last, waited)


@once_per_graph
def _sizes(graph: fx.Graph) -> Mapping[Storage, int]:
    """Return the bytes of each storage that the graph allocates."""
    storages = value_storages(graph)
    stored_bytes = _stored_bytes(graph)
    size: dict[Storage, int] = {}
    for node in compute_nodes(graph):
        _add_sizes(size, node, storages[node], stored_bytes[node])
    return size


def _uneven_sizes(graph: fx.Graph, expert_imbalance: float) -> Mapping[Storage, int]:
    """Return the bytes of the storages whose size data decide, where experts receive so much."""
    storages = value_storages(graph)
    is_decided_by_data = _is_decided_by_data(graph)
    size: dict[Storage, int] = {}
    with uneven_experts(graph, expert_imbalance):
        for node in compute_nodes(graph):
            if is_decided_by_data[node]:
                _add_sizes(size, node, storages[node], _bytes_of_result(node))
    return size


def _add_sizes(size: dict[Storage, int], node: fx.Node, storage: ValueStorages, num: Any) -> None:
    """Add the bytes of the storages that a node makes; `num` is what `_bytes_of_result` returns."""
    if num is None:
        return
    if isinstance(storage, list):
        for part, part_bytes in zip(storage, num, strict=True):
            _add_sizes(size, node, part, part_bytes)
    elif storage[0] is node:
        size[storage] = num


@once_per_node
def _is_decided_by_data(node: fx.Node) -> bool:
    """Return whether data decide a size of a node's result."""
    return any(map(has_data_sizes, tensors_of(node)))


@once_per_node
def _stored_bytes(node: fx.Node) -> Any:
    """Return `_bytes_of_result` with the sizes to expect."""
    return _bytes_of_result(node)


def _bytes_of_result(node: fx.Node) -> Any:
    """Return the bytes that a node's result takes in a new storage: a list for several results, and
    None for what is not a tensor."""
    # Only an op with strides as an argument makes a result with gaps. A real kernel of any other
    # op makes none, even if its fake kernel repeats those of an input.
    keeps_gaps = "strided" in str(node.target)

    def bytes_of(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [bytes_of(part) for part in value]
        if not isinstance(value, torch.Tensor):
            return None
        return storage_bytes(value) if keeps_gaps else min(storage_bytes(value), nbytes_of(value))

    return bytes_of(value_of(node))
