"""Put the starts and waits of all collectives where communication overlaps with compute."""

from __future__ import annotations

import itertools
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
from graph_trainer.core.passes.overlap.scheduler import ScheduleOverlapOptions, Scheduler
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.timeline import Timeline, play
from graph_trainer.core.units import gib

_HOST_GROWTH = 0.03
"""The part of the graph's own peak, inputs aside, that may be added on CPU ranks. They share the
host's memory, and gloo's threads take theirs when they run, which is later than the simulator says.
"""
_TRIES = 3
"""Orders that are tried at most where memory is short, before the one that leaves the peak."""
_MARGIN = 0.9
"""By what the next order's growth is below what would just fit."""
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
    differently, none of them moves anything. Bounds memory: what a step needs grows up to the
    memory limit at most, or up to what a device of the hardware's profile has, gaps of the
    allocator included, on CPU ranks by 3% at most, and at no node by more than
    `max_in_flight_mib`, where that is set. Where this costs time, the remark says so. No heavy node
    overtakes more than `max_consecutive_compute` others, and none overtakes while a reduction is
    ready that may not start yet. n log n in nodes.

    Another graph of the step, for a batch of another shape, gets the order of the first: its rank
    captures it alone, and must issue the collectives that the other ranks issue. What that order
    costs in memory is not bounded; a graph that needs more than the limit is refused.

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
    bound = ""
    if not follows:
        order, bound = _within_memory(joint, graph, options, context)
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
        joint.remarks += [bound] if bound else []
        return

    before = _simulated(joint, graph)
    put_in_order(graph, order)
    after = _simulated(joint, graph)
    summary, *lines = _remarks_on(joint, graph, order, before, after)
    joint.remarks += ["; ".join([summary, bound] if bound else [summary]), *lines]


def put_in_order(graph: ScheduleGraph, order: Sequence[int]) -> None:
    """Put the nodes in an order of their places."""
    *body, output = [graph.nodes[place] for place in order]
    for node in body:
        output.prepend(node)
    if any(place > later for place, later in itertools.pairwise(order)):
        # an op that moved takes its results along: until the last is taken out, all are alive
        for node in body:
            for getitem in reversed(getitems_of(node)):
                node.append(getitem)


def _within_memory(
    joint: JointGraph,
    graph: ScheduleGraph,
    options: ScheduleOverlapOptions,
    context: PassContext,
) -> tuple[list[int], str]:
    """Return the places in the order that overlaps most within the memory that is left, the same on
    all ranks; and what bounds it and what that costs, in words, or "" where nothing does.

    The account of the scheduler knows no gaps of the allocator: where these are more than is left,
    the peak may grow by less, and in the end not at all.
    """
    old = range(len(graph.nodes))

    def needed(order: Sequence[int]) -> int:
        put_in_order(graph, order)
        needs = context.needed_on_all_ranks(joint)
        put_in_order(graph, old)
        return needs

    def seconds(order: Sequence[int]) -> float:
        put_in_order(graph, order)
        timeline = _simulated(joint, graph)
        put_in_order(graph, old)
        return timeline.step_seconds

    unbounded = Scheduler(graph, options, None).run()
    most, allowed, needs = options.max_in_flight_mib, context.allowed_bytes(joint), needed(old)
    on_host = graph.hardware.device == "cpu"
    if on_host:
        scratch = scratch_bytes(joint, graph.hardware.device)
        peak = context.agreement.all_reduce_max(lifetimes(joint, scratch=scratch).peak_bytes)
        allowed = min(allowed, needs + int(peak * _HOST_GROWTH))
    if most is None and needed(unbounded) <= allowed:
        return unbounded, ""
    growth = headroom = max(0, allowed - needs)
    for tries in itertools.count(1):
        order = Scheduler(graph, options, growth).run()
        if not growth or (over := needed(order) - allowed) <= 0:
            break
        fits = _MARGIN * headroom / (headroom + over)  # if gaps grow with what is in flight
        growth = int(growth * fits) if tries < _TRIES else 0
    if not growth and needed(order) > max(allowed, needs):
        order = [*old]
    bounded = seconds(order)
    if (cost := bounded - seconds(unbounded)) < _LEAST:
        return order, ""
    by = f"ScheduleOverlapOptions.max_in_flight_mib = {most}"
    if most is None and on_host:
        by = f"{_HOST_GROWTH:.0%} of the peak, which is what CPU ranks may add,"
    elif most is None:
        by = f"the memory that is left, {gib(headroom)} of {gib(allowed)} GiB,"
    return order, (
        f"{by} bounds what is in flight: with more a step would take {cost * 1e3:,.1f} ms "
        f"({cost / bounded:.1%}) less"
    )


def _simulated(joint: JointGraph, graph: ScheduleGraph) -> Timeline:
    """Simulate the joint graph in the order that it has now."""
    with unchanging(joint.graph):
        return play(joint, graph.issued, graph.cost, graph.hardware)


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
