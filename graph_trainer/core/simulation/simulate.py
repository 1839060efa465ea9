"""Simulate a step on some hardware: collectives, memory, costs, timeline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.collectives import Collective, collectives
from graph_trainer.core.analysis.memory import Memory, memory_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.simulation.allocator import reserved_bytes
from graph_trainer.core.simulation.gloo_buffers import gloo_scratch
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.op_costs import Cost, costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, Runtime
from graph_trainer.core.simulation.timeline import Timeline, play


@dataclass(frozen=True, slots=True)
class Simulation:
    """The step of one rank on some hardware."""

    joint: JointGraph
    hardware: Hardware
    runtime: Runtime
    collectives: list[Collective]
    memory: Memory
    costs: dict[fx.Node, Cost]
    timeline: Timeline

    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator takes from the device: on a GPU the segments of
        the caching allocator, elsewhere the bytes alive at the peak. n log n in storages."""
        if self.hardware.device == "cuda":
            return reserved_bytes(self.memory, self.runtime.pool_of)
        return self.memory.peak_bytes


def simulate(
    joint: JointGraph,
    hardware: Hardware,
    *,
    optimizer_bytes: int = 0,
    accumulated_bytes: int = 0,
    fused: bool = False,
    runtime: Runtime = GRAPH_TRAINER,
) -> Simulation:
    """Simulate the graph of one rank as it is now. Linear in nodes.

    Args:
        joint: the graph.
        hardware: the machine.
        optimizer_bytes: optimizer state that is alive during the step.
        accumulated_bytes: gradients of earlier microbatches that are alive during the step.
        fused: whether the backend compiles; elementwise nodes are then fused.
        runtime: the program that runs the step.

    Raises:
        VerificationError: a collective cannot be read (see `collectives`).
    """
    issued = collectives(joint)
    cost = costs(joint, hardware, runtime.fusion(joint, fused))
    memory = predicted_memory(
        joint,
        optimizer_bytes=optimizer_bytes,
        accumulated_bytes=accumulated_bytes,
        fused=fused,
        device=hardware.device,
        runtime=runtime,
    )
    timeline = play(joint, issued, cost, hardware, runtime)
    return Simulation(joint, hardware, runtime, issued, memory, cost, timeline)


def predicted_memory(
    joint: JointGraph,
    *,
    optimizer_bytes: int = 0,
    accumulated_bytes: int = 0,
    fused: bool = False,
    device: str = "cuda",
    runtime: Runtime = GRAPH_TRAINER,
) -> Memory:
    """Predict the memory of a step, as `simulate` does. Linear in nodes.

    Args:
        joint: the graph.
        optimizer_bytes, accumulated_bytes, fused, runtime: as for `simulate`.
        device: "cpu", where gloo allocates scratch memory; or "cuda".
    """
    return memory_of(
        joint,
        optimizer_bytes=optimizer_bytes,
        accumulated_bytes=accumulated_bytes,
        not_allocated=runtime.fusion(joint, fused).kept_inside,
        kept_until=runtime.kept_until(joint),
        # On a CPU gloo runs. NCCL allocates its buffers once, outside the caching allocator.
        scratch=gloo_scratch(joint) if device == "cpu" else None,
    )
