"""Put the starts and waits of all collectives where communication overlaps with compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.overlap.remarks import remarks_on
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.passes.overlap.scheduler import KEY, ScheduleOverlapOptions, Scheduler
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.timeline import play
from graph_trainer.core.units import GIB


@dataclass(frozen=True, slots=True)
class Decided:
    """An order, and the graphs that it is for."""

    program: tuple[object, ...]
    """By node, its op and the places of its inputs: equal for batches of other shapes."""
    order: list[int]
    """The places of the old order, in the new one."""


@graph_pass(
    stage=Stage.SCHEDULE,
    summary="Start collectives early and wait late, by the simulator's clock",
    options_type=ScheduleOverlapOptions,
    needs_hardware=lambda options, settings: True,
    optional=True,
)
def schedule_overlap(
    joint: JointGraph, options: ScheduleOverlapOptions, context: PassContext
) -> None:
    """Put every collective's start and wait where communication overlaps with compute.

    Simulates the graph in its own order, and deviates from that order where communication can
    overlap: parameters are gathered ahead, gradients reduced as soon as they are computed and
    waited for when the reduction has ended, other collectives started before compute that they do
    not need, and such compute runs while other compute waits (see `Scheduler`).

    Changes the order of nodes only, and not that of nodes that write the same memory, draw random
    numbers or have effects. No gather moves from backward into forward. Gathers keep their order,
    and so do reductions of whole gradients, and all other collectives.

    Cannot hang: the ranks of a group have the same schedule graph (see `schedule_graph`) and decide
    alike; where batches or tensor-parallel parts have unlike sizes, so that ranks would decide
    differently, none of them moves anything. Bounds memory: the predicted peak grows by
    `max_peak_growth` at most, as predicted for a rank that stores the most rows of every
    parameter. No heavy node overtakes more than `max_consecutive_compute` others, and none
    overtakes while a reduction is ready that may not start yet. n log n in nodes.

    Another graph of the step, for a batch of another shape, gets the order of the first: its rank
    captures it alone, and must issue the collectives that the other ranks issue. What that order
    costs in memory is not bounded; a remark says so where it is more than was allowed.

    Raises:
        VerificationError: a collective that cannot be described (see `collectives`).
    """
    hardware = context.hardware_for(joint)
    graph = ScheduleGraph(joint, hardware, context.settings.other_memory(joint).fused)
    program = _program(joint)
    decided: Decided | None = context.decided
    again = decided is not None and decided.program == program
    if decided is not None and again:
        order = decided.order
    else:
        order = Scheduler(graph, options).run()
        if not context.agreement.same(_communication(graph, order)):
            joint.remarks.append(
                "nothing moved: the ranks would order their collectives otherwise, their batches "
                "or their tensor-parallel parts being of unlike sizes"
            )
            order = sorted(order)
    joint.decisions[schedule_overlap.name] = Decided(program, order)
    if order == sorted(order):
        return
    before, peak = play(joint, graph.issued, graph.cost, hardware), _peak_bytes(joint, hardware)
    *body, output = [graph.nodes[place] for place in order]
    for node in body:
        output.prepend(node)
    after, new_peak = play(joint, graph.issued, graph.cost, hardware), _peak_bytes(joint, hardware)
    if again and new_peak > peak * (1 + options.max_peak_growth):
        joint.remarks.append(
            f"a batch of another shape, in the order of the first: {new_peak / peak - 1:.1%} more "
            f"memory at the peak ({new_peak / GIB:.2f} GiB), where {KEY}.max_peak_growth allows "
            f"{options.max_peak_growth:.1%}"
        )
    joint.remarks += remarks_on(graph, order, before, after)


def _peak_bytes(joint: JointGraph, hardware: Hardware) -> int:
    return lifetimes(joint, scratch=scratch_bytes(joint, hardware.device)).peak_bytes


def _communication(graph: ScheduleGraph, order: Sequence[int]) -> list[int]:
    """Return the order of collectives and waits alone, each by its place before."""
    nodes = [graph.nodes[place] for place in sorted(order)]
    ordinal = {n: i for i, n in enumerate(n for n in nodes if is_collective(n) or is_wait(n))}
    return [ordinal[n] for place in order if (n := graph.nodes[place]) in ordinal]


def _program(joint: JointGraph) -> tuple[object, ...]:
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    return tuple(
        (str(node.target), *(place[source] for source in node.all_input_nodes)) for node in place
    )
