"""The programs that can run a step: they differ in compilation, lifetimes and allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import (
    Phase,
    block_of,
    is_backward,
    is_saved_for_backward,
    module_of,
    phase_of,
    role_of,
    set_saved_for_backward,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import Storage, aten, storage_roots
from graph_trainer.core.simulation.allocator import PoolOf, one_pool, pool_per_stream
from graph_trainer.core.simulation.fusion import (
    NO_FUSION,
    Fusion,
    fuse,
    fuse_in_regions,
    with_fused_copies,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a program runs a step."""

    name: str
    """Value of the flag that chooses it."""
    compiled: Callable[[fx.Node], bool]
    """Which nodes the compiler sees, if the backend compiles."""
    pool_of: PoolOf
    """The allocator's pool of a storage."""
    keeps_saved: bool
    """Whether tensors that autograd or a checkpoint saved stay alive until the backward of their
    layer ends, even if it does not read them."""
    runs_backend: bool
    """Whether a backend of graph_trainer runs the graph, and so decides what is compiled together.
    """
    is_torchtitan: bool
    """Whether torchtitan's loop runs it. Autograd then records the ops of forward and runs those of
    backward, where no compiler sees them; every block is a compiled program that Python calls, if
    the backend compiles; and hooks of FSDP2 gather parameters and reduce gradients, a block at a
    time. One kernel copies all tensors into a bucket, and another all of them out of it; what
    gathers send is copied on a stream of its own, all other copies on that of compute
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py of torch 2.13)."""
    fuses_norms: bool
    """Whether PyTorch has a kernel for an RMSNorm, as from 2.9 on; earlier ones run a kernel for
    each op of it (aten::_fused_rms_norm, aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""

    def fusion(self, joint: JointGraph, compiles: bool, in_regions: bool = False) -> Fusion:
        """Return the groups of nodes that become one kernel.

        Args:
            compiles: whether the backend compiles.
            in_regions: whether it compiles region by region; a runtime that does not run the
                backend ignores this.
        """
        fusion = NO_FUSION
        if compiles:
            by_region = in_regions and self.runs_backend
            fusion = fuse_in_regions(joint) if by_region else fuse(joint, self.compiled)
        return with_fused_copies(joint, fusion) if self.is_torchtitan else fusion

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
    pool_of=one_pool,
    keeps_saved=False,
    runs_backend=True,
    is_torchtitan=False,
    fuses_norms=True,
)
"""The joint graph as one program."""

TORCHTITAN = Runtime(
    name="torchtitan",
    compiled=lambda node: block_of(module_of(node)) is not None and role_of(node) is None,
    pool_of=pool_per_stream,
    keeps_saved=True,
    runs_backend=False,
    is_torchtitan=True,
    fuses_norms=True,
)
"""torchtitan's train loop: FSDP2 allocates what collectives return on separate streams, and copies
all parameters of a block by one kernel (torch.ops.fsdp.split_with_sizes_copy, chunk_cat);
torch.compile compiles each block alone and not the loss; autograd and selective checkpointing keep
saved tensors even if backward does not read them."""

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
