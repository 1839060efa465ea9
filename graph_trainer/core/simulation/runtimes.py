"""Who runs a step: what is compiled, what is held and where memory comes from differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.analysis.memory import LiveStorage
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    is_backward,
    is_saved_for_backward,
    layer_of,
    module_of,
    phase_of,
    set_saved_for_backward,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, aten, storage_roots
from graph_trainer.core.simulation.allocator import Pool, one_pool, pool_per_stream
from graph_trainer.core.simulation.fusion import Fusion, fuse, no_fusion
from graph_trainer.core.simulation.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Copies:
    """Seconds that copies take, by the collective that they belong to."""

    on_compute: dict[fx.Node, float]
    """Behind the wait for it, on the compute stream."""
    on_stream: dict[fx.Node, float]
    """In front of it, on its own stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a step is run."""

    name: str
    compiled: Callable[[fx.Node], bool]
    """The nodes that a compiler sees, where one is at work."""
    pool_of: Callable[[LiveStorage], Pool]
    """The allocator's pool that a storage comes from."""
    holds_saved: bool
    """Whether what autograd or a checkpoint saved is held until backward is through its layer,
    read or not."""
    copies_buckets: bool
    """Whether parameters are copied out of a bucket when gathered, on the compute stream, and
    gradients into one before they are reduced, on the communication stream."""

    def fusion(self, joint: JointGraph, compiles: bool) -> Fusion:
        """What becomes one kernel."""
        return fuse(joint, self.compiled) if compiles else no_fusion()

    def copies(self, issued: list[Collective], hardware: Hardware) -> Copies:
        """What buckets cost beside their collectives. Linear in collectives."""
        found = Copies({}, {})
        if not self.copies_buckets:
            return found
        rate = hardware.memory_bytes_per_second * hardware.memory_efficiency
        for c in issued:
            if c.role is Role.UNSHARD:
                found.on_compute[c.node] = 2 * c.output_bytes / rate
            elif c.role is Role.REDUCE_GRAD:
                found.on_stream[c.node] = 2 * c.input_bytes / rate
        return found

    def held_longer(self, joint: JointGraph) -> dict[Storage, int]:
        """Storages that are held beyond their last reader, and up to which position."""
        return _saved_until(joint) if self.holds_saved else {}


def _everything(node: fx.Node) -> bool:
    return True


def _in_a_layer(node: fx.Node) -> bool:
    return layer_of(module_of(node)) is not None


GRAPH_TRAINER = Runtime(
    name="graph_trainer",
    compiled=_everything,
    pool_of=one_pool,
    holds_saved=False,
    copies_buckets=False,
)
"""The joint graph as one program."""

TORCHTITAN = Runtime(
    name="torchtitan",
    compiled=_in_a_layer,
    pool_of=pool_per_stream,
    holds_saved=True,
    copies_buckets=True,
)
"""torchtitan's own loop: FSDP2 allocates what it gathers and reduces on streams of its own,
gathers and reduces them in buckets that it copies from and to, torch.compile sees the blocks one
by one and not the loss, and autograd and selective checkpointing hold what they saved whether or
not backward reads it."""

RUNTIMES = {runtime.name: runtime for runtime in (GRAPH_TRAINER, TORCHTITAN)}


def mark_saved(joint: JointGraph) -> None:
    """Remember on a graph as captured which values autograd or a checkpoint saved.

    Both detach what they save, which a capture records and cleaning up removes.
    """
    for node in joint.graph.find_nodes(op="call_function", target=aten.detach.default):
        if phase_of(node) is Phase.FORWARD:
            set_saved_for_backward(node.all_input_nodes[0])


def _saved_until(joint: JointGraph) -> dict[Storage, int]:
    roots = storage_roots(joint.graph)
    last_of_layer = {
        layer_of(module_of(node)): place
        for place, node in enumerate(joint.graph.nodes)
        if is_backward(node)
    }
    return {
        roots[node]: last_of_layer[layer]
        for node in joint.graph.nodes
        if is_saved_for_backward(node)
        and (layer := layer_of(module_of(node))) is not None
        and layer in last_of_layer
    }
