"""All that can be said of a step on some hardware: collectives, memory, costs, timeline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_trainer.analysis.collectives import Collective, collectives
from graph_trainer.analysis.costs import Cost, costs
from graph_trainer.analysis.fusion import fuse, no_fusion
from graph_trainer.analysis.hardware import Hardware
from graph_trainer.analysis.memory import Memory, memory_of
from graph_trainer.analysis.timeline import Timeline, play
from graph_trainer.joint_graph import JointGraph


@dataclass(frozen=True, slots=True)
class Simulation:
    """One rank's step on some hardware."""

    joint: JointGraph
    hardware: Hardware
    collectives: list[Collective]
    memory: Memory
    costs: dict[fx.Node, Cost]
    timeline: Timeline


def simulate(
    joint: JointGraph,
    hardware: Hardware,
    *,
    optimizer_bytes: int = 0,
    accumulated_bytes: int = 0,
    fused: bool = False,
) -> Simulation:
    """Simulate one rank's graph as it is now. Linear in nodes.

    Arguments:
        optimizer_bytes: optimizer state that is alive during the step.
        accumulated_bytes: gradients of earlier microbatches that are alive during the step.
        fused: whether the backend compiles; elementwise nodes are then fused.

    Raises:
        VerificationError: a collective of which nothing can be said (see `collectives`).
    """
    issued = collectives(joint)
    fusion = fuse(joint) if fused else no_fusion()
    cost = costs(joint, hardware, fusion)
    memory = memory_of(
        joint,
        optimizer_bytes=optimizer_bytes,
        accumulated_bytes=accumulated_bytes,
        not_allocated=fusion.kept_inside,
        scratch=collective_scratch(issued, hardware),
    )
    return Simulation(joint, hardware, issued, memory, cost, play(joint, issued, cost, hardware))


def collective_scratch(issued: list[Collective], hardware: Hardware) -> dict[fx.Node, int]:
    """Bytes that the communication library allocates inside each collective."""
    scratch = {}
    for each in issued:
        if len(each.ranks) == 1:
            continue
        if "all_gather" in each.kind:
            num = hardware.all_gather_scratch * (each.input_bytes + each.output_bytes)
        elif "reduce_scatter" in each.kind:
            num = hardware.reduce_scatter_scratch * each.input_bytes
        else:
            continue
        scratch[each.node] = int(num)
    return scratch
