"""Put the starts and waits of all collectives where communication overlaps with compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from graph_trainer.core.analysis.collective_purpose import traffic_of
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.content import unchanging
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import getitems_of, is_collective, is_wait
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.passes.overlap.scheduler import KEY, ScheduleOverlapOptions, Scheduler
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.timeline import Timeline, play
from graph_trainer.core.units import GIB

_LEAST = 5e-6
"""Seconds by which exposed time must change for a line of its own."""


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
    numbers or have effects. The getitems of an op follow it directly. No gather moves from backward
    into forward. Gathers keep their order, and so do reductions of whole gradients, and all other
    collectives.

    Cannot hang: the ranks of a group have the same schedule graph (see `schedule_graph`) and decide
    alike; where batches or tensor-parallel parts have different sizes, so that ranks would decide
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
    with unchanging(joint.graph):
        graph = ScheduleGraph(joint, hardware, context.settings.other_memory(joint).fused)
    # by node, its op and the places of its inputs: equal for batches of other shapes
    program: list[object] = []
    for node in graph.nodes:
        program.append((str(node.target), *(graph.at[n] for n in node.all_input_nodes)))
    # the places of the old order, in the new one
    earlier, order = context.decided or (None, [])
    follows = earlier == program
    if not follows:
        order = Scheduler(graph, options).run()
        # what the ranks must agree on: the order of collectives and waits, by their old order
        nodes = [n for n in graph.nodes if is_collective(n) or is_wait(n)]
        ordinal = {graph.at[node]: number for number, node in enumerate(nodes)}
        if not context.agreement.same([ordinal[place] for place in order if place in ordinal]):
            joint.remarks.append(
                "nothing moved: the ranks would order their collectives otherwise, their batches "
                "or their tensor-parallel parts having different sizes"
            )
            order = sorted(order)
    joint.decisions[schedule_overlap.name] = (program, order)
    if order == sorted(order):
        return

    def simulated() -> Timeline:
        with unchanging(joint.graph):
            return play(joint, graph.issued, graph.cost, hardware)

    def peak_bytes() -> int:
        return lifetimes(joint, scratch=scratch_bytes(joint, hardware.device)).peak_bytes

    before, peak = simulated(), peak_bytes() if follows else 0
    *body, output = [graph.nodes[place] for place in order]
    for node in body:
        output.prepend(node)
    # an op that moved takes its results along: until the last is taken out, all are alive
    for node in body:
        for getitem in reversed(getitems_of(node)):
            node.append(getitem)
    after = simulated()
    if follows and (new_peak := peak_bytes()) > peak * (1 + options.max_peak_growth):
        joint.remarks.append(
            f"a batch of another shape, in the order of the first: {new_peak / peak - 1:.1%} more "
            f"memory at the peak ({new_peak / GIB:.2f} GiB), where {KEY}.max_peak_growth allows "
            f"{options.max_peak_growth:.1%}"
        )
    joint.remarks += _remarks_on(joint, graph, order, before, after)


def _remarks_on(
    joint: JointGraph, graph: ScheduleGraph, order: Sequence[int], *played: Timeline
) -> list[str]:
    """Describe what moved, in one line, and the collectives whose waits changed, a line each.

    A collective's line has how long compute waits for it now. `order` has the places of the old
    order, in the new one; `played` is before and after. Linear in nodes.
    """
    traffic = traffic_of(graph.issued, dict(joint.gradients()))
    old, new = _computed_before(graph, range(len(order))), _computed_before(graph, order)
    earlier = {graph.nodes[place]: old[place] - new[place] for place in graph.group}
    was: dict[fx.Node, float] = defaultdict(float)
    now: dict[fx.Node, float] = defaultdict(float)
    for exposed, timeline in zip((was, now), played, strict=True):
        for each in timeline.exposed:
            exposed[each.collective.node] += each.seconds
    sums = []
    for kind in dict.fromkeys(traffic.values()):
        nodes = [node for node in earlier if traffic[node] is kind]
        moved = sum(earlier[node] > 0 for node in nodes)
        seconds = [sum(waits[node] for node in nodes) for waits in (was, now)]
        sums.append(
            f"{kind.value.replace('_', ' ')}: {moved} of {len(nodes)} start earlier, exposed "
            f"{seconds[0] * 1e3:,.1f} ms before and {seconds[1] * 1e3:,.1f} ms now"
        )
    lines = [
        f"{c.kind} {c.where} starts {earlier[c.node]} computing nodes earlier, exposed "
        f"{was[c.node] * 1e3:,.3f} ms before and {now[c.node] * 1e3:,.3f} ms now"
        for c in graph.issued
        if c.node in earlier and abs(was[c.node] - now[c.node]) > _LEAST
    ]
    return ["; ".join(sums), *lines]


def _computed_before(graph: ScheduleGraph, order: Sequence[int]) -> dict[int, int]:
    """Count, by place, the nodes that compute before it in this order."""
    computed, passed = {}, 0
    for place in order:
        computed[place] = passed
        passed += graph.seconds[place] > 0 and place not in graph.group
    return computed
