"""All that can be said of a step on some hardware: collectives, memory, costs, timeline."""

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
    """One rank's step on some hardware."""

    joint: JointGraph
    hardware: Hardware
    runtime: Runtime
    collectives: list[Collective]
    memory: Memory
    costs: dict[fx.Node, Cost]
    timeline: Timeline

    def reserved_bytes(self) -> int:
        """What the allocator takes from the device: on a GPU the caching allocator's segments,
        elsewhere what is alive at the peak. n log n in storages."""
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
    """Simulate one rank's graph as it is now. Linear in nodes.

    Arguments:
        optimizer_bytes: optimizer state that is alive during the step.
        accumulated_bytes: gradients of earlier microbatches that are alive during the step.
        fused: whether the backend compiles; elementwise nodes are then fused.
        runtime: who runs the step.

    Raises:
        VerificationError: a collective of which nothing can be said (see `collectives`).
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
    """What is alive at every node: the memory of `simulate`, which the memory limit asks too.

    Arguments:
        device: "cpu", where gloo allocates inside collectives; or "cuda".
        optimizer_bytes, accumulated_bytes, fused, runtime: as `simulate` has them.
    """
    return memory_of(
        joint,
        optimizer_bytes=optimizer_bytes,
        accumulated_bytes=accumulated_bytes,
        not_allocated=runtime.fusion(joint, fused).kept_inside,
        held_longer=runtime.held_longer(joint),
        # gloo is what runs on a CPU; nccl's buffers are its own, made once
        scratch=gloo_scratch(joint) if device == "cpu" else None,
    )
