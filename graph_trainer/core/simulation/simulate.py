"""Simulate a step on some hardware: collectives, memory, costs, timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from torch import fx

from graph_trainer.core.analysis.collectives import Collective, collectives
from graph_trainer.core.analysis.fsdp_copies import copies_into_gathers
from graph_trainer.core.analysis.memory import Memory, memory_of
from graph_trainer.core.graph.content import unchanging
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.simulation.allocator import reserved_bytes
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.fusion import NO_FUSION, Fusion, read_until
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.host import PLAIN, Dispatch, host_seconds
from graph_trainer.core.simulation.op_costs import Cost, costs
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, Runtime
from graph_trainer.core.simulation.timeline import Timeline, play


class OtherMemory(NamedTuple):
    """What the memory of a step on this rank depends on, beside the graph and its inputs."""

    optimizer_bytes: int = 0
    """Optimizer state, from the second step on."""
    accumulated_bytes: int = 0
    """Gradients of earlier microbatches."""
    fused: bool = False
    """Whether the backend fuses ops, so that some results are never stored."""
    in_regions: bool = False
    """Whether it fuses only within the regions of `find_regions`."""
    expert_imbalance: float = 1.0
    """What the experts of this rank receive in every layer, in times of an even share. Memory alone
    counts it: time is that of even shares."""
    earlier_microbatches: int = 0
    """Microbatches of a pipeline whose forward has run and whose backward has not."""

    @property
    def imbalance_text(self) -> str:
        """The imbalance as the end of a message about memory, empty for even shares."""
        if self.expert_imbalance == 1:
            return ""
        return f" with OtherMemory.expert_imbalance = {self.expert_imbalance:g}"


_NOT_OF_KERNELS = {"host", "node_bytes_per_second", "network_bytes_per_second"}
"""Fields of a profile on which the costs of kernels do not depend."""

NO_OTHER_MEMORY = OtherMemory()
"""For a run without optimizer and microbatches."""


class Need(NamedTuple):
    """The memory that a step needs on a device, in bytes."""

    alive: int
    """The most bytes alive at once."""
    allocated: int
    """The bytes that the allocator takes for them, with gaps."""
    total: int
    """The bytes that the device must have. Memory limits, and the memory of devices, are compared
    with it."""


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
    other: OtherMemory = NO_OTHER_MEMORY
    dispatch: Dispatch = PLAIN
    fusion: Fusion = field(default=NO_FUSION, repr=False)
    host_seconds: Mapping[fx.Node, float] = field(default_factory=dict, repr=False)
    """By node, what the host takes to issue it."""

    def again(self) -> Simulation:
        """Simulate the graph with the sizes to expect now (see `DataSizes`), for memory too."""
        other = self.other._replace(expert_imbalance=1.0)
        return simulate(self.joint, self.hardware, other, self.runtime, self.dispatch)

    def retimed(self, hardware: Hardware) -> Simulation:
        """Time the step on a profile with other speeds, without simulating its memory again. Where
        the profile differs in links or in the host alone, the costs of kernels stay as they are,
        and where the host is the same, so do its seconds."""
        with unchanging(self.joint.graph):
            changed = {
                f.name
                for f in fields(Hardware)
                if getattr(hardware, f.name) != getattr(self.hardware, f.name)
            }
            cost, issue = self.costs, self.host_seconds
            if not changed <= _NOT_OF_KERNELS:
                cost = costs(self.joint, hardware, self.fusion)
            if "host" in changed:
                issue = host_seconds(
                    *(self.joint, cost, self.fusion, hardware, self.runtime, self.dispatch),
                    self.other.fused,
                )
            beside = copies_into_gathers(self.joint.graph) if self.runtime.is_torchtitan else {}
            timeline = play(self.joint, self.collectives, cost, hardware, issue, beside)
        return replace(self, hardware=hardware, costs=cost, timeline=timeline, host_seconds=issue)

    def need(self) -> Need:
        """Return the memory that the step needs on its device, as `need_of`."""
        return need_of(self.memory, self.hardware, self.runtime)


def simulate(
    joint: JointGraph,
    hardware: Hardware,
    other: OtherMemory = NO_OTHER_MEMORY,
    runtime: Runtime = GRAPH_TRAINER,
    dispatch: Dispatch = PLAIN,
) -> Simulation:
    """Simulate the current graph of one rank on the device of `hardware`. Linear in nodes.

    Args:
        dispatch: how the host issues what is not compiled.

    Raises as `collectives` does.
    """
    with unchanging(joint.graph):
        issued = collectives(joint)
        fusion = runtime.fusion(joint, other.fused, other.in_regions)
        cost = costs(joint, hardware, fusion)
        memory = predicted_memory(joint, hardware, other, runtime, fusion)
        issue = host_seconds(joint, cost, fusion, hardware, runtime, dispatch, other.fused)
        beside = copies_into_gathers(joint.graph) if runtime.is_torchtitan else {}
        timeline = play(joint, issued, cost, hardware, issue, beside)
    return Simulation(
        joint=joint,
        hardware=hardware,
        runtime=runtime,
        collectives=issued,
        memory=memory,
        costs=cost,
        timeline=timeline,
        other=other,
        dispatch=dispatch,
        fusion=fusion,
        host_seconds=issue,
    )


def predicted_memory(
    joint: JointGraph,
    hardware: Hardware,
    other: OtherMemory = NO_OTHER_MEMORY,
    runtime: Runtime = GRAPH_TRAINER,
    fusion: Fusion | None = None,
) -> Memory:
    """Predict the memory of a step, as `simulate` does. Linear in nodes.

    Args:
        fusion: the fusion of the runtime, if it is known; None to compute it.
    """
    with unchanging(joint.graph):
        fusion = fusion or runtime.fusion(joint, other.fused, other.in_regions)
        # buffers that a kernel reuses and scratch memory do not depend on what experts receive: a
        # kernel reads and writes rows of one number, and an all-to-all takes no scratch memory
        kept = read_until(joint, fusion)
        for storage, place in runtime.kept_until(joint).items():
            kept[storage] = max(place, kept.get(storage, place))
        return memory_of(
            joint,
            optimizer_bytes=other.optimizer_bytes,
            accumulated_bytes=other.accumulated_bytes,
            not_allocated=fusion.kept_inside,
            kept_until=kept,
            scratch=scratch_bytes(joint, hardware.device),
            host_is_device=hardware.device == "cpu",
            expert_imbalance=other.expert_imbalance,
            earlier_microbatches=other.earlier_microbatches,
        )


def need_of(memory: Memory, hardware: Hardware, runtime: Runtime = GRAPH_TRAINER) -> Need:
    """Compute the memory that a step needs on a device. n log n in storages.

    A GPU needs the segments of the caching allocator, and the bytes that its profile reserves for
    the driver and the communication library. A CPU allocates byte by byte, and needs the bytes
    alive.
    """
    alive = allocated = memory.peak_bytes
    if hardware.device == "cuda":
        allocated = reserved_bytes(memory, runtime.pool_of)
    return Need(alive, allocated, allocated + hardware.reserved_bytes)
