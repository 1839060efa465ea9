"""The programs that can run a step: they differ in compilation, lifetimes and allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    block_of,
    is_backward,
    is_saved_for_backward,
    module_of,
    phase_of,
    set_saved_for_backward,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, aten, storage_roots
from graph_trainer.core.simulation.allocator import ONE_POOL, POOL_PER_STREAM, Pools
from graph_trainer.core.simulation.fusion import NO_FUSION, Fusion, fuse, fuse_in_regions
from graph_trainer.core.simulation.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a program runs a step."""

    name: str
    """Value of the flag that chooses it."""
    compiled: Callable[[fx.Node], bool]
    """Which nodes the compiler sees, if the backend compiles."""
    pools: Pools
    """The pools of the allocator."""
    keeps_saved: bool
    """Whether tensors that autograd or a checkpoint saved stay alive until the backward of their
    layer ends, even if it does not read them."""
    runs_backend: bool
    """Whether a backend of graph_trainer runs the graph, and so decides what is compiled together.
    """
    under_autograd: bool
    """Whether autograd records the ops of forward and runs those of backward, where no compiler
    sees them."""
    has_hooks: bool
    """Whether the hooks of FSDP2 gather parameters and reduce gradients, a block at a time."""
    compiles_blocks: bool
    """Whether every block is a compiled program that Python calls, in forward and in backward."""
    copies_buckets: bool
    """Whether gathered parameters are copied out of their bucket, on the compute stream, and
    gradients into their bucket, on the communication stream."""

    def fusion(self, joint: JointGraph, compiles: bool, in_regions: bool = False) -> Fusion:
        """Return the groups of nodes that become one kernel.

        Args:
            compiles: whether the backend compiles.
            in_regions: whether it compiles region by region; a runtime that does not run the
                backend ignores this.
        """
        if not compiles:
            return NO_FUSION
        if in_regions and self.runs_backend:
            return fuse_in_regions(joint)
        return fuse(joint, self.compiled)

    def copy_seconds(self, collective: Collective, hardware: Hardware) -> float:
        """Return the seconds in which a collective's bucket is copied, 0 if it is not."""
        if not self.copies_buckets or collective.role is None:
            return 0.0
        gathers = collective.role is Role.UNSHARD
        size = collective.output_bytes if gathers else collective.input_bytes
        return 2 * size / (hardware.memory_bytes_per_second * hardware.memory_efficiency)

    def kept_until(self, joint: JointGraph) -> dict[Storage, int]:
        """Return the storages that stay alive after their last reader, with the last position."""
        if not self.keeps_saved:
            return {}
        roots = storage_roots(joint.graph)
        last_of_block: dict[str | None, int] = {}
        for place, node in enumerate(joint.graph.nodes):
            if is_backward(node):
                last_of_block[block_of(module_of(node))] = place
        until: dict[Storage, int] = {}
        for node in joint.graph.nodes:
            block = block_of(module_of(node))
            if is_saved_for_backward(node) and block is not None and block in last_of_block:
                until[roots[node]] = last_of_block[block]
        return until


GRAPH_TRAINER = Runtime(
    name="graph_trainer",
    compiled=lambda node: True,
    pools=ONE_POOL,
    keeps_saved=False,
    runs_backend=True,
    under_autograd=False,
    has_hooks=False,
    compiles_blocks=False,
    copies_buckets=False,
)
"""The joint graph as one program."""

TORCHTITAN = Runtime(
    name="torchtitan",
    compiled=lambda node: block_of(module_of(node)) is not None,
    pools=POOL_PER_STREAM,
    keeps_saved=True,
    runs_backend=False,
    under_autograd=True,
    has_hooks=True,
    compiles_blocks=True,
    copies_buckets=True,
)
"""torchtitan's train loop: FSDP2 allocates gathered parameters and reduced gradients on separate
streams and copies them from and to buckets; torch.compile compiles each block alone and not the
loss; autograd and selective checkpointing keep saved tensors even if backward does not read
them."""

RUNTIMES = {runtime.name: runtime for runtime in (GRAPH_TRAINER, TORCHTITAN)}
"""All runtimes by name."""


def mark_saved(joint: JointGraph) -> None:
    """Annotate the values that autograd or a checkpoint saved, on a graph as captured.

    Both detach the tensors that they save: the capture records the detach, and cleanup passes
    remove it.
    """
    for node in joint.graph.find_nodes(op="call_function", target=aten.detach.default):
        if phase_of(node) is Phase.FORWARD:
            set_saved_for_backward(node.all_input_nodes[0])
