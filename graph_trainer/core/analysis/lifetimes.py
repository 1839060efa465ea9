"""When each storage of a graph is made and last used, and how many bytes live at every node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import (
    Held,
    Storage,
    held_storages,
    is_collective,
    is_wait,
    storages_in,
)

SCRATCH = -1
"""The result number of what a node allocates inside, beside its results."""


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


def lifetimes(joint: JointGraph, *, scratch: Mapping[fx.Node, int] | None = None) -> Lifetimes:
    """Follow every storage through views, in-place ops, waits and multi-output ops.

    Linear in nodes. A storage lives from its node to the last reader of any of its views;
    what the graph returns lives to the end. The results of a multi-output op live together
    until the last of them is taken out, as the tuple that holds them does. What a collective
    reads and makes lives until all of it is waited for, and to the end if it never is.

    Arguments:
        scratch: bytes that a node allocates inside, such as `gloo_scratch` gives. They are the
            storage `(node, SCRATCH)` and live while the node runs; a collective's live until
            it is waited for.
    """
    graph = joint.graph
    held = held_storages(graph)
    size = {s: b for node in compute_nodes(graph) for s, b in _made_by(node, held[node])}
    size |= {(node, SCRATCH): num for node, num in (scratch or {}).items()}
    order = list(graph.nodes)
    position = {node: place for place, node in enumerate(order)}
    born = {storage: position[storage[0]] for storage in size}
    last_use = dict(born)
    pending: dict[Storage, list[fx.Node]] = defaultdict(list)

    def use(storages: Iterable[Storage], place: int) -> None:
        for storage in storages:
            if storage in size:
                last_use[storage] = place

    def use_work(started: fx.Node, place: int) -> None:
        for entry in (started, *started.all_input_nodes):
            use(storages_in(held[entry]), place)

    for place, node in enumerate(order):
        for source in node.all_input_nodes:
            use(storages_in(held[source]), place)
        if is_collective(node):
            for storage in storages_in(held[node]):
                pending[storage].append(node)
        elif is_wait(node):
            for storage in storages_in(held[node]):
                for started in pending.pop(storage, ()):
                    use_work(started, place)
                    use([(started, SCRATCH)], place)
    for started in {n for several in pending.values() for n in several}:
        use_work(started, len(order) - 1)
    return Lifetimes(_live_bytes(len(order), size, born, last_use), born, last_use, size)


def _live_bytes(
    places: int, size: dict[Storage, int], born: dict[Storage, int], last_use: dict[Storage, int]
) -> list[int]:
    change = [0] * (places + 1)
    for storage, size_here in size.items():
        change[born[storage]] += size_here
        change[last_use[storage] + 1] -= size_here
    live, total = [], 0
    for place in range(places):
        total += change[place]
        live.append(total)
    return live


def _made_by(node: fx.Node, held: Held) -> Iterator[tuple[Storage, int]]:
    """What a node allocates, storage by storage, and its bytes."""

    def made(storages: Held, value: Any) -> Iterator[tuple[Storage, int]]:
        if isinstance(storages, list):
            if value is not None:
                for part, entry in zip(storages, value, strict=True):
                    yield from made(part, entry)
        elif storages[0] is node and isinstance(value, torch.Tensor):
            # A result has gaps only where it was asked to: elsewhere they are its fake tensor's,
            # taken over from an input that the op really copies.
            gaps = "strided" in str(node.target)
            spans, dense = storage_bytes(value), value.numel() * value.dtype.itemsize
            yield storages, spans if gaps else min(spans, dense)

    return made(held, value_of(node))


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a (fake) tensor's elements span: fewer than it has where it repeats some,
    more where it skips some."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((count - 1) * step for count, step in steps)) * tensor.dtype.itemsize
